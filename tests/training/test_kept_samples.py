"""Samples that are kept: read once on a machine by its ranks and loader workers, and the same to the bit."""

import os
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from worlds import configure, run

from runner.distributed import memory_left
from runner.distributed.world import World
from runner.errors import InputError
from runner.training import datasets
from runner.training.augmentation import Augmented
from runner.training.datasets import load_data
from runner.training.kept_samples import CannotKeep, KeptSamples
from runner.training.loader import Loader
from runner.training.part import Part
from runner.training.precision import Precision
from runner.training.pytree import collate, tensors
from runner.training.sampler import Sampler

CPU = torch.device("cpu")
READS = "reads.txt"


class Traced(Dataset[Any]):
    """Writes down which sample is read: (3,) numbers and a class, the number as NumPy or Python have it."""

    def __init__(self, train: bool, folder: str, num_samples: int = 23) -> None:
        self.train, self.num_samples, self.trace = train, num_samples, Path(folder, READS)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        with self.trace.open("a") as file:
            file.write(f"{'train' if self.train else 'val'} {index}\n")
        inputs = np.random.default_rng([self.train, index]).standard_normal(3)
        return inputs.astype(np.float32), index % 2


class TracedBatches(Traced):
    def __getitems__(self, indices: list[int]) -> Any:
        samples = [self[index] for index in indices]
        return tuple(torch.from_numpy(np.array(part)) for part in zip(*samples, strict=True))


class Packed(Traced):
    """Keeps a byte of what it makes four of."""

    def __getitem__(self, index: int) -> Any:
        return self.unpacked(self.packed(index))

    def packed(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return torch.from_numpy(inputs).mul(40).to(torch.int8), torch.tensor(target)

    def unpacked(self, sample: Any) -> Any:
        inputs, targets = sample
        return inputs.to(torch.float32).div_(7), targets


class Mappings(Traced):
    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return {"inputs": (inputs, float(target)), "flag": torch.tensor(index > 3)}


class Drawing(Traced):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(3), 0


class DrawingLater(Traced):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(3) if index == 5 else torch.zeros(3), 0


class Growing(Traced):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1 + index // 5), 0


class Words(Traced):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3), "no"


class Broken(Traced):
    def __getitem__(self, index: int) -> Any:
        raise KeyError(f"no sample {index}")


class Collating(Traced):
    def collate(self, samples: list[Any]) -> Any:
        return samples


class Epochs(Traced):
    def in_epoch(self, epoch: int) -> Any:
        return self


def reads(folder: Path) -> Counter[str]:
    return Counter((folder / READS).read_text().splitlines())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Traced, TracedBatches, Packed, Mappings])
def test_what_is_kept_is_what_is_read(kind: type[Traced], num_workers: int, tmp_path: Path) -> None:
    kept = KeptSamples(kind(True, str(tmp_path)))
    loaders = [
        Loader(dataset, Sampler(23, 4), Precision("fp32", CPU), CPU, num_workers=num_workers)
        for dataset in (kept, kind(True, str(tmp_path)))
    ]
    try:
        for epoch in range(2):
            both = [
                [batch for step in loader.steps(epoch) for batch in step.micro_batches]
                for loader in loaders
            ]  # fmt: skip
            for found, expected in zip(*both, strict=True):
                assert found.indices == expected.indices
                pairs = zip(tensors(found.data), tensors(expected.data), strict=True)
                assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)
        (tmp_path / READS).write_text("")
        list(loaders[0].steps(2))
        assert not reads(tmp_path)
    finally:
        for loader in loaders:
            loader.close()
    for index in (0, 22):
        one, other = (tensors(collate([data[index]])) for data in (kept, kind(True, str(tmp_path))))
        assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))
    with pytest.raises(IndexError):
        kept[23]
    assert kept.num_samples == len(kept) == 23 and not hasattr(kept, "nothing")


def test_what_is_packed_takes_its_own_bytes_alone(tmp_path: Path) -> None:
    one, packed = (KeptSamples(kind(True, str(tmp_path), 10_000)) for kind in (Traced, Packed))
    assert one.num_bytes - packed.num_bytes == pytest.approx(10_000 * 3 * (4 - 1), abs=2 * os.sysconf("SC_PAGESIZE"))
    part = KeptSamples(Part(Packed(True, str(tmp_path)), torch.tensor([7, 3, 11])))
    assert torch.equal(part[1][0], Packed(True, str(tmp_path))[3][0])


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_sample_is_read_once_by_all_ranks_and_workers(num_workers: int, num_ranks: int, tmp_path: Path) -> None:
    (tmp_path / "mine" / "data").mkdir(parents=True)
    lines = (f"_target_: {__name__}.Traced", "sample_shape: [3]", "num_outputs: 2", f"folder: {tmp_path}")
    (tmp_path / "mine" / "data" / "traced.yaml").write_text("\n".join(["# traced", *lines]))
    words = [f"--config-dir={tmp_path}/mine", "data=traced", "model=linear", "epochs=3", "batch_size=6"]
    words += [f"parallel={'ddp' if num_ranks > 1 else 'none'}", f"loader.num_workers={num_workers}"]
    plain = run(tmp_path / "plain", num_ranks, *words)
    (tmp_path / READS).write_text("")
    kept = run(tmp_path / "kept", num_ranks, *words, "keep_samples=true")
    found = reads(tmp_path)
    assert {line for line in found} == {f"{split} {index}" for split in ("train", "val") for index in range(23)}
    # The first two are tried on each rank before there is memory to share.
    assert {line: times for line, times in found.items() if times > 1 and line.split()[1] not in ("0", "1")} == {}
    assert kept.losses == plain.losses
    assert all(torch.equal(tensor, plain.weights[name]) for name, tensor in kept.weights.items())


def test_transforms_change_what_is_kept_anew_in_each_epoch(tmp_path: Path) -> None:
    def jitter(inputs: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(inputs) + torch.rand(3)

    kept, plain = (
        Augmented(data, {"it": jitter}, 0, False)
        for data in (KeptSamples(Traced(True, str(tmp_path))), Traced(True, str(tmp_path)))
    )
    for epoch in range(2):
        found = kept.in_epoch(epoch).__getitems__([4, 9])
        assert torch.equal(found[0], torch.stack([plain.in_epoch(epoch)[index][0] for index in (4, 9)]))
    assert not torch.equal(kept.in_epoch(0)[4][0], kept.in_epoch(1)[4][0])


def test_a_sample_unlike_the_first_is_told_when_it_comes(tmp_path: Path) -> None:
    growing = KeptSamples(Growing(True, str(tmp_path)))
    assert growing.__getitems__([4])[0].shape == (1, 1)
    with pytest.raises(CannotKeep, match=r"sample 5 is \[tensor \[1, 2\], .* and the first one \[tensor \[1, 1\], "):
        growing.__getitems__([4, 5])
    drawing = KeptSamples(DrawingLater(True, str(tmp_path)))
    with pytest.raises(CannotKeep, match=r"sample 5 draws random numbers.*; leave it out"):
        drawing.__getitems__([4, 5])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Drawing, "keep_samples=true: sample 0 draws random numbers, and would be drawn once for all epochs; leave it"),
        (Words, r"keep_samples=true: samples must be tensors and numbers, and the first one is \[tensor \[1, 3\], "),
        (Collating, r"keep_samples=true: it makes batches in a way of its own \(collate\); leave it out"),
        (Epochs, r"keep_samples=true: its samples are others in each epoch \(in_epoch\); leave it out"),
        (Broken, r"data: its first sample cannot be read with: KeyError: 'no sample 0' \(at .*test_kept_samples.py:"),
    ],
)
def test_what_cannot_be_kept_is_refused(kind: type[Traced], message: str, tmp_path: Path) -> None:
    node = {"_target_": f"{__name__}.{kind.__name__}", "folder": str(tmp_path), "sample_shape": [3], "num_outputs": 2}
    config = replace(configure("model=linear", "data=random")[0], data=node, keep_samples=True)
    with pytest.raises(InputError, match=f"^{message}"):
        load_data(config, {"data": "mine"}, cast(World, None))


def test_data_in_memory_are_not_kept_once_more() -> None:
    config = replace(configure("model=linear", "data=random")[0], keep_samples=True)
    with pytest.raises(InputError, match=r"^keep_samples=true: its samples are in memory as it is; leave it out"):
        load_data(config, {"data": "random"}, cast(World, None))


def test_more_than_the_memory_that_is_left_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"_target_": f"{__name__}.Traced", "folder": str(tmp_path), "sample_shape": [3], "num_outputs": 2}
    node["num_samples"] = cast(Any, 2**30)
    config = replace(configure("model=linear", "data=random")[0], data=node, keep_samples=True)
    monkeypatch.setattr(datasets, "memory_left", lambda: 2.0**30)
    with pytest.raises(InputError, match=r"^keep_samples=true: the samples take 42\.0 GiB, and .* 1\.0 GiB .*leave it"):
        load_data(config, {"data": "mine"}, cast(World, None))


def test_memory_that_is_left_is_the_least_of_the_machine_and_of_each_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MEMINFO", "OWN_GROUPS", "GROUPS"):
        monkeypatch.setattr(memory_left, name, tmp_path / name)
    assert memory_left.memory_left() == float("inf")
    (tmp_path / "MEMINFO").write_text("MemTotal: 9 kB\nMemAvailable:       8 kB\n")
    assert memory_left.memory_left() == 8192
    (tmp_path / "OWN_GROUPS").write_text("3:cpu:/elsewhere\n0::/job/step\n")
    for group, limit in (("job/step", "max"), ("job", "7000"), (".", "9000")):
        (tmp_path / "GROUPS" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "GROUPS" / group / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "GROUPS" / group / "memory.current").write_text("1000\n")
    assert memory_left.memory_left() == 6000
    (tmp_path / "OWN_GROUPS").write_text("9:memory:/own\n")  # as version 1 has them
    (tmp_path / "GROUPS" / "memory" / "own").mkdir(parents=True)
    (tmp_path / "GROUPS" / "memory" / "own" / "memory.limit_in_bytes").write_text("500\n")
    (tmp_path / "GROUPS" / "memory" / "own" / "memory.usage_in_bytes").write_text("700\n")
    assert memory_left.memory_left() == 0


def test_kept_samples_go_to_a_process_that_is_not_forked(tmp_path: Path) -> None:
    """Whoever pickles a data set gets the data set: what is kept stays where it is."""
    kept = KeptSamples(Traced(True, str(tmp_path)))
    copy = pickle.loads(pickle.dumps(kept))
    assert np.array_equal(copy[3][0], kept[3][0])
