"""task=collectives: check every collective that the runner uses against known values, and measure its bandwidth."""

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from runner.config.schema import Config
from runner.distributed import collectives
from runner.distributed.world import World
from runner.jobs.task import JobTask
from runner.records.report.plots import new_figure
from runner.records.run_directory import RunDirectory
from runner.records.run_files import write_atomically
from runner.records.tables import csv_table, markdown_table, text_table, without_empty_columns

OPERATIONS: tuple[str, ...] = ("broadcast", "reduce", "all_reduce", "scatter", "gather")
OPERATIONS += ("all_gather", "reduce_scatter", "all_to_all", "send_recv")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CollectiveCall:
    """A collective on this rank's data. All ranks must make the same call."""

    call: Callable[[], Any]
    num_bytes: int  # of the whole data; see Measurement
    result: Tensor | None  # written by the call; None if this rank only sends
    expected: list[float]  # the value of each of the result's equal parts after the first call

    def differences(self) -> list[str]:
        parts = [] if self.result is None else self.result.view(len(self.expected), -1).tolist()
        pairs = [(value, expected) for part, expected in zip(parts, self.expected, strict=False) for value in part]
        return [f"returned {value:g} instead of {expected:g}" for value, expected in pairs if value != expected]


def _make_call(operation: str, size: int, world: World) -> CollectiveCall:
    """Return this rank's call with about `size` bytes of data, rounded down to whole float32 values per rank.

    If rank r sends equal values to all ranks, the value is r + 1. The root is the last rank, so that a collective that
    ignores its root and uses rank 0 fails the check.
    """
    rank, n = world.rank, world.world_size
    per_rank = max(size // 4 // n, 1)

    def filled(parts: Iterable[float], size: int) -> Tensor:
        return torch.tensor(list(parts), dtype=torch.float32, device=world.device).repeat_interleave(size)

    part, whole = filled([rank + 1], per_rank), filled([rank + 1], n * per_rank)
    terms = filled((rank + 1 + s for s in range(n)), per_rank)  # for rank s, which receives the sum over all ranks
    messages = filled((rank * n + s for s in range(n)), per_rank)  # for rank s
    to_part, to_whole = torch.zeros_like(part), torch.zeros_like(whole)
    root, total, numbers = n - 1, n * (n + 1) / 2, [r + 1.0 for r in range(n)]
    is_root = rank == root
    scattered, gathered = (list(tensor.chunk(n)) if is_root else None for tensor in (messages, to_whole))
    ring = [dist.P2POp(dist.isend, whole, (rank + 1) % n), dist.P2POp(dist.irecv, to_whole, (rank - 1) % n)]

    def send_recv() -> None:
        # In one batch, because on GPUs a send waits for its receiver, so separate calls in a ring would deadlock.
        for work in dist.batch_isend_irecv(ring):
            work.wait()

    calls: dict[str, tuple[Callable[[], Any], Tensor | None, list[float]]] = {
        "broadcast": (lambda: dist.broadcast(whole, src=root), whole, [n]),
        "reduce": (lambda: dist.reduce(whole, dst=root), whole if is_root else None, [total]),
        "all_reduce": (lambda: dist.all_reduce(whole), whole, [total]),
        "scatter": (lambda: dist.scatter(to_part, scattered, src=root), to_part, [root * n + rank]),
        "gather": (lambda: dist.gather(part, gathered, dst=root), to_whole if is_root else None, numbers),
        "all_gather": (lambda: collectives.all_gather_single(to_whole, part), to_whole, numbers),
        "reduce_scatter": (lambda: collectives.reduce_scatter_single(to_part, terms), to_part, [total + n * rank]),
        "all_to_all": (lambda: dist.all_to_all_single(to_whole, messages), to_whole, [r * n + rank for r in range(n)]),
        "send_recv": (send_recv, to_whole, [(rank - 1) % n + 1]),
    }
    call, result, expected = calls[operation]
    return CollectiveCall(call, whole.nbytes, result, expected)


class Measurement(NamedTuple):
    """The time of one collective in seconds, and its bandwidths in 10^9 bytes per second.

    As in nccl-tests, the number of bytes is the size of the whole data: that of all ranks after a gather or before a
    scatter. The bus bandwidth is that of the busiest link; it can be compared across operations and world sizes.
    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """

    operation: str
    bytes: int
    seconds: float
    algorithm_gb_s: float
    bus_gb_s: float


def bus_factor(operation: str, world_size: int) -> float:
    """Return the fraction of the data that the busiest link transfers in an optimal algorithm."""
    if operation == "all_reduce":
        return 2 * (world_size - 1) / world_size
    if operation in ("broadcast", "reduce", "send_recv"):
        return 1.0
    return (world_size - 1) / world_size


class Collectives(JobTask):
    """Checks and times `operations`. A time is the median, over the calls, of the slowest rank's time."""

    needs_experiment = False
    min_world_size = 2

    def __init__(
        self,
        sizes: Sequence[int] = (1024, 65536, 1048576, 16777216),
        repeats: int = 10,
        warmup: int = 2,
        operations: Sequence[str] = OPERATIONS,
    ) -> None:
        if not sizes or min(sizes) < 4:
            raise ValueError(f"sizes={list(sizes)} must be numbers of bytes of at least 4; try [1024]")
        if repeats < 1 or warmup < 0:
            raise ValueError(f"repeats={repeats} must be at least 1, and warmup={warmup} at least 0")
        if not operations or not set(OPERATIONS) >= set(operations):
            raise ValueError(f"operations=[{','.join(operations)}] must be one or several of {', '.join(OPERATIONS)}")
        self.sizes, self.repeats, self.warmup = sorted(set(sizes)), repeats, warmup
        self.operations = list(dict.fromkeys(operations))

    def run(
        self, config: Config, experiment: None, world: World, directory: RunDirectory, console: Console
    ) -> dict[str, float]:
        where = f"{world.world_size} ranks over {world.backend.process_group_backend()} on {world.device.type}"
        log.info("collectives on %s", where)
        unsupported: dict[str, str] = {}
        measurements: list[Measurement] = []
        for operation in self.operations:
            if reason := check(operation, world):
                unsupported[operation] = reason
                log.warning("%s is not supported: %s", operation, reason)
                continue
            log.info("%s is correct", operation)
            measurements += [self._measure(operation, size, world) for size in self.sizes]
        if directory.writes:
            _write(directory.path, where, measurements, unsupported)
        log.info("run directory: %s", directory.path)
        metrics = {
            f"{each.operation}/{name}/{each.bytes}": getattr(each, name)
            for each in measurements
            for name in ("bus_gb_s", "algorithm_gb_s", "seconds")
        }
        directory.log_metrics(0, 0, metrics)
        return metrics

    def _measure(self, operation: str, size: int, world: World) -> Measurement:
        """Time one collective. All ranks must call it."""
        call = _make_call(operation, size, world)
        seconds = [_time(call, world) for _ in range(self.warmup + self.repeats)][self.warmup :]
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # on the CPU, which the process group of every backend supports
        median = statistics.median(slowest.tolist())
        rate = call.num_bytes / median / 1e9
        return Measurement(operation, call.num_bytes, median, rate, rate * bus_factor(operation, world.world_size))


def check(operation: str, world: World) -> str | None:
    """Return the backend's error if it does not support the collective; None if the values are correct.

    If a rank has wrong values, all ranks raise RuntimeError, which names that rank. All ranks must call it.
    """
    call = _make_call(operation, 4 * 3 * world.world_size, world)  # three values per rank
    unsupported, wrong = list[str](), list[str]()
    try:
        call.call()
        _synchronize(world.device)
    except RuntimeError as error:
        if not isinstance(error, NotImplementedError) and "support" not in str(error):
            raise
        unsupported.append(str(error).splitlines()[0])
    else:
        wrong = [f"{operation} on rank {world.rank}: {message}" for message in call.differences()]
    # All ranks must continue in the same way: if only one raised, the others would wait for it.
    if wrong := world.consensus.first_error(f"collectives/{operation}/wrong", wrong):
        raise RuntimeError(wrong[0])
    return next(iter(world.consensus.first_error(f"collectives/{operation}/unsupported", unsupported)), None)


def _time(call: CollectiveCall, world: World) -> float:
    """Return the time of one call on this rank in seconds, measured after a barrier."""
    world.collectives.sum(torch.zeros(1))
    _synchronize(world.device)
    start = time.perf_counter()
    call.call()
    _synchronize(world.device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _write(path: Path, where: str, measurements: Sequence[Measurement], unsupported: Mapping[str, str]) -> None:
    """Log the results, and write them as CSV, Markdown and a plot."""
    cells = [[*Measurement._fields, "unsupported"]]
    cells += [[each.operation, str(each.bytes), *(f"{number:.4g}" for number in each[2:]), ""] for each in measurements]
    cells += [[operation, "", "", "", "", reason] for operation, reason in unsupported.items()]
    write_atomically(path / "collectives.csv", csv_table(cells))
    cells = without_empty_columns(cells)
    note = f"collectives on {where}; median of the slowest rank's times, 10^9 bytes per second"
    write_atomically(path / "collectives.md", f"{note}\n\n{markdown_table(cells)}\n")
    log.info("%s\n%s", note, text_table(cells, for_log=True))
    if measurements:
        figure, (axes,) = new_figure(1)
        for operation in dict.fromkeys(each.operation for each in measurements):
            line = [(each.bytes, each.bus_gb_s) for each in measurements if each.operation == operation]
            axes.plot(*zip(*line, strict=True), marker="o", label=operation)
        labels = {"xlabel": "bytes", "ylabel": "bus bandwidth, 10^9 bytes / s", "title": f"collectives on {where}"}
        axes.set(xscale="log", yscale="log", **labels)
        axes.legend(fontsize="small")
        figure.savefig(path / "collectives.png", dpi=120)
