"""task=plan: the memory, communication and time of each mode at each world size, from the steps of imagined ranks."""

import json
import logging
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from runner.config.request import Request
from runner.config.schema import Planning
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.machine import available_memory
from runner.errors import InputError, quantity
from runner.jobs.mirrored_directory import mirroring
from runner.jobs.task import LaunchingTask
from runner.paths import CONF
from runner.planning.cell import Cell
from runner.planning.costs import Device, load_device, with_measured_link
from runner.planning.memory import GIB, KINDS
from runner.process.cores import allowed_cores
from runner.records.console import logging_to
from runner.records.report.plots import new_figure
from runner.records.run_directory import Command, RunDirectory, new_directory
from runner.records.run_files import write_atomically
from runner.records.run_record import RunRecord
from runner.records.tables import format_number, markdown_table, text_table, without_empty_columns

log = logging.getLogger(__name__)

DROPPED = ("task", "launcher", "plan", "logger", "callbacks", "metrics", "monitor", "name", "outputs")


class Plan(LaunchingTask):
    """Plans modes and world sizes in this process, which needs neither their ranks nor their devices."""

    section = "plan"

    def launch_jobs(self, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Plan every cell, log the tables, and write plan.json, plan.md and plan.png. Return the samples per second.

        Raises InputError for an unknown mode or device, an invalid world size, if no mode can be planned, or if none
        fits into the memory.
        """
        if rank_info.world_size > 1:
            raise InputError(
                f"task=plan must run in one process, but the world has {rank_info.world_size}; start it with "
                "`python -m runner`"
            )
        config, options, command = request.config, request.config.plan, request.command
        directories = [CONF, *map(Path, command.config_dirs)]
        device = load_device(options.device, directories, kind=as_backend(config.backend).device_type())
        if options.collectives:
            device = with_measured_link(device, Path(options.collectives))
        cells = _plan(options, command, device)
        _check(cells, options.memory_gib)
        directory = RunDirectory(new_directory(config.local_outputs, config.name), writes=True)
        directory.lock()
        try:
            with mirroring(directory.path, config), logging_to(0, directory.path):
                record = RunRecord(directory.path, task="plan", model=command.choices["model"], seed=config.seed)
                directory.prepare(config, command, record)
                directory.commit()
                _write(cells, directory.path, command, device)
                log.info("run directory: %s", directory.path)
                rates = {f"{cell.mode}/{cell.world_size}": cell.samples_per_s for cell in cells if cell.ranks}
                directory.record.metrics, directory.record.state = rates, "finished"
                directory.save_record()
        finally:
            directory.release()
        return rates


def _plan(options: Planning, command: Command, device: Device) -> list[Cell]:
    # Imported here, because the command line imports tasks before it composes the configuration.
    from runner.config.compose import modes_to_compare
    from runner.planning.modes import compose_modes, plan_modes

    modes = modes_to_compare(command.choices["parallel"], "plan.modes", options.modes)
    sizes = options.world_sizes
    memory = device.memory_gib if options.memory_gib is None else options.memory_gib
    limits = {size: available_memory() / size if memory is None else memory * GIB for size in sizes}
    return plan_modes(compose_modes(command, modes, DROPPED), limits, device, len(allowed_cores()))


def _check(cells: Sequence[Cell], memory_gib: float | None) -> None:
    """Raise InputError if no cell can be planned, or if none fits into the memory."""
    planned = [cell for cell in cells if cell.ranks]
    if not planned:
        reasons = dict.fromkeys(f"{cell.mode}: {cell.reason}" for cell in cells)
        raise InputError(*reasons)
    if not any(cell.fits for cell in planned):
        least = min(planned, key=lambda cell: cell.peak)
        key = "" if memory_gib is None else f"plan.memory_gib={memory_gib}: "
        raise InputError(
            f"{key}no mode fits into {least.limit / GIB:.3g} GiB per rank: the smallest need is "
            f"{least.peak / GIB:.3g} GiB, of parallel={least.mode} on {quantity(least.world_size, 'rank')}; "
            "try larger plan.world_sizes, a larger micro_batches, or activation_checkpointing=full"
        )


def _write(cells: Sequence[Cell], path: Path, command: Command, device: Device) -> None:
    """Log the tables, and write them and the plot to the directory `path`."""
    planned = [cell for cell in cells if cell.ranks]
    unit, tables = _tables(cells, planned)
    times = "measured operators of this machine" if device.is_measured else f"the data sheet of {device.name}"
    notes = [
        f"{unit}: peak memory of the tensors of a step, on the rank that needs the most. samples that fit: the largest "
        "local micro-batch",
        "exchanged per step: counted as in task=compare. efficiency: samples per second and rank, relative to the best "
        "mode at the smallest world size",
        f"times: estimated from {times}, not calibrated",
    ]
    log.info("\n%s\n\n%s", "\n\n".join(text_table(table, for_log=True) for table in tables), "\n".join(notes))
    fitting = [cell for cell in planned if cell.fits]
    exact = [cell for cell in fitting if cell.is_exact]
    fastest = max(exact or fitting, key=lambda cell: cell.samples_per_s)
    training = _command(fastest, command, device)
    log.info("fastest that fits: parallel=%s on %s\n%s", fastest.mode, quantity(fastest.world_size, "rank"), training)
    text = "\n\n".join([*map(markdown_table, tables), *notes, f"fastest that fits: `{training}`"])
    write_atomically(path / "plan.md", text + "\n")
    content = {"device": device.name, "command": training, "cells": [cell.as_record() for cell in cells]}
    write_atomically(path / "plan.json", json.dumps(content, indent=1) + "\n")
    _plot(planned, path, device)


def _tables(cells: Sequence[Cell], planned: Sequence[Cell]) -> tuple[str, list[list[list[str]]]]:
    """Return the unit of memory, and the tables: memory, speeds, and the reasons why modes cannot be planned."""
    smallest = min(cell.world_size for cell in planned)
    best_of_smallest = max(cell.samples_per_s / smallest for cell in planned if cell.world_size == smallest)
    unit, scale = ("GiB", GIB) if min(cell.peak for cell in planned) >= GIB else ("MiB", 2**20)
    needs = [["mode", "ranks", "mesh", "fits", unit, "on rank", *KINDS, "samples that fit"]]
    speeds = [["mode", "ranks", "exchanged per step", "bubble", "step ms", "samples/s", "efficiency"]]
    reasons = [["mode", "ranks", "reason why it cannot be planned"]]
    for cell in cells:
        name = [cell.mode, str(cell.world_size)]
        if not cell.ranks:
            reasons.append([*name, cell.reason])
            continue
        worst = cell.worst
        parts = [f"{worst.memory[kind] / scale:,.2f}" for kind in KINDS]
        fits = "yes" if cell.fits else "no"
        most = "" if cell.most_rows is None else str(cell.most_rows)
        needs.append([*name, cell.mesh, fits, f"{cell.peak / scale:,.2f}", str(worst.rank), *parts, most])
        exchanged = ", ".join(f"{kind} {count / 1024:,.1f} KiB" for kind, count in cell.bytes_per_step.items())
        speed = [f"{1000 * cell.step_s:,.1f}", format_number(round(cell.samples_per_s))]
        efficiency = cell.samples_per_s / cell.world_size / best_of_smallest
        bubble = f"{cell.bubble:.0%}" if cell.bubble >= 0.005 else ""
        speeds.append([*name, exchanged or "nothing", bubble, *speed, f"{efficiency:.0%}"])
    tables = [table for table in (needs, without_empty_columns(speeds), reasons) if len(table) > 1]
    return unit, tables


def _command(cell: Cell, command: Command, device: Device) -> str:
    """Return the command that trains in the mode and world size of a cell."""
    from runner.config.compose import for_mode

    overrides = for_mode(command.overrides, command.choices["parallel"], cell.mode, ("task", "plan", "launcher"))
    config_dirs = [f"--config-dir={directory}" for directory in command.config_dirs]
    return f"{start_command(cell.world_size, device)} {shlex.join([*config_dirs, *overrides])}"


def start_command(num_ranks: int, device: Device) -> str:
    """Return the beginning of the command that starts the ranks, the same number on each machine."""
    if num_ranks == 1:
        return "python -m runner"
    most = int(device.ranks_per_machine or num_ranks)
    per_machine = max(count for count in range(1, most + 1) if num_ranks % count == 0)
    machines = num_ranks // per_machine
    rendezvous = f"--nnodes={machines} --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 " if machines > 1 else ""
    return f"torchrun {rendezvous}--nproc-per-node={per_machine} -m runner"


def _plot(cells: Sequence[Cell], path: Path, device: Device) -> None:
    """Plot memory and speed against the world size."""
    figure, panels = new_figure(2)
    values: list[tuple[str, Callable[[Cell], float]]] = [
        ("GiB per rank", lambda cell: cell.peak / GIB),
        ("samples/s", lambda cell: cell.samples_per_s),
    ]
    for axes, (label, value) in zip(panels, values, strict=True):
        for mode in dict.fromkeys(cell.mode for cell in cells):
            points = [(cell.world_size, value(cell)) for cell in cells if cell.mode == mode]
            axes.plot(*zip(*points, strict=True), marker="o", label=mode)
        axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel=label, title=f"plan for {device.name}")
    panels[0].legend(fontsize="small")
    figure.savefig(path / "plan.png", dpi=120)
