"""Plans of modes for the ranks of this world, and the number of micro-batches that fit into their memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from runner.config.validate import AUTO
from runner.distributed.backend import Backend
from runner.distributed.failures.signals import Stopped, interruptible
from runner.distributed.machine import available_memory, choose_devices
from runner.distributed.world import World
from runner.errors import InputError, Preempted, first_line
from runner.paths import CONF
from runner.planning.cell import Cell
from runner.planning.costs import THIS, load_device
from runner.planning.imagined_rank import ModeConfig
from runner.planning.memory import GIB
from runner.planning.modes import plan_modes

SAFETY = 0.9  # the usable fraction of the memory: allocators fragment it, and plans are up to a tenth too low


def from_rank_0(world: World, backend: Backend, plan: Callable[[], Any]) -> Any:
    """Call `plan` on rank 0, and return its result, a JSON value, on all ranks. All ranks must call it before a job.

    Raises InputError on every rank if `plan` fails, and Preempted after a signal to any rank.
    """

    def make() -> Any:
        try:
            return plan()
        except InputError:
            raise
        except Exception as error:  # raised by the user's data, which the other ranks do not read
            raise InputError(f"the plan failed: {first_line(error)}") from error

    world.begin_job(backend)
    world.consensus.load_kept()
    try:
        with interruptible():
            if messages := world.consensus.first_error("devices", choose_devices(world)):
                raise InputError(*messages)
            return world.consensus.broadcast("plan", make)
    except Stopped as error:
        world.shutdown.report_stop(str(error))
        raise Preempted(str(error)) from None


def plan_for(
    world: World,
    modes: Mapping[str, ModeConfig | InputError],
    config_dirs: Sequence[str],
    world_size: int | None = None,
    memory_gib: float | None = None,
    device: str | None = None,
) -> list[Cell]:
    """Plan the modes for the ranks of this world, whose devices have been chosen.

    micro_batches=auto is planned as micro_batches=1. `config_dirs` may contain data sheets. By default, the number of
    ranks is that of this world, a rank may use 90% of its free memory, and `device` is the data sheet of its device.
    """
    limit = SAFETY * _memory(world) if memory_gib is None else memory_gib * GIB
    whole = {
        name: replace(mode, config=replace(mode.config, micro_batches=1))
        if isinstance(mode, ModeConfig) and mode.config.micro_batches == AUTO
        else mode
        for name, mode in modes.items()
    }
    directories = [CONF, *map(Path, config_dirs)]
    sheet = load_device(device or THIS, directories, "parallel.device", world.device.type)
    return plan_modes(whole, {world_size or world.world_size: limit}, sheet)


def count_that_fits(cell: Cell, batch_size: int) -> int | None:
    """Return the smallest power of two of micro-batches that fits, from a plan with one; None if none is known."""
    if not cell.ranks or not cell.most_rows:
        return None
    rows = max(rank.rows for rank in cell.ranks)
    count: int = 2 ** math.ceil(math.log2(max(1.0, rows / cell.most_rows)))
    axes = cell.ranks[0].axes
    return count if count * axes.micro_batches * axes.data_ranks <= batch_size or count == 1 else None


def _memory(world: World) -> float:
    if world.device.type == "cuda":
        return float(torch.cuda.mem_get_info(world.device)[0])
    return available_memory() / world.rank_info.local_world_size
