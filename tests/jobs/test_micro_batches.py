"""micro_batches=auto: doubled until a step fits into memory, agreed by all ranks, recorded."""

from pathlib import Path

import pytest
import yaml
from parity import COMMON, assert_equal
from ranks import RankError
from worlds import build_experiment, configure, run

from runner.errors import InputError

HUNGRY = (
    "model=linear",
    "model._target_=custom_models.Hungry",
    "data=toy",
    "data.num_train=350",
    "batch_size=90",
    *COMMON,
)


@pytest.mark.parametrize(
    ("world_size", "words", "count"),
    [
        pytest.param(1, ("+model.lacks=cpu",), 8, marks=pytest.mark.thorough),
        (2, ("parallel=ddp", "+model.rank=1"), 4),
        pytest.param(2, ("parallel=allreduce", "+model.rank=1", "+model.lacks=cpu"), 4, marks=pytest.mark.thorough),
        pytest.param(2, ("parallel=local_sgd", "parallel.warmup_steps=99"), 4, marks=pytest.mark.thorough),
        pytest.param(3, ("parallel=zero", "+model.rank=2"), 4, marks=pytest.mark.soak),
    ],
    ids=lambda value: "-".join(value[:1]) if isinstance(value, tuple) else None,
)
def test_micro_batches_are_doubled_until_they_fit(
    world_size: int, words: tuple[str, ...], count: int, tmp_path: Path
) -> None:
    found = run(tmp_path / "auto", world_size, *HUNGRY, *words, "micro_batches=auto")
    assert_equal(found, run(tmp_path / "one", 1, *HUNGRY, "+model.holds=90", f"micro_batches={count}"))
    assert found.result["state"] == "finished" and found.result["error"] is None
    # A resume or a rerun uses the recorded number.
    assert yaml.safe_load((found.path / "config.yaml").read_text())["micro_batches"] == count
    recorded = yaml.safe_load((found.path / "overrides.yaml").read_text())
    assert [word for word in recorded if word.startswith("micro_batches")] == [f"micro_batches={count}"]
    log = (found.path / "log.txt").read_text()
    assert "Traceback" not in log
    assert f"micro_batches=auto: out of memory with {count // 2}, trying {count}" in log
    assert not (found.path / "logs").exists()  # where warnings of other ranks would be


@pytest.mark.parametrize(
    ("words", "message", "count"),
    [
        (("batch_size=4", "+model.holds=0"), "ran out of memory", 4),  # it never fits
        (("+model.lacks=luck",), "RuntimeError: no luck", 1),  # another failure is not repeated
    ],
)
def test_a_job_that_fails_has_one_directory(words: tuple[str, ...], message: str, count: int, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=message):
        run(tmp_path, 1, *HUNGRY, *words, "micro_batches=auto")
    (path,) = (tmp_path / "run").iterdir()
    assert yaml.safe_load((path / "config.yaml").read_text())["micro_batches"] == count


def test_a_mode_whose_ranks_would_wait_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="cannot be planned, and with parallel=fsdp the other ranks would wait"):
        run(tmp_path, 2, *HUNGRY, "parallel=fsdp", "micro_batches=auto")
    assert not list(tmp_path.glob("run/*"))


def test_a_number_that_changes_batch_norm_is_reported(tmp_path: Path) -> None:
    words = (*HUNGRY, "+model.batch_norm=true", "max_steps=2")
    text = "BatchNorm normalizes each micro-batch separately, so that the results depend on this number"
    assert build_experiment(*words).warnings == build_experiment(*HUNGRY, "micro_batches=2").warnings == []
    assert build_experiment(*words, "micro_batches=2").warnings == [f"micro_batches=2: {text}"]
    pipeline = ("parallel=pipeline", "micro_batches=2")
    assert build_experiment(*words, *pipeline, world_size=2).warnings == [f"parallel.micro_batches=4: {text}"]
    log = (run(tmp_path, 1, *words, "+model.holds=50", "micro_batches=auto").path / "log.txt").read_text()
    assert "micro_batches=2: BatchNorm normalizes" in log
    assert "micro_batches=auto has chosen 2 by the free memory, which changes BatchNorm; for the same" in log


@pytest.mark.parametrize("value", ["0", "two"])
def test_other_values_are_refused(value: str) -> None:
    with pytest.raises(InputError, match=rf"^micro_batches={value} must be auto or n of at least 1"):
        configure(f"micro_batches={value}")
