"""Cached samples: read once per machine by its ranks and loader workers, and equal to the bit."""

import fcntl
import os
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from worlds import configure, run

from runner.distributed import machine
from runner.distributed.world import World
from runner.errors import InputError
from runner.input import sample_cache
from runner.input.augmentation import Augmentation
from runner.input.datasets import load_data
from runner.input.loader import Loader
from runner.input.pytree import collate, tensors
from runner.input.sample_cache import CannotCache
from runner.input.sampler import Sampler
from runner.input.source import Source

CPU = torch.device("cpu")
READS = "reads.txt"


class Traced(Dataset[Any]):
    """Records which sample is read: (3,) numbers as a NumPy array, and a class as an int."""

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
    """Is cached as bytes, and returns float32."""

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


SAMPLES: dict[str, Callable[[int], Any]] = {
    "random": lambda index: (torch.rand(3), 0),
    "growing": lambda index: (torch.zeros(1 + index // 5), 0),
    "words": lambda index: (torch.zeros(3), "no"),
    "broken": lambda index: {}[f"no sample {index}"],
}


class Unsuitable(Traced):
    """Returns samples that cannot be cached."""

    def __init__(self, train: bool, folder: str, kind: str) -> None:
        super().__init__(train, folder)
        self.kind = kind

    def __getitem__(self, index: int) -> Any:
        return SAMPLES[self.kind](index)


class Collating(Traced):
    def collate(self, samples: list[Any]) -> Any:
        return samples


class Epochs(Traced):
    def in_epoch(self, epoch: int) -> Any:
        return self


def cached(dataset: Any, rows: torch.Tensor | None = None) -> Source:
    source = replace(Source.of(dataset), rows=rows)
    source.cache_samples()
    return source


def reads(folder: Path) -> Counter[str]:
    return Counter((folder / READS).read_text().splitlines())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Traced, TracedBatches, Packed, Mappings])
def test_cached_samples_equal_those_of_the_dataset(kind: type[Traced], num_workers: int, tmp_path: Path) -> None:
    kept = cached(kind(True, str(tmp_path)))
    loaders = [
        Loader(dataset, Sampler(23, 4), torch.float32, CPU, num_workers=num_workers)
        for dataset in (kept, kind(True, str(tmp_path)))
    ]
    try:
        for epoch in range(2):
            both = [[m for step in loader.steps(epoch) for m in step.micro_batches] for loader in loaders]
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
    copy = pickle.loads(pickle.dumps(kept))  # has a new cache
    assert torch.equal(tensors(copy.read([3]))[0], tensors(kept.read([3]))[0]) and copy.cache is not None


def test_packed_samples_need_less_memory(tmp_path: Path) -> None:
    one, packed = (cached(kind(True, str(tmp_path), 10_000)).cache for kind in (Traced, Packed))
    assert one is not None and packed is not None
    assert one.num_bytes - packed.num_bytes == pytest.approx(10_000 * 3 * (4 - 1), abs=2 * os.sysconf("SC_PAGESIZE"))
    part = cached(Packed(True, str(tmp_path)), torch.tensor([7, 3, 11]))
    assert torch.equal(part[1][0], Packed(True, str(tmp_path))[3][0])


@pytest.mark.parametrize(("num_workers", "num_ranks"), [(0, 1), pytest.param(1, 2, marks=pytest.mark.thorough)])
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
    # The first two are read on each rank before the memory is shared.
    assert {line: times for line, times in found.items() if times > 1 and line.split()[1] not in ("0", "1")} == {}
    assert kept.losses == plain.losses
    assert all(torch.equal(tensor, plain.weights[name]) for name, tensor in kept.weights.items())


def test_transforms_change_cached_samples_in_each_epoch(tmp_path: Path) -> None:
    def jitter(inputs: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(inputs) + torch.rand(3)

    kept, plain = (
        replace(source, transform=Augmentation({"it": jitter}, 0))
        for source in (cached(Traced(True, str(tmp_path))), Source.of(Traced(True, str(tmp_path))))
    )
    first, second = kept.read([4, 9], epoch=0)[0], kept.read([4, 9], epoch=1)[0]
    assert torch.equal(first, plain.read([4, 9], epoch=0)[0]) and torch.equal(second, plain.read([4, 9], epoch=1)[0])
    assert not torch.equal(first, second)


def test_a_sample_of_another_shape_is_refused_when_it_is_read(tmp_path: Path) -> None:
    growing = cached(Unsuitable(True, str(tmp_path), "growing"))
    assert growing.read([4])[0].shape == (1, 1)
    with pytest.raises(CannotCache, match=r"sample 5 is \[tensor \[1, 2\], "):
        growing.read([4, 5])
    part = cached(Unsuitable(True, str(tmp_path), "growing"), torch.tensor([1, 2, 7]))
    with pytest.raises(CannotCache, match=r"sample 7 is \[tensor \[1, 2\], "):  # the dataset's own index
        part.read([2])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("random", "keep_samples=true: sample 0 draws random numbers, which would be the same in all epochs; leave it"),
        ("words", r"keep_samples=true: samples must be tensors and numbers, but the first one is \[tensor \[1, 3\], "),
        (Collating, r"keep_samples=true: it collates batches itself \(collate\); leave it out"),
        (Epochs, r"keep_samples=true: its samples change from epoch to epoch \(in_epoch\); leave it out"),
        ("broken", r"data: its first sample cannot be read with: KeyError: 'no sample 0' \(at .*test_sample_cache.py:"),
    ],
)
def test_unsuitable_samples_are_refused(kind: str | type[Traced], message: str, tmp_path: Path) -> None:
    node: dict[str, Any] = {"folder": str(tmp_path), "sample_shape": [3], "num_outputs": 2}
    target, options = (Unsuitable, {"kind": kind}) if isinstance(kind, str) else (kind, {})
    node |= {"_target_": f"{__name__}.{target.__name__}", **options}
    config = replace(configure("model=linear", "data=random")[0], data=node, keep_samples=True)
    with pytest.raises(InputError, match=f"^{message}"):
        load_data(config, {"data": "mine"}, cast(World, None))


def test_data_in_memory_and_more_samples_than_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = {"_target_": f"{__name__}.Traced", "folder": str(tmp_path), "sample_shape": [3], "num_outputs": 2}
    node["num_samples"] = cast(Any, 2**30)
    config = replace(configure("model=linear", "data=random")[0], keep_samples=True)
    with pytest.raises(InputError, match=r"^keep_samples=true: its samples are in memory already; leave it out"):
        load_data(config, {"data": "random"}, cast(World, None))
    monkeypatch.setattr(sample_cache, "available_memory", lambda: 2.0**30)
    with pytest.raises(InputError, match=r"^keep_samples=true: the samples need 21\.0 GiB, but 1\.0 GiB .*leave it"):
        load_data(replace(config, data=node), {"data": "mine"}, cast(World, None))


def test_memory_left_is_the_minimum_over_machine_and_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MEMINFO", "CGROUPS_OF_PROCESS", "CGROUPS"):
        monkeypatch.setattr(machine, name, tmp_path / name)
    assert machine.available_memory() == float("inf")
    (tmp_path / "MEMINFO").write_text("MemTotal: 9 kB\nMemAvailable:       8 kB\n")
    assert machine.available_memory() == 8192
    (tmp_path / "CGROUPS_OF_PROCESS").write_text("3:cpu:/elsewhere\n0::/job/step\n")
    for group, limit in (("job/step", "max"), ("job", "7000"), (".", "9000")):
        (tmp_path / "CGROUPS" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "CGROUPS" / group / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "CGROUPS" / group / "memory.current").write_text("1000\n")
    assert machine.available_memory() == 6000


def test_flags_of_cached_samples_are_read_and_written_under_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, a processor with weak memory ordering may show a flag to another process before the sample."""
    cache = cached(Traced(True, str(tmp_path))).cache
    assert cache is not None
    lockf, seen = fcntl.lockf, list[tuple[int, int, float]]()

    def record(file: Any, mode: int) -> None:
        lockf(file, mode)
        seen.append((mode, int(cache._is_cached[3]), float(cache._leaves[0][3].abs().sum())))

    monkeypatch.setattr(fcntl, "lockf", record)
    expected = float(cache.batch([3])[0].abs().sum())
    assert expected > 0
    assert seen == [
        (fcntl.LOCK_SH, 0, 0.0),  # the flags are read
        (fcntl.LOCK_UN, 0, 0.0),
        (fcntl.LOCK_EX, 0, expected),  # the sample is complete before the flag is set
        (fcntl.LOCK_UN, 1, expected),
    ]
