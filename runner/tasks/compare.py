"""task=compare: the user's own model in every mode that fits, side by side: which one should it be?"""

import csv
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.table import Table

from runner.config.schema import Config
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.rendezvous import join
from runner.errors import InputError, JobFailed, did_you_mean
from runner.fault_tolerance import checkpoint
from runner.runs.console import WIDTH, draw_table, logging_to
from runner.runs.run_directory import CHECKPOINTS, Request, RunDirectory, new_directory
from runner.runs.train_state import available

log = logging.getLogger(__name__)

HEADER = ("mode", "ranks", "samples/s", "step ms", "MiB per rank", "exchanged per step", "off none by", "remark")


@dataclass
class Cell:
    """One mode in one world; `remark` says why it was left out, or how it failed."""

    mode: str
    world_size: int
    metrics: dict[str, float] = field(default_factory=dict)
    micro_batches: int | None = None  # instead of those that were typed
    difference: float | None = None  # largest of a weight to parallel=none after the same steps
    remark: str = ""

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.mode}-{self.world_size}" + (f"-{self.micro_batches}" if self.micro_batches else "")

    def row(self) -> list[str]:
        """The cell as the table shows it, in the order of HEADER."""
        if not self.metrics:
            return [self.mode, str(self.world_size), "", "", "", "", "", self.remark]
        memory = [value for name, value in self.metrics.items() if name.startswith("memory_mib/")]
        exchanged = {
            name.removeprefix("bytes_per_step/"): value
            for name, value in self.metrics.items()
            if name.startswith("bytes_per_step/")
        }
        return [
            self.mode,
            str(self.world_size),
            f"{self.metrics['samples_per_second']:,.0f}",
            f"{self.metrics['step_time_s'] * 1000:.1f}",
            f"{min(memory):.0f}" if len(set(map(round, memory))) == 1 else f"{min(memory):.0f}-{max(memory):.0f}",
            ", ".join(f"{name} {_bytes(value)}" for name, value in exchanged.items()) or "nothing",
            "" if self.difference is None else f"{self.difference:.1e}",
            self.remark,
        ]


class Compare:
    """Runs task=measure for each mode and world size; the worlds are its own, or the one that it is part of."""

    reads_run = False
    reads_checkpoint = False
    needs_experiment = False
    trains = False
    picks_split = False
    section = "compare"

    def launch_jobs(self, config: Config, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Measure every cell, print and keep the table. Returns the samples per second of each. All ranks must call it.

        Raises InputError for a mode or a world size that cannot be.
        """
        cells = _cells(config, rank_info)
        world = join(rank_info, as_backend(config.backend))
        world.begin_job(as_backend(config.backend))
        path = Path(world.agreement.share("compare", lambda: str(new_directory(config.outputs, config.name))))
        directory = RunDirectory(path, writes=rank_info.rank == 0)
        with logging_to(rank_info.rank, path):
            directory.record(config, request, task="compare", model=request.choices["model"], seed=config.seed)
            log.info("comparing %d cells of %s on %s", len(cells), request.choices["model"], request.choices["data"])
            for cell in cells:
                _measure(cell, path, request, rank_info)
                log.info("%s", "  ".join(word for word in cell.row() if word))
            references = _measure_references(cells, path, request, rank_info)
            if rank_info.rank == 0:
                _compare_weights(cells, references, path)
                log.info("\n%s", _as_text(cells))
                notes = _notes(config, cells)
                log.info("\n%s", "\n".join(notes))
                _write(cells, path, notes)
            log.info("run directory: %s", path)
            rates = {
                f"{cell.mode}/{cell.world_size}": cell.metrics["samples_per_second"] for cell in cells if cell.metrics
            }
            directory.result.metrics, directory.result.state = rates, "finished"
            directory.save_result()
        return rates


def _cells(config: Config, rank_info: RankInfo) -> list[Cell]:
    from runner.config.compose import options_of  # the entry imports the tasks

    known = options_of("parallel")
    modes = config.compare.modes if config.compare.modes is not None else known
    for mode in modes:
        if mode not in known:
            raise InputError(f"compare.modes={modes}: no such mode as {mode}{did_you_mean(mode, known)}")
    sizes = config.compare.world_sizes if rank_info.world_size == 1 else [rank_info.world_size]
    if not sizes or min(sizes) < 1:
        raise InputError(f"compare.world_sizes={sizes} must be numbers of processes of at least 1; try [1,2]")
    cells = [Cell(mode, size) for size in sizes for mode in modes]
    reference = Cell("none", 1)
    # The reference comes first; a world that exists already cannot be one process, and compares without it.
    if rank_info.world_size == 1:
        cells = [reference, *(cell for cell in cells if (cell.mode, cell.world_size) != ("none", 1))]
    return cells


def _measure(cell: Cell, path: Path, request: Request, rank_info: RankInfo) -> None:
    from runner.config.compose import checked, compose
    from runner.launchers.launch import launch

    dropped = ["task", "parallel", "launcher", "compare", "logger", "callbacks", "name", "outputs"]
    instead = []
    if cell.micro_batches:
        dropped.append("micro_batches")
        instead.append(f"micro_batches={cell.micro_batches}")
    kept = [word for word in request.overrides if word.lstrip("+~").split("=")[0].split(".")[0] not in dropped]
    own = ["launcher=env"]
    if rank_info.world_size == 1:
        own = ["launcher=spawn", f"launcher.nproc_per_node={cell.world_size}"]
    # What was typed for one mode's options holds for that mode.
    options = [w for w in request.overrides if w.lstrip("+").startswith("parallel.")]
    if request.choices["parallel"] != cell.mode:
        options = []
    overrides = [*kept, *instead, "task=measure", f"parallel={cell.mode}", "logger=none", *own, *options]
    try:
        cfg = compose(overrides)
        config = checked(cfg, overrides)
        directory = str(path / "cells" / cell.name)
        choices = dict(cfg.hydra.runtime.choices)
        own_request = Request(tuple(overrides), request.config_dirs, request.command, directory, choices)
        cell.metrics = launch(config, own_request, rank_info)
    except InputError as error:
        cell.remark = f"left out: {error.messages[0]}"
    except JobFailed as error:
        cell.remark = f"failed: {str(error).strip().splitlines()[-1]}"


def _measure_references(cells: list[Cell], path: Path, request: Request, rank_info: RankInfo) -> dict[float, Cell]:
    """Parallel=none on one process, by number of micro-batches: a mode that cuts them further is held to as many."""
    reference = next((cell for cell in cells if (cell.mode, cell.world_size) == ("none", 1) and cell.metrics), None)
    if reference is None or rank_info.world_size > 1:
        return {}
    references = {reference.metrics["micro_batches"]: reference}
    for cell in cells:
        count = cell.metrics.get("micro_batches", reference.metrics["micro_batches"])
        if count not in references:
            references[count] = Cell("none", 1, micro_batches=int(count))
            _measure(references[count], path, request, rank_info)
        if references[count] is not reference and not cell.remark:
            cell.remark = f"compared with none of micro_batches={count:.0f}"
    return references


def _compare_weights(cells: list[Cell], references: dict[float, Cell], path: Path) -> None:
    def weights(cell: Cell) -> Mapping[str, torch.Tensor]:
        (newest,) = available(path / "cells" / cell.name / CHECKPOINTS)
        return checkpoint.open_checkpoint(newest).model()

    for cell in cells:
        reference = references.get(cell.metrics.get("micro_batches", 0))
        if reference is not None and reference.metrics:
            expected, found = weights(reference), weights(cell)
            cell.difference = max(
                float((found[name].double() - w.double()).abs().max()) for name, w in expected.items()
            )


def _notes(config: Config, cells: list[Cell]) -> list[str]:
    lines = [
        "exchanged per step: the largest rank's, of a collective the larger of what goes in and comes out, of RPC the "
        "tensors; the parameter server exchanges with every trainer"
    ]
    if config.precision != "fp64" and any(cell.difference is not None for cell in cells):
        lines.append(
            f"off none by: in {config.precision} rounding grows from step to step; with precision=fp64 what is left "
            "is what a mode computes otherwise"
        )
    return lines


def _as_text(cells: list[Cell]) -> str:
    table = Table(*HEADER, box=None, pad_edge=False)
    for cell in cells:
        table.add_row(*cell.row())
    return draw_table(table, WIDTH)  # the run's log.txt keeps it


def _write(cells: list[Cell], path: Path, notes: list[str]) -> None:
    """The table as Markdown, CSV and in TensorBoard, where world sizes are steps."""
    from torch.utils.tensorboard import SummaryWriter

    rows = [HEADER, ("---",) * len(HEADER), *(cell.row() for cell in cells)]
    markdown = "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n\n" + "\n\n".join(notes) + "\n"
    (path / "compare.md").write_text(markdown)
    with (path / "compare.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["mode", "world_size", "difference_to_none", "remark", *_metric_names(cells)])
        for cell in cells:
            numbers = [cell.metrics.get(name, "") for name in _metric_names(cells)]
            writer.writerow([cell.mode, cell.world_size, cell.difference, cell.remark, *numbers])
    with SummaryWriter(str(path)) as board:
        board.add_text("compare", markdown)
        for cell in cells:
            for name in ("samples_per_second", "step_time_s"):
                if name in cell.metrics:
                    board.add_scalar(f"compare_{name}/{cell.mode}", cell.metrics[name], cell.world_size)


def _metric_names(cells: list[Cell]) -> list[str]:
    return sorted({name for cell in cells for name in cell.metrics})


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
