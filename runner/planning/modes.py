"""The plans of several modes, each with the configuration that the command would have in that mode."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pickle import PicklingError

import torch

from runner.config.compose import checked, compose, for_mode
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.failures.signals import exit_at_once_with_parent
from runner.distributed.world import World
from runner.errors import InputError
from runner.input.datasets import load_data
from runner.input.source import Source
from runner.planning.cell import Cell, add_times, plan_cell
from runner.planning.costs import Costs, Device
from runner.planning.forwards import Forwards
from runner.planning.imagined_rank import ModeConfig
from runner.records.run_directory import Command


def compose_modes(command: Command, modes: Sequence[str], dropped: Sequence[str]) -> dict[str, ModeConfig | InputError]:
    """Return the configuration of each mode, or the error with which the command line would refuse it.

    dropped: The top-level keys whose overrides are left out.
    """
    found: dict[str, ModeConfig | InputError] = {}
    for mode in modes:
        overrides = for_mode(command.overrides, command.choices["parallel"], mode, dropped)
        try:
            cfg = compose(overrides)
            found[mode] = ModeConfig(checked(cfg, overrides), dict(cfg.hydra.runtime.choices), overrides)
        except InputError as error:
            found[mode] = error
    return found


def plan_modes(
    modes: Mapping[str, ModeConfig | InputError],
    limits: Mapping[int, float],
    device: Device,
    num_processes: int = 1,
) -> list[Cell]:
    """Plan each mode at each world size. A refused mode results in cells with the reason.

    limits: the memory of a rank in bytes, by world size. num_processes: the number of processes that plan. This process
    measures the operators once the others have ended, because they would slow it down.
    """
    data: list[tuple[Source, Source]] = []
    plans: list[Callable[[], Cell]] = []
    forwards, costs = Forwards(), dict[int, Costs]()
    for mode, composed in modes.items():
        try:
            if isinstance(composed, InputError):
                raise composed
            world = World(RankInfo(), None, as_backend(composed.config.backend))
            data = data or [load_data(composed.config, composed.choices, world)]
            costs = costs or {
                size: Costs(device, size, composed.config.threads, composed.config.tf32) for size in limits
            }
        except InputError as error:
            plans += [partial(Cell, mode, size, error.messages[0], is_refused=True) for size in limits]
            continue
        plans += [
            partial(plan_cell, composed, data[0], mode, size, limit, not device.is_measured, forwards)
            for size, limit in limits.items()
        ]
    cells = list[Cell]()
    for cell in _plan_all(plans, num_processes):
        if cell.ranks:
            add_times(cell, costs[cell.world_size])
        cells.append(cell)
    return cells


def _plan_all(plans: list[Callable[[], Cell]], num_processes: int) -> Iterable[Cell]:
    if num_processes > 1:
        _plans[:] = plans
        # A worker may exit because the memory is exhausted, and an operator may exist only in the worker that loaded it
        # or have arguments that cannot be sent.
        with (
            suppress(RuntimeError, AttributeError, TypeError, PicklingError),
            ProcessPoolExecutor(min(num_processes, len(plans)), get_context("fork"), _begin_worker) as pool,
        ):
            return [*pool.map(_plan, range(len(plans)))]
    return (plan() for plan in plans)


_plans: list[Callable[[], Cell]] = []  # inherited by the forked workers, because a dataset may not be picklable


def _plan(number: int) -> Cell:
    return _plans[number]()


def _begin_worker() -> None:
    """Use one thread, and end with the parent."""
    torch.set_num_threads(1)
    exit_at_once_with_parent()
