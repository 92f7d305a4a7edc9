"""task=compare: run the model for a few steps in every mode that supports it, and compare speed, memory and weights."""

import logging
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from runner.checkpoints.layout import list_checkpoints
from runner.checkpoints.saved_state import open_checkpoint
from runner.checkpoints.shard_file import SavedTensor
from runner.config.request import Request
from runner.config.schema import Comparison
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.rendezvous import join
from runner.errors import InputError, JobFailed
from runner.jobs.mirrored_directory import mirroring
from runner.jobs.task import LaunchingTask
from runner.records.attempts import error_line
from runner.records.console import logging_to
from runner.records.finding import CELLS
from runner.records.run_directory import CHECKPOINTS, Command, Destination, RunDirectory, new_directory
from runner.records.run_files import write_atomically
from runner.records.run_record import RunRecord
from runner.records.tables import csv_table, format_number, markdown_table, text_table

log = logging.getLogger(__name__)

DROPPED = ("task", "launcher", "compare", "logger", "callbacks", "name", "outputs")  # keys that a cell does not keep
HEADER = ("mode", "ranks", "samples/s", "step ms", "MiB per rank", "exchanged per step", "difference", "remark")
NOTES = (
    "exchanged per step: by the rank that exchanges most; a collective counts as the larger of its input and output, "
    "RPC as its tensors",
    "difference: the largest difference of a weight from parallel=none; it includes rounding errors, which grow with "
    "each step, unless precision=fp64",
)


@dataclass
class ComparedCell:
    """One mode at one world size."""

    mode: str
    world_size: int
    metrics: dict[str, float] = field(default_factory=dict)
    micro_batches: int | None = None  # None for the configured number
    difference: float | None = None  # the largest difference of a weight from parallel=none after the same steps
    remark: str = ""  # why the mode was skipped, or how it failed

    @property
    def name(self) -> str:
        return f"{self.mode}-{self.world_size}" + (f"-{self.micro_batches}" if self.micro_batches else "")

    def row(self) -> list[str]:
        if not self.metrics:
            return [self.mode, str(self.world_size), "", "", "", "", "", self.remark]
        memory = [value for name, value in self.metrics.items() if name.startswith("memory_mib/")]
        exchanged = [
            f"{name.removeprefix('bytes_per_step/')} {value / 1024:,.1f} KiB"
            for name, value in self.metrics.items()
            if name.startswith("bytes_per_step/")
        ]
        return [
            self.mode,
            str(self.world_size),
            format_number(round(self.metrics["samples_per_second"])),
            f"{self.metrics['step_time_s'] * 1000:.1f}",
            f"{min(memory):.0f}" if len(set(map(round, memory))) == 1 else f"{min(memory):.0f}-{max(memory):.0f}",
            ", ".join(exchanged) or "nothing",
            "" if self.difference is None else f"{self.difference:.1e}",
            self.remark,
        ]


class Compare(LaunchingTask):
    """Runs task=measure for each mode and world size, in worlds that it starts or in the existing world."""

    section = "compare"

    def launch_jobs(self, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Measure every cell, save the table, and return each cell's samples per second. All ranks must call it."""
        config, command = request.config, request.command
        cells = _cells(config.compare, command.choices["parallel"], rank_info)
        world = join(rank_info, as_backend(config.backend))
        world.begin_job(as_backend(config.backend))
        path = Path(world.consensus.broadcast("compare", lambda: str(new_directory(config.local_outputs, config.name))))
        directory = RunDirectory(path, writes=rank_info.rank == 0)
        if directory.writes:
            directory.lock()
        with logging_to(rank_info.rank, path), ExitStack() as at_end:
            at_end.callback(directory.release)
            if directory.writes:
                at_end.enter_context(mirroring(path, config))
            record = RunRecord(path, task="compare", model=command.choices["model"], seed=config.seed)
            directory.prepare(config, command, record)
            directory.commit()
            log.info("comparing %d cells of %s on %s", len(cells), command.choices["model"], command.choices["data"])
            for cell in cells:
                _measure(cell, path, command, rank_info)
                log.info("%s", "  ".join(word for word in cell.row() if word))
            if world.world_size == 1 and cells[0].metrics:
                _compare_weights(cells, path, command, rank_info)
            if rank_info.rank == 0:
                _write(cells, path)
            log.info("run directory: %s", path)
            rates = {
                f"{cell.mode}/{cell.world_size}": cell.metrics["samples_per_second"] for cell in cells if cell.metrics
            }
            directory.record.metrics, directory.record.state = rates, "finished"
            directory.save_record()
        return rates


def _cells(options: Comparison, mode: str, rank_info: RankInfo) -> list[ComparedCell]:
    from runner.config.compose import modes_to_compare  # the command line imports tasks before it composes

    modes = modes_to_compare(mode, "compare.modes", options.modes)
    sizes = options.world_sizes if rank_info.world_size == 1 else [rank_info.world_size]
    cells = [ComparedCell(mode, size) for size in sizes for mode in modes]
    if rank_info.world_size > 1:
        return cells  # this world cannot run the reference, a world of one process
    return [ComparedCell("none", 1), *(cell for cell in cells if (cell.mode, cell.world_size) != ("none", 1))]


def _measure(cell: ComparedCell, path: Path, command: Command, rank_info: RankInfo) -> None:
    from runner.config.compose import checked, compose, for_mode
    from runner.launchers.launch import launch

    instead = [f"micro_batches={cell.micro_batches}"] if cell.micro_batches else []
    launcher = ["launcher=env"]
    if rank_info.world_size == 1:
        launcher = ["launcher=spawn", f"launcher.nproc_per_node={cell.world_size}"]
    dropped = [*DROPPED, "micro_batches"] if cell.micro_batches else DROPPED
    overrides = [*instead, "task=measure", "logger=none", *launcher]
    overrides += for_mode(command.overrides, command.choices["parallel"], cell.mode, dropped)
    try:
        cfg = compose(overrides)
        config = checked(cfg, overrides)
        command = replace(command, overrides=tuple(overrides), choices=dict(cfg.hydra.runtime.choices))
        cell.metrics = launch(Request(config, command, Destination(str(path / CELLS / cell.name))), rank_info)
    except InputError as error:
        cell.remark = f"skipped: {error.messages[0]}"
    except JobFailed as error:
        cell.remark = f"failed: {error_line(str(error))}"


def _compare_weights(cells: list[ComparedCell], path: Path, command: Command, rank_info: RankInfo) -> None:
    """Set the difference of each cell from the reference, the first cell: parallel=none in one process.

    A mode with more micro-batches, such as pipeline, is compared with a reference of the same number of micro-batches.
    """
    references = {cells[0].metrics["micro_batches"]: cells[0]}
    for cell in [cell for cell in cells if cell.metrics]:
        count = cell.metrics["micro_batches"]
        if count not in references:
            references[count] = ComparedCell("none", 1, micro_batches=int(count))
            _measure(references[count], path, command, rank_info)
        reference = references[count]
        if reference.micro_batches:
            cell.remark = f"compared with parallel=none and micro_batches={reference.micro_batches}"
        if reference.metrics:
            expected, found = _weights(reference, path), _weights(cell, path)
            cell.difference = max(
                float((found[name].read().double() - tensor.read().double()).abs().max())
                for name, tensor in expected.items()
            )


def _weights(cell: ComparedCell, path: Path) -> dict[str, SavedTensor]:
    (newest,) = list_checkpoints(path / CELLS / cell.name / CHECKPOINTS)
    return open_checkpoint(newest).model()


def _write(cells: list[ComparedCell], path: Path) -> None:
    """Log the table, and write it as Markdown and CSV and to TensorBoard, with world sizes as steps."""
    from torch.utils.tensorboard import SummaryWriter

    rows = [list(HEADER), *(cell.row() for cell in cells)]
    log.info("\n%s\n\n%s", text_table(rows, for_log=True), "\n".join(NOTES))
    write_atomically(path / "compare.md", "\n\n".join([markdown_table(rows), *NOTES]) + "\n")
    names = sorted({name for cell in cells for name in cell.metrics})
    header = ["mode", "world_size", "difference_to_none", "remark", *names]
    values = [
        [cell.mode, cell.world_size, cell.difference, cell.remark, *map(cell.metrics.get, names)] for cell in cells
    ]
    with SummaryWriter(str(path)) as board:
        for cell in cells:
            for name in {"samples_per_second", "step_time_s"} & cell.metrics.keys():
                board.add_scalar(f"compare_{name}/{cell.mode}", cell.metrics[name], cell.world_size)
    write_atomically(path / "compare.csv", csv_table([header, *values]))
