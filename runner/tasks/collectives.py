"""task=collectives: check every collective that the runner uses against known values, and measure its bandwidth."""

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from runner.config.schema import Config
from runner.distributed.world import World
from runner.jobs.task import JobTask
from runner.records.report.plots import new_figure
from runner.records.run_directory import RunDirectory
from runner.records.tables import csv_table, markdown_table, text_table, without_empty_columns
from runner.tasks.collective_calls import CALLS, CollectiveCall

log = logging.getLogger(__name__)
COLUMNS = ("operation", "bytes", "seconds", "algorithm_gb_s", "bus_gb_s")


@dataclass(frozen=True)
class Measurement:
    """The time of one collective in seconds, and its bandwidths in 10^9 bytes per second.

    As in nccl-tests, the number of bytes is the size of the whole data: the data of all ranks after a gather or before
    a scatter. The bus bandwidth is that of the slowest link, which allows comparing operations and world sizes.
    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """

    operation: str
    num_bytes: int
    seconds: float
    world_size: int

    @property
    def algorithm_gb_s(self) -> float:
        return self.num_bytes / self.seconds / 1e9

    @property
    def bus_gb_s(self) -> float:
        return self.algorithm_gb_s * bus_factor(self.operation, self.world_size)

    @property
    def cells(self) -> list[str]:
        numbers = (self.seconds, self.algorithm_gb_s, self.bus_gb_s)
        return [self.operation, str(self.num_bytes), *(f"{number:.4g}" for number in numbers)]


def bus_factor(operation: str, world_size: int) -> float:
    """Return the fraction of the data that the busiest link transfers in an optimal algorithm."""
    if operation == "all_reduce":
        return 2 * (world_size - 1) / world_size
    if operation in ("broadcast", "reduce", "send_recv"):
        return 1.0
    return (world_size - 1) / world_size


class Collectives(JobTask):
    """Checks and times `operations` with messages of `sizes` bytes, on the backend and world of the configuration.

    Each is timed `repeats` times after `warmup` calls. A time is that of the slowest rank; the result is the median.
    """

    needs_experiment = False
    min_world_size = 2

    def __init__(
        self,
        sizes: Sequence[int] = (1024, 65536, 1048576, 16777216),
        repeats: int = 10,
        warmup: int = 2,
        operations: Sequence[str] = tuple(CALLS),
    ) -> None:
        if not sizes or min(sizes) < 4:
            raise ValueError(f"sizes={_show(sizes)} must be numbers of bytes of at least 4; try [1024]")
        if repeats < 1:
            raise ValueError(f"repeats={repeats} must be at least 1; try 10")
        if warmup < 0:
            raise ValueError(f"warmup={warmup} must be at least 0; try 2")
        if not operations or not CALLS.keys() >= set(operations):
            raise ValueError(f"operations={_show(operations)} must be one or several of {', '.join(CALLS)}")
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
            f"{each.operation}/{name}/{each.num_bytes}": getattr(each, name)
            for each in measurements
            for name in ("bus_gb_s", "algorithm_gb_s", "seconds")
        }
        directory.log_metrics(0, 0, metrics)
        return metrics

    def _measure(self, operation: str, size: int, world: World) -> Measurement:
        """Time one collective. All ranks must call it."""
        call = _prepare(operation, size, world)
        seconds = [_time(call, world) for _ in range(self.warmup + self.repeats)][self.warmup :]
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # on the CPU, where every backend has a control plane
        return Measurement(operation, call.num_bytes, statistics.median(slowest.tolist()), world.world_size)


def check(operation: str, world: World) -> str | None:
    """Return the backend's error if it does not support the collective; None if the values are correct.

    If a rank has wrong values, raises RuntimeError that names it on all ranks. All ranks must call it.
    """
    call = _prepare(operation, 4 * 3 * world.world_size, world)  # three numbers per rank
    unsupported, wrong = list[str](), list[str]()
    try:
        call.call()
        _synchronize(world.device)
    except RuntimeError as error:  # or NotImplementedError, a subclass
        text = str(error).splitlines()[0]
        if not isinstance(error, NotImplementedError) and "support" not in text:
            raise
        unsupported.append(text)
    else:
        wrong = [f"{operation} on rank {world.rank}: {message}" for message in call.differences()]
    # All ranks must continue in the same way: if only one raised, the others would wait for it.
    if wrong := world.consensus.first_error(f"collectives/{operation}/wrong", wrong):
        raise RuntimeError(wrong[0])
    return next(iter(world.consensus.first_error(f"collectives/{operation}/unsupported", unsupported)), None)


def _prepare(operation: str, size: int, world: World) -> CollectiveCall:
    """Return the call with about `size` bytes of data, rounded down to whole float32 values per rank."""
    per_rank = max(size // 4 // world.world_size, 1)
    return CALLS[operation](world.rank, world.world_size, per_rank, world.device)


def _time(call: CollectiveCall, world: World) -> float:
    """Return this rank's seconds for one call after a barrier."""
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
    cells = [[*COLUMNS, "unsupported"], *([*each.cells, ""] for each in measurements)]
    cells += [[operation, "", "", "", "", reason] for operation, reason in unsupported.items()]
    (path / "collectives.csv").write_text(csv_table(cells))
    cells = without_empty_columns(cells)
    note = f"collectives on {where}; median of the slowest rank's times, 10^9 bytes per second"
    (path / "collectives.md").write_text(f"{note}\n\n{markdown_table(cells)}\n")
    log.info("%s\n%s", note, text_table(cells, for_log=True))
    if measurements:
        figure, (axes,) = new_figure(1)
        for operation in dict.fromkeys(each.operation for each in measurements):
            line = [(each.num_bytes, each.bus_gb_s) for each in measurements if each.operation == operation]
            axes.plot(*zip(*line, strict=True), marker="o", label=operation)
        labels = {"xlabel": "bytes", "ylabel": "bus bandwidth, 10^9 bytes / s", "title": f"collectives on {where}"}
        axes.set(xscale="log", yscale="log", **labels)
        axes.legend(fontsize="small")
        figure.savefig(path / "collectives.png", dpi=120)


def _show(items: Sequence[object]) -> str:
    return f"[{','.join(map(str, items))}]"
