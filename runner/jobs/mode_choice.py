"""parallel=auto: a plan finds the modes that fit, and a few steps of the best ones are measured."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.config.compose import for_mode, modes_to_compare, prepared_hydra
from runner.config.request import Request
from runner.config.validate import AUTO
from runner.distributed.backend import as_backend
from runner.distributed.world import World
from runner.errors import InputError, JobFailed, quantity
from runner.jobs.continuation import agree_on_directory
from runner.jobs.fit import count_that_fits, from_rank_0, plan_for
from runner.parallel.auto import Auto
from runner.planning.cell import Cell
from runner.planning.imagined_rank import ModeConfig
from runner.planning.memory import GIB
from runner.planning.modes import compose_modes
from runner.records.attempts import error_line
from runner.records.console import logging_to
from runner.records.finding import CELLS
from runner.records.run_directory import CHOICE, Destination
from runner.records.run_files import read_mapping, write_atomically
from runner.training.components import make_parallel

log = logging.getLogger(__name__)

LARGEST_WORLD = 1024  # the largest world size that an error suggests for a model that does not fit
MEASURE = ("task=measure", "task.compared_steps=0", "task.timed_steps=10", "logger=none", "launcher=env")
DROPPED = (
    *("task", "launcher", "logger", "callbacks", "metrics", "monitor", "fork", "init_from", "checkpoint", "profile"),
    *("name", "outputs", "run_id"),
)

Modes = Mapping[str, ModeConfig | InputError]
RunOnce = Callable[[Request, World], dict[str, float]]


def choose_mode(run_once: RunOnce, request: Request, world: World) -> Request:
    """Return the request of the job with the fastest mode that fits. All ranks must call it.

    The choice is recorded in the run directory, in the file CHOICE. A job that resumes the run in a world of the same
    size uses the recorded mode. Raises InputError if no mode fits, and Preempted as `run_once` does.
    """
    config, command, destination = request.config, request.command, request.destination
    overrides, chosen = command.overrides, command.choices["parallel"]
    options = make_parallel(config.parallel, command.choices)
    assert isinstance(options, Auto)
    with prepared_hydra(command.config_dirs):
        measured = (*for_mode(overrides, chosen, chosen, DROPPED), *MEASURE)
        modes = compose_modes(replace(command, overrides=measured), modes_to_compare(chosen), ())

    def candidates() -> dict[str, Any]:
        directory = destination.directory or world.consensus.before_restart("directory")
        if directory and Path(directory, CHOICE).exists():
            choice = read_mapping(Path(directory, CHOICE))
            if choice.get("world_size") == world.world_size:
                return choice
        return {"candidates": _candidates(modes, request, world, options)}

    choice = from_rank_0(world, as_backend(config.backend), candidates)
    path = agree_on_directory(request, world)
    if "mode" in choice:
        for _ in range(choice["jobs"]):  # so that a restarted world numbers its jobs identically
            world.begin_job(as_backend(config.backend))
    else:
        with logging_to(world.rank, path):
            choice = _measure(run_once, modes, choice["candidates"], path, request, world)
    mode = modes[choice["mode"]]
    assert isinstance(mode, ModeConfig)
    return replace(
        request,
        config=replace(config, parallel=mode.config.parallel),
        command=replace(
            command,
            overrides=tuple(for_mode(overrides, chosen, choice["mode"], ())),
            choices={**command.choices, "parallel": choice["mode"]},
        ),
        destination=replace(destination, directory=str(path)),
    )


def _candidates(modes: Modes, request: Request, world: World, options: Auto) -> dict[str, Any]:
    """Return the modes to measure, the fastest according to the plan first, each with its number of micro-batches.

    Modes that are not equal to parallel=none are left out. Modes that cannot be planned, because the model reads values
    of tensors, come last. Raises InputError if no mode fits.
    """
    print(f"auto     planning {', '.join(modes)}", flush=True)
    config_dirs = request.command.config_dirs
    cells = plan_for(world, modes, config_dirs, memory_gib=options.memory_gib, device=options.device)
    if all(cell.is_refused for cell in cells):
        raise InputError(*dict.fromkeys(f"parallel={cell.mode}: {cell.reason}" for cell in cells))
    config = request.config
    counts = {cell.mode: _micro_batches(cell, config.micro_batches, config.batch_size) for cell in cells}
    fitting = [cell for cell in cells if not cell.is_refused and cell.is_exact and counts[cell.mode]]
    if not fitting:
        raise InputError(_describe_need(cells, modes, request, world, options))
    fitting.sort(key=lambda cell: -cell.samples_per_s)
    return {cell.mode: counts[cell.mode] for cell in fitting[: options.candidates]}


def _micro_batches(cell: Cell, wanted: int | str, batch_size: int) -> int | None:
    """Return the number of micro-batches with which the mode of the cell fits; None if it does not fit.

    wanted: The value of micro_batches, a number or auto.
    """
    if not cell.ranks:
        return 1 if wanted == AUTO else int(wanted)
    if wanted == AUTO:
        return count_that_fits(cell, batch_size)
    return int(wanted) if cell.fits else None


def _describe_need(cells: list[Cell], modes: Modes, request: Request, world: World, options: Auto) -> str:
    """Return the error for a model that fits in no mode, with the smallest world size in which it would fit."""
    exact = [cell for cell in cells if cell.ranks and cell.is_exact]
    if not exact:
        return "parallel=auto: no supported mode is equal to parallel=none; choose a mode"
    least = min(exact, key=lambda cell: cell.peak)
    config = request.config
    is_auto, ranks = config.micro_batches == AUTO, quantity(world.world_size, "rank")
    text = (
        f"parallel=auto: the model does not fit into {least.limit / GIB:.3g} GiB per rank on {ranks}: the smallest "
        f"need is {least.peak / GIB:.3g} GiB, of parallel={least.mode}{' with one micro-batch' if is_auto else ''}"
    )
    size = 2 * world.world_size
    while size <= LARGEST_WORLD:
        cells = plan_for(
            world, modes, request.command.config_dirs, size, memory_gib=options.memory_gib, device=options.device
        )
        for cell in cells:
            if cell.ranks and cell.is_exact and _micro_batches(cell, config.micro_batches, config.batch_size):
                return f"{text}; parallel={cell.mode} fits on {size} ranks"
        size *= 2
    return f"{text}; try activation_checkpointing=full{'' if is_auto else ', micro_batches=auto'} or a smaller model"


def _measure(
    run_once: RunOnce, modes: Modes, counts: dict[str, int], path: Path, request: Request, world: World
) -> dict[str, Any]:
    """Run task=measure in each candidate mode, and return the choice, which rank 0 records. All ranks must call it.

    Each mode is measured twice, and the higher speed is used, because the first job of a process is slower than later
    ones.
    """
    log.info("auto     measuring %s", ", ".join(counts))
    rates, failed = dict[str, float](), dict[str, str]()
    num_jobs = 1  # the one that broadcasts the choice
    for name, count in [*counts.items()] * 2:
        mode = modes[name]
        if name in failed or isinstance(mode, InputError):
            continue
        num_jobs += 1
        measured = replace(
            request,
            config=replace(mode.config, micro_batches=count),
            command=replace(
                request.command, overrides=(*mode.overrides, f"micro_batches={count}"), choices=mode.choices
            ),
            destination=Destination(str(path / CELLS / name)),
        )
        try:
            metrics = run_once(measured, world)
            rates[name] = max(rates.get(name, 0.0), metrics["samples_per_second"])
        except (InputError, JobFailed) as error:
            rates.pop(name, None)
            failed[name] = error_line(str(error)) or ""

    def choose() -> dict[str, Any]:
        if not rates:
            raise InputError(*(f"parallel=auto: parallel={name} failed: {why}" for name, why in failed.items()))
        choice = {
            "mode": max(rates, key=lambda name: rates[name]),
            "world_size": world.world_size,
            "samples_per_second": rates,
            "failed": failed,
            "jobs": num_jobs,
        }
        write_atomically(path / CHOICE, json.dumps(choice, indent=1) + "\n")
        return choice

    world.begin_job(world.backend)
    return dict(world.consensus.broadcast("choice", choose))
