"""task=shards: the samples of a split of a map-style dataset as tar shards, in the layout that data=shards reads."""

import fcntl
import io
import multiprocessing
import operator
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runner.config.request import Request
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.failures.signals import exit_at_once_with_parent, ignore_signals
from runner.distributed.world import World
from runner.errors import InputError, JobFailed, failed_with, print_messages
from runner.input.datasets import load_split
from runner.input.rng import SAMPLE, derive_seed, seeded
from runner.input.sampler import Permutation
from runner.input.source import Source
from runner.input.stream import Stream
from runner.jobs.task import LaunchingTask
from runner.remote.address import Address, is_remote
from runner.remote.store import ObjectStore, StoreError

IMAGES = {".jpg": "jpg", ".jpeg": "jpg", ".png": "png"}  # files that are stored unchanged, by ending
CLASS, TARGET = "cls", "target.npy"
_work: list[Any] = []  # in a worker: the place, and the samples


class WriteShards(LaunchingTask):
    """Writes shards of `samples_per_shard` samples of the split `config.split` to `output`.

    With `shuffle`, the order is drawn from `config.seed`: a dataset may be sorted by class, and data=shards reads
    blocks of neighbors. A shard is complete or absent. A repeated command writes the missing ones, and the result is
    bit-identical.
    """

    picks_split = True

    def __init__(self, output: str, samples_per_shard: int = 1000, shuffle: bool = True, num_processes: int = 1):
        for name, value in (("samples_per_shard", samples_per_shard), ("num_processes", num_processes)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.output, self.samples_per_shard, self.num_processes = output, samples_per_shard, num_processes
        self.shuffle = shuffle

    def launch_jobs(self, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Write the shards. Raise InputError for unsuitable data, or JobFailed if a shard cannot be written."""
        if rank_info.world_size > 1:
            raise InputError(
                "task=shards starts its processes itself; run it in one process and set task.num_processes"
            )
        config, choices = request.config, request.command.choices
        world = World(RankInfo(), None, as_backend(config.backend))
        source = load_split(config, choices, world, config.split)
        data = f"data={choices['data']}"
        if isinstance(source.dataset, Stream):
            raise InputError(f"task=shards needs a map-style dataset, and {data} is a stream")
        samples = _samples_of(source, config.seed, data, config.data.get("num_outputs", 1) > 1)
        if self.shuffle:
            samples.order = Permutation(len(source), derive_seed(config.seed))
        place: _Directory | _Bucket = _Directory(Path(self.output).expanduser() / config.split)
        if is_remote(self.output):
            place = _Bucket(Address.parse(self.output, "task.output") / config.split, config.remote.options)
        ends = [*range(self.samples_per_shard, len(source), self.samples_per_shard), len(source)]
        parts = [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        num_written = self._write(place, samples, parts)
        print(f"shards   {len(parts)} of {len(source):,} samples in {place}, of which {num_written} were written now")
        print(f"read by  data=shards data.root={self.output}{samples.reading_options()}", flush=True)
        return {"shards/count": float(len(parts)), "shards/written": float(num_written)}

    def _write(self, place: "_Directory | _Bucket", samples: "_Samples", parts: list[range]) -> int:
        """Write the missing shards, and return their number. All requests are sent by child processes.

        obstore hangs in a process that is forked after its parent has used it.
        """
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(self.num_processes, context, _start_worker, (place, samples)) as pool:
            try:
                pool.submit(_in_worker, _check, parts).result()
                tasks = [pool.submit(_in_worker, _write_shard, part) for part in parts]
                return sum(task.result() for task in tasks)
            except BrokenProcessPool:
                print_messages(["task=shards: a process was killed; run the command again to continue"])
                raise JobFailed("a process was killed") from None
            except JobFailed as error:
                print_messages([str(error)])
                raise
            finally:
                pool.shutdown(cancel_futures=True)


@dataclass
class _Samples:
    """The samples of a split as members of a tar file."""

    source: Source
    seed: int
    image: str | None  # extension of the files of the dataset if they are stored unchanged, else None
    target: str  # CLASS or TARGET
    order: Permutation | None = None  # from positions in the shards to indices of the dataset; None: they are equal

    def indices(self, part: range) -> list[int]:
        """Return the indices of the samples at these positions."""
        positions = np.arange(part.start, part.stop, dtype=np.uint64)
        return [int(index) for index in (self.order(positions) if self.order else positions)]

    def members(self, index: int) -> dict[str, bytes]:
        """Return the members of a sample by extension. Raise JobFailed if it cannot be stored."""
        try:
            if self.image is not None:
                path, target = self.source.files[self.source.dataset_indices([index])[0]]
                return {self.image: Path(path).read_bytes(), CLASS: b"%d" % target}
            with seeded(self.seed, 0, index, SAMPLE):
                inputs, target = self.source[index]
            content = {"npy": _npy(inputs)}
            if self.target == CLASS:
                return {**content, CLASS: b"%d" % operator.index(torch.as_tensor(target))}
            return {**content, TARGET: _npy(target)}
        except Exception as error:  # of the dataset
            raise JobFailed(f"task=shards: sample {index} cannot be stored{failed_with(error)}") from None

    def reading_options(self) -> str:
        return "" if self.target == CLASS else f" data.target={TARGET}"


def _samples_of(source: Source, seed: int, data: str, are_classes: bool) -> _Samples:
    """Decide from the first sample how samples are stored. Raise InputError if it has no inputs and targets."""
    files = getattr(source, "files", None)
    if isinstance(files, list) and files and isinstance(files[0], tuple):
        kinds = {IMAGES.get(os.path.splitext(path)[1].lower()) for path, _ in files}
        if len(kinds) == 1 and (kind := kinds.pop()) is not None:
            return _Samples(source, seed, kind, CLASS)
    with seeded(seed, 0, 0, SAMPLE):
        sample = source[0]
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        raise InputError(f"task=shards needs samples (inputs, targets), each a tensor; those of {data} are others")
    target = torch.as_tensor(sample[1])
    is_class = are_classes and target.dim() == 0 and not target.is_floating_point()
    return _Samples(source, seed, None, CLASS if is_class else TARGET)


def _npy(values: Any) -> bytes:
    """Return a .npy file, from which data=shards reads float32 and int64. Raise ValueError if that loses bits."""
    tensor = torch.as_tensor(values)
    if tensor.dtype in (torch.float64, torch.bfloat16) or tensor.is_complex():
        raise ValueError(f"shards contain float32 numbers or integers, and a tensor of the sample is {tensor.dtype}")
    np.save(file := io.BytesIO(), tensor.contiguous().numpy(), allow_pickle=False)
    return file.getvalue()


class _Directory:
    """A local directory of shards. A shard that is not complete has a hidden name."""

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        self.path.mkdir(parents=True, exist_ok=True)
        return sorted(path.name for path in self.path.glob("[!.]*.tar"))

    def start_of(self, name: str, size: int) -> bytes | None:
        """Return the first bytes of a shard, or None if it does not exist."""
        path = self.path / name
        with path.open("rb") if path.exists() else io.BytesIO() as file:
            return file.read(size) or None

    def write(self, name: str, samples: _Samples, part: range) -> None:
        partial = self.path / f".{name}.partial"
        with partial.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if another command writes this shard
            file.truncate(0)
            _write_tar(file, samples, part)
            file.flush()
            os.fsync(file.fileno())
            partial.rename(self.path / name)


class _Bucket:
    """A prefix of an object store, in which an object is complete or absent."""

    def __init__(self, address: Address, options: Mapping[str, Any] | None):
        self.address, self.options = address, options

    def __str__(self) -> str:
        return str(self.address)

    def _store(self) -> ObjectStore:
        return ObjectStore(self.address, self.options, "task.output")

    def names(self) -> list[str]:
        return [each.path for each in self._store().list() if each.path.endswith(".tar")]

    def start_of(self, name: str, size: int) -> bytes | None:
        try:
            return self._store().get_range(name, 0, size)
        except FileNotFoundError:
            return None

    def write(self, name: str, samples: _Samples, part: range) -> None:
        with tempfile.NamedTemporaryFile(suffix=".tar") as file:
            _write_tar(file, samples, part)
            file.flush()
            self._store().put(name, Path(file.name))


def _name(part: range) -> str:
    return f"{part.start:08}-{part.stop - 1:08}.tar"


def _check(place: _Directory | _Bucket, samples: _Samples, parts: list[range]) -> None:
    """Raise InputError if there are shards of another size, or if the first one has other samples than the data."""
    expected = {_name(part): part for part in parts}
    with _failing(place):
        names = place.names()
        for name in names:
            if name not in expected:
                raise InputError(
                    f"task.output: {place} contains {name}, which is not a shard of this split with this "
                    "task.samples_per_shard; choose another output"
                )
        for name in names[:1]:
            _is_written(place, samples, expected[name])


def _is_written(place: _Directory | _Bucket, samples: _Samples, part: range) -> bool:
    """Return True if the shard exists. Raise InputError if it has another first sample."""
    _write_tar(first := io.BytesIO(), samples, part[:1], ends=False)
    found = place.start_of(_name(part), len(first.getvalue()))
    if found not in (None, first.getvalue()):
        raise InputError(
            f"task.output: {place}/{_name(part)} has other samples than the data, or another order; choose another "
            "output"
        )
    return found is not None


def _write_shard(place: _Directory | _Bucket, samples: _Samples, part: range) -> bool:
    """Write a shard. Return False if it exists."""
    with _failing(place):
        if _is_written(place, samples, part):
            return False
        place.write(_name(part), samples, part)
        return True


def _write_tar(file: Any, samples: _Samples, part: range, ends: bool = True) -> None:
    """Write samples as `INDEX.EXT`, with equal headers in every run. Without `ends`, omit the end."""
    tar = tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
    for index in samples.indices(part):
        for extension, content in samples.members(index).items():
            member = tarfile.TarInfo(f"{index:08}.{extension}")  # of time 0 and user 0
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    if ends:
        tar.close()


@contextmanager
def _failing(place: _Directory | _Bucket) -> Iterator[None]:
    """Raise JobFailed for an error of the file system or the store."""
    try:
        yield
    except (OSError, StoreError) as error:
        raise JobFailed(f"task.output: {place} cannot be written{failed_with(error)}") from None


def _start_worker(*work: Any) -> None:
    """Keep the place and the samples, which a forked worker shares with its parent, so that none is sent."""
    ignore_signals()
    exit_at_once_with_parent()
    torch.set_num_threads(1)
    _work[:] = work


def _in_worker(function: Callable[..., Any], argument: Any) -> Any:
    return function(*_work, argument)
