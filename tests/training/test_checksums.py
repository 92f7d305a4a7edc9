"""The checksums of the samples that the first steps read: equal in every mode, and different for different data."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Commands
from torch.utils.data import IterableDataset
from worlds import Run, build_experiment, only_run, run

from runner.input.checksum import row_checksums, row_shapes, sample_checksum
from runner.records.logged_numbers import describe_other_samples
from runner.records.run_files import read_checksums

SEQUENCES = (f"--config-dir={Path(__file__).parents[1] / 'experiments' / 'sequences'}", "experiment=sequences")
SMALL = ("model=mlp", "model.hidden=[8]", "data.sample_shape=[1,8,8]", "batch_size=100", "logger=none", "epochs=2")
# A model with stages whose last batch, of 37 samples, leaves some ranks without samples of a micro-batch.
STEPS = 15


def test_a_checksum_depends_on_every_value_of_a_sample() -> None:
    @dataclasses.dataclass
    class Sample:
        image: Any
        label: int

    image = torch.arange(6.0).reshape(2, 3)
    samples = [
        *((image, 3), (image, 4), (image + 1e-7, 3), (image.double(), 3), {"a": image, "b": "text"}),
        *({"a": image, "b": "texts"}, {"a": image, "b": b"text"}, [np.arange(3), image], [np.arange(3) + 1, image]),
        *(Sample(image, 3), Sample(image, True), (image.bfloat16(),), (image.to(torch.complex64), None), image > 2),
    ]
    found = [sample_checksum(sample) for sample in samples]
    assert len({*found} - {math.nan}) == len(found) - 1  # the dataclass has the values of the first sample
    assert sample_checksum((image.T.contiguous().T, 3)) == found[0]  # the same values in another order in memory
    assert sample_checksum((object(), 3)) == sample_checksum((None, 3)) == sample_checksum(3)
    assert math.isnan(sample_checksum(image.to_sparse()))


def test_rows_of_a_batch_have_the_checksums_of_their_samples() -> None:
    inputs, targets = torch.randn(4, 2, 3), torch.arange(4)
    found = row_checksums((inputs, targets), 4, row_shapes((inputs[:1], targets[:1])))
    assert len({*found}) == 4
    assert found[2] == sample_checksum((inputs[2], targets[2]))
    padded = torch.nn.functional.pad(inputs, (0, 1))
    assert all(map(math.isnan, row_checksums((padded, targets), 4, row_shapes((inputs[:1], targets[:1])))))
    assert all(map(math.isnan, row_checksums((inputs, targets[:3]), 4, row_shapes((inputs, targets)))))


WORLDS = {
    "micro-batches": (1, "micro_batches=3"),
    "ddp": (2, "parallel=ddp", "micro_batches=2"),
    "fsdp": (3, "parallel=fsdp"),
    "pipeline": (2, "parallel=pipeline"),
    "tp": (2, "parallel=tp"),
    "ps": (3, "parallel=ps"),
    "local_sgd": (2, "parallel=local_sgd"),
    "workers": (2, "parallel=ddp", "loader.num_workers=1", "log_every=4"),
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("one"), 1, *SMALL)


@pytest.mark.parametrize(
    "world",
    [pytest.param(name, marks=[] if name in ("ddp", "pipeline") else pytest.mark.thorough) for name in WORLDS],
)
def test_checksums_are_equal_in_every_mode_and_world(world: str, one_process: Run, tmp_path: Path) -> None:
    num_ranks, *words = WORLDS[world]
    expected = read_checksums(one_process.path)
    assert [*expected[0]] == [*range(1, STEPS + 1)] and len({*expected[0].values()}) == STEPS and expected[1]
    assert read_checksums(run(tmp_path, num_ranks, *SMALL, *words).path) == expected


def test_samples_of_different_lengths_and_random_transforms_have_checksums(tmp_path: Path) -> None:
    for words in ((*SEQUENCES, "epochs=1", "batch_size=8", "logger=none"), (*SMALL, "transforms=flip_crop")):
        one, two = (run(tmp_path / str(n), n, *words, f"parallel={mode}") for n, mode in ((1, "none"), (2, "ddp")))
        assert read_checksums(one.path) == read_checksums(two.path) and read_checksums(one.path)[0]


class Numbers(IterableDataset[Any]):
    def __init__(self, train: bool):
        self.count = 50 if train else 10

    def __iter__(self) -> Iterator[Any]:
        return ((torch.full((20,), float(number)), torch.tensor([1.0])) for number in range(self.count))


def test_a_stream_has_checksums() -> None:
    words = (
        "model=linear",
        "data=random",
        "data._target_=test_checksums.Numbers",
        "batch_size=16",
        "max_steps=9",
        "eval_batches=1",
    )
    dropped = ("~data.num_train", "~data.num_val", "~data.seed")
    experiments = [
        build_experiment(*words, *dropped, "parallel=ddp" if size > 1 else "parallel=none", rank=rank, world_size=size)
        for size in (1, 2)
        for rank in range(size)
    ]
    found = []
    for experiment in experiments:
        experiment.train_loader.checksum_steps = 3
        found.append([step.checksum for step in experiment.train_loader.steps(0)])
    assert found[0][3] is None and [a + b for a, b in zip(found[1][:3], found[2][:3], strict=True)] == found[0][:3]


def test_a_resumed_run_has_the_checksums_of_the_steps_that_it_repeats(one_process: Run, tmp_path: Path) -> None:
    part = run(tmp_path, 1, *SMALL, "log_every=5", "max_steps=7", "checkpoint.every_steps=7")
    (part.path / "metrics.jsonl").write_text((part.path / "metrics.jsonl").read_text().partition("\n")[0] + "\n")
    whole = run(tmp_path, 2, f"resume={part.path}", "max_steps=null", "parallel=ddp")
    found, expected = read_checksums(whole.path)[0], read_checksums(one_process.path)[0]
    assert [*found] == [1, 2, 3, 4, 5, *range(8, STEPS + 1)]  # steps 6 and 7 were not logged
    assert found == {step: expected[step] for step in found}


@pytest.mark.fault("a label changed between two runs", outcome="refused")
def test_a_changed_label_is_found(
    here: Callable[..., int], commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs, targets = torch.randn(60, 3).numpy(), (np.arange(60) % 3).astype(np.int64)
    words = ("data=arrays", "model=mlp", "model.hidden=[4]", "data.sample_shape=[3]", "data.num_outputs=3")
    files = [f"data.{name}.train={tmp_path / name}.npy" for name in ("inputs", "targets")]
    train = (
        *words,
        *files,
        "batch_size=10",
        "epochs=2",
        "logger=none",
        "threads=1",
        "precision=fp64",
        "val_fraction=0.2",
    )
    np.save(tmp_path / "inputs.npy", inputs)
    np.save(tmp_path / "targets.npy", targets)
    assert here(*train, "name=before") == here(*train, "name=same") == 0
    before, same = only_run(tmp_path, "before").path, only_run(tmp_path, "same").path
    assert describe_other_samples((before, same)) == []
    found = set()
    for index in (0, 17, 59):
        changed = targets.copy()
        changed[index] = (changed[index] + 1) % 3
        np.save(tmp_path / "targets.npy", changed)
        assert here(*train, f"name=after{index}") == 0
        after = only_run(tmp_path, f"after{index}").path
        capsys.readouterr()
        if index:
            assert here("task=diff", f"run={before}", f"diff.with={after}") == 1
            out = capsys.readouterr().out
        else:  # which starts ranks
            done = commands.forked("task=diff", f"run={before}", f"diff.with={after}", "diff.trace=true")
            assert done.returncode == 1
            out = done.stdout
            assert "trace    all recorded outputs and gradients agree if both runs read the current data" in out
        (line,) = [
            line for line in out.splitlines() if line.startswith("differs  data: the samples, or their values, in")
        ]
        found.add(line.rpartition(" in ")[2].split()[0])
    assert "step" in found
    assert here("task=rerun", f"run={before}", "name=again") == 0
    assert (
        "differs data: the samples, or their values, in" in (only_run(tmp_path, "again").path / "log.txt").read_text()
    )
