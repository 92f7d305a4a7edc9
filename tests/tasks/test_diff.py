"""task=diff: whether two runs agree up to rounding, and the first step at which they differ."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from many_runs import make_run

from runner.records.custom_code import CustomCode, CustomModule
from runner.records.logged_numbers import compare_numbers, default_tolerance
from runner.tasks.rerun import possible_causes

FP32 = default_tolerance(["fp64", "fp32"])


def write(path: Path, rows: Sequence[Mapping[str, float | None]], first: int = 1) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "epoch": 1, **row}) + "\n" for step, row in enumerate(rows, start=first)]
    (path / "metrics.jsonl").write_text("".join(lines))
    return path


@pytest.mark.parametrize(
    ("differences", "differ_at"),
    [
        ([0, 0, 0], None),
        ([1e-6, 8e-6, 6e-5, 5e-4, 4e-3], None),  # grows as rounding errors do
        ([1e-6, 1e-7, 1e-3, 0], 3),
        ([1e-2], 1),
        ([0, 0, math.inf], 3),
    ],
)
def test_a_sudden_difference_is_found(tmp_path: Path, differences: list[float], differ_at: int | None) -> None:
    one = write(tmp_path / "one", [{"train/loss": 0.5, "perf/step_time_s": 1.0}] * len(differences))
    changed = [{"train/loss": 0.5 * (1 + d) if d < 1 else None, "perf/step_time_s": 2.0} for d in differences]
    found = compare_numbers((one, write(tmp_path / "other", changed)), FP32)
    assert (found.first_unexplained.step if found.first_unexplained else None) == differ_at
    assert found.num_steps == (differ_at or len(differences))
    exact = compare_numbers((one, tmp_path / "other"), tolerance=0.0, grows=False).first_unexplained
    assert (exact.step if exact else None) == next((s for s, d in enumerate(differences, start=1) if d), None)


def test_the_command_names_what_differs(
    here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"data": "digits", "samples": {"train": 100}}
    one = make_run(tmp_path / "runs" / "one", "optimizer.lr=0.1", **facts)
    other = make_run(tmp_path / "runs" / "other", "optimizer.lr=0.2", **facts, state="failed", step=3)
    for path, loss in ((one, 0.25), (other, 0.5)):
        write(path, [{"train/loss": 1.0}, {"train/loss": 1.0}, {"train/loss": loss}])
    assert here("task=diff", f"run={one}", f"diff.with={other}") == 1
    out = capsys.readouterr().out
    assert ", failed at step 3)\ndiffers" in out
    assert "differs  optimizer.lr: was 0.1, is 0.2\n" in out
    assert "numbers  differ at step 3: train/loss was 0.25, is 0.5: a relative difference of 5.0e-01, of" in out
    for rows, text in (([1.0, 1.0, 0.25], "3 steps"), ([1.0], "1 step")):
        equal = make_run(tmp_path / "runs" / f"{len(rows)}", "optimizer.lr=0.1", **facts)
        write(equal, [{"train/loss": loss} for loss in rows])
        assert here("task=diff", f"run={one}", f"diff.other={equal}") == 0
        assert f"numbers  are equal in {text}\n" in capsys.readouterr().out
    assert here("task=diff", f"run={one}", f"diff.with={other}", "diff.tolerance=0.5") == 0
    assert "numbers  agree to 5.0e-01 in 3 steps" in capsys.readouterr().out

    evaluated = make_run(tmp_path / "runs" / "evaluated", **facts | {"task": "evaluate"})
    mnist = make_run(tmp_path / "runs" / "mnist", data="mnist", samples={"train": 60})
    later = write(make_run(tmp_path / "runs" / "later", **facts), [{"train/loss": 1.0}], first=7)
    names = sorted(map(str, tmp_path.rglob("*")))
    for words, message in (
        ((), "task=diff needs the run to compare with run=; add diff.with=RUN_DIR"),
        ((f"diff.with={tmp_path}",), f"diff.with={tmp_path} is no run directory (it has no overrides.yaml)"),
        ((f"diff.with={evaluated}",), "is a run of task=evaluate; task=diff compares training runs"),
        ((f"diff.with={mnist}",), "was trained on data=mnist with 60 train samples, and "),
        ((f"diff.with={later}",), "has no logged step in common with run="),
        ((f"diff.with={one}/../one",), f"diff.with={one}/../one is the same run as run={one}; name two different runs"),
        ((f"diff.with={other}", "diff.tolerance=inf"), "diff.tolerance=inf must be finite"),
        ((f"diff.with={other}", "diff.tolerance=-1"), "diff.tolerance=-1.0 must be at least 0"),
        ((f"diff.with={other}", "diff.tolerance=nan"), "diff.tolerance=nan must be at least 0"),
    ):
        assert here("task=diff", f"run={one}", *words) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    assert here("diff.tolerance=1") == 2
    assert "diff.tolerance: no effect without task=diff" in capsys.readouterr().err
    assert sorted(map(str, tmp_path.rglob("*"))) == names


def test_evaluations_may_differ_by_half_of_the_digits(tmp_path: Path) -> None:
    one, other, wrong = (write(tmp_path / str(loss), [{"val/loss": loss}]) for loss in (1.0, 1.003, 1.03))
    assert compare_numbers((one, other), FP32).first_unexplained is None
    assert compare_numbers((one, wrong), FP32).first_unexplained is not None


def test_a_module_that_only_the_second_run_imports_is_named(tmp_path: Path) -> None:
    file = tmp_path / "added.py"
    file.touch()
    codes = [
        CustomCode({n: CustomModule(str(file), f"{n}.py", True) for n in names}, {n: b"" for n in names})
        for names in (["same"], ["same", "added"])
    ]
    runs = [make_run(tmp_path / str(code.hash), code=code.record) for code in codes]
    for code, path in zip(codes, runs, strict=True):
        code.write(path)
    (line,) = [line for line in possible_causes(*runs) if line.startswith("code: ")]
    assert line.startswith(f"code: {file}: compare ")
