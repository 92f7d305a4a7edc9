"""task=collectives: every collective in use, checked against values worked out by hand, and its bandwidth."""

import csv
import io
import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from runner.config.schema import Config
from runner.distributed.world import World
from runner.runs.run_directory import RunDirectory
from runner.tasks.exchanges import EXCHANGES, Exchange

log = logging.getLogger(__name__)
COLUMNS = ("operation", "bytes", "seconds", "algorithm_gb_s", "bus_gb_s")


@dataclass(frozen=True)
class Measurement:
    """How long one collective took over this many bytes, in seconds, and what that is in 10^9 bytes per second.

    Bytes are those of the whole data, as in nccl-tests: what all ranks hold together after a gather, or before a
    scatter. The bus bandwidth is what the slowest link must have carried, and so can be compared between operations
    and world sizes.
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
    """The share of the data that the busiest link must carry, at best."""
    if operation == "all_reduce":
        return 2 * (world_size - 1) / world_size
    if operation in ("broadcast", "reduce", "send_recv"):
        return 1.0
    return (world_size - 1) / world_size


class Collectives:
    """Check and time `operations` over messages of `sizes` bytes, on the backend and world of the configuration.

    Each is timed `repeats` times after `warmup` calls; a time is that of the slowest rank, the result their median.
    """

    section = None
    reads_run = False
    reads_checkpoint = False
    needs_experiment = False
    trains = False
    picks_split = False
    min_world_size = 2

    def __init__(
        self,
        sizes: Sequence[int] = (1024, 65536, 1048576, 16777216),
        repeats: int = 10,
        warmup: int = 2,
        operations: Sequence[str] = tuple(EXCHANGES),
    ) -> None:
        if not sizes or min(sizes) < 4:
            raise ValueError(f"sizes={_show(sizes)} must be one or more numbers of bytes of at least 4; try [1024]")
        if repeats < 1:
            raise ValueError(f"repeats={repeats} must be at least 1; try 10")
        if warmup < 0:
            raise ValueError(f"warmup={warmup} must be at least 0; try 2")
        if unknown := [operation for operation in operations if operation not in EXCHANGES]:
            raise ValueError(
                f"operations={_show(operations)}: there is no {unknown[0]}; choose among {', '.join(EXCHANGES)}"
            )
        if not operations:
            raise ValueError(f"operations=[] must name one or more; choose among {', '.join(EXCHANGES)}")
        self.sizes, self.repeats, self.warmup = sorted(set(sizes)), repeats, warmup
        self.operations = list(dict.fromkeys(operations))

    def check(self, config: Config, world_size: int) -> list[str]:
        return []

    def run(
        self, config: Config, experiment: None, world: World, directory: RunDirectory, console: Console
    ) -> dict[str, float]:
        where = f"{world.world_size} ranks over {world.backend.process_group_backend()} on {world.device.type}"
        log.info("collectives of %s", where)
        unsupported: dict[str, str] = {}
        measurements: list[Measurement] = []
        for operation in self.operations:
            if reason := check(operation, world):
                unsupported[operation] = reason
                log.warning("%s is not supported here: %s", operation, reason)
                continue
            log.info("%s is right", operation)
            measurements += [self._measure(operation, size, world) for size in self.sizes]
        if directory.writes:
            console.print(_table(where, measurements, unsupported))
            _write(directory.path, where, measurements, unsupported)
        log.info("run directory: %s", directory.path)
        metrics = {}
        for each in measurements:
            metrics[f"{each.operation}/bus_gb_s/{each.num_bytes}"] = each.bus_gb_s
            metrics[f"{each.operation}/algorithm_gb_s/{each.num_bytes}"] = each.algorithm_gb_s
            metrics[f"{each.operation}/seconds/{each.num_bytes}"] = each.seconds
        directory.log_metrics(0, 0, metrics)
        return metrics

    def _measure(self, operation: str, size: int, world: World) -> Measurement:
        """All ranks must call it."""
        exchange = _prepare(operation, size, world)
        seconds = [_time(exchange, world) for _ in range(self.warmup + self.repeats)][self.warmup :]
        own = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(own, op=dist.ReduceOp.MAX)  # on the CPU, as every backend has a control plane there
        return Measurement(operation, exchange.num_bytes, statistics.median(own.tolist()), world.world_size)


def check(operation: str, world: World) -> str | None:
    """Why the backend has no such collective, in its own words; None where it gives the right values.

    All ranks must call it. Raises RuntimeError on all of them, naming the collective and a rank, where one has wrong
    values.
    """
    exchange = _prepare(operation, 4 * 3 * world.world_size, world)  # three numbers per rank
    unsupported, wrong = [], []
    try:
        exchange.call()
        _synchronize(world.device)
    except (RuntimeError, NotImplementedError) as error:
        text = str(error).splitlines()[0]
        if not isinstance(error, NotImplementedError) and "support" not in text:
            raise
        unsupported.append(text)
    else:
        wrong = [f"{operation} on rank {world.rank}: {message}" for message in exchange.differences()]
    # Every rank continues in the same way: what only one of them refuses would leave the others waiting.
    if wrong := world.agreement.first_error(f"collectives/{operation}/wrong", wrong):
        raise RuntimeError(wrong[0])
    return next(iter(world.agreement.first_error(f"collectives/{operation}/unsupported", unsupported)), None)


def _prepare(operation: str, size: int, world: World) -> Exchange:
    """Data of `size` bytes, in whole float32 for each rank."""
    per_rank = max(size // 4 // world.world_size, 1)
    return EXCHANGES[operation](world.rank, world.world_size, per_rank, world.device)


def _time(exchange: Exchange, world: World) -> float:
    """This rank's seconds for one call, from a common start."""
    world.collectives.sum(torch.zeros(1))
    _synchronize(world.device)
    start = time.perf_counter()
    exchange.call()
    _synchronize(world.device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _table(where: str, measurements: Sequence[Measurement], unsupported: dict[str, str]) -> Table:
    table = Table(title=f"collectives of {where}, 10^9 bytes per second")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "operation" else "right")
    for each in measurements:
        table.add_row(*each.cells)
    for operation in unsupported:
        table.add_row(operation, "unsupported")
    return table


def _write(path: Path, where: str, measurements: Sequence[Measurement], unsupported: dict[str, str]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS, "unsupported"])
    writer.writerows([*each.cells, ""] for each in measurements)
    writer.writerows([operation, "", "", "", "", reason] for operation, reason in unsupported.items())
    (path / "collectives.csv").write_text(text.getvalue())

    lines = [f"Collectives of {where}; median of the slowest rank's times, 10^9 bytes per second.", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|---|---:|---:|---:|---:|"]
    lines += ["| " + " | ".join(each.cells) + " |" for each in measurements]
    if unsupported:
        lines += ["", "Not supported here:", ""]
        lines += [f"- {operation}: {reason}" for operation, reason in unsupported.items()]
    (path / "collectives.md").write_text("\n".join(lines) + "\n")
    if measurements:
        _draw(path / "collectives.png", where, measurements)


def _draw(path: Path, where: str, measurements: Sequence[Measurement]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="bytes", ylabel="bus bandwidth, 10^9 bytes / s")
    for operation in dict.fromkeys(each.operation for each in measurements):
        line = [(each.num_bytes, each.bus_gb_s) for each in measurements if each.operation == operation]
        axes.plot(*zip(*line, strict=True), marker="o", label=operation)
    axes.set_title(f"collectives of {where}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _show(items: Sequence[object]) -> str:
    return f"[{','.join(map(str, items))}]"
