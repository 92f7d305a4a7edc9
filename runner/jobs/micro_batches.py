"""micro_batches=auto: a plan determines the number; a job that still runs out of memory is repeated with more."""

import gc
from collections.abc import Callable
from dataclasses import replace

from runner.config.request import Request
from runner.distributed.backend import as_backend
from runner.distributed.sync_batch_norm import trains_batch_norm
from runner.distributed.world import World
from runner.errors import InputError, JobFailed
from runner.training.build import Experiment
from runner.training.components import make_parallel
from runner.training.mode import Axes

RAN_OUT = "ran out of memory:"  # part of the first line of a rank's failure report, which all ranks receive


class TooLarge(JobFailed):
    """A rank ran out of memory, and smaller micro-batches may fit. `directory` is the run directory."""


def describe_choice(micro_batches: int, experiment: Experiment) -> list[str]:
    """Return a warning if the results depend on the number of micro-batches, which depends on the memory."""
    if micro_batches == 1 or not trains_batch_norm(experiment.recipe.module):
        return []
    return [
        f"micro_batches=auto has chosen {micro_batches} by the free memory, which changes BatchNorm; for the same "
        f"results on another machine, set micro_batches={micro_batches}"
    ]


def may_double_again(micro_batches: int, batch_size: int, axes: Axes, text: str) -> bool:
    """Return True if the job may be repeated with twice as many micro-batches. All ranks return the same value.

    text: the failure of the job.
    """
    if RAN_OUT not in text.partition("\n")[0]:
        return False
    return 2 * micro_batches * axes.micro_batches * axes.data_ranks <= batch_size


def run_until_it_fits(
    run_once: Callable[[Request, World, bool], dict[str, float]], request: Request, world: World
) -> dict[str, float]:
    """Run the job with the planned number of micro-batches, and repeat it with more if a rank runs out of memory.

    The job is repeated in its run directory, from its last checkpoint if it has one. The run records the number that
    fits instead of auto. All ranks must call it. Raises InputError for a mode that can neither be planned nor repeated.
    """
    config, choices = request.config, request.command.choices
    is_repeatable = world.world_size == 1 or make_parallel(config.parallel, choices).fails_at_once
    planned = _planned_count(request, world)
    if planned is None and not is_repeatable:
        raise InputError(
            f"micro_batches=auto: the model cannot be planned, and with parallel={choices['parallel']} the other "
            "ranks would wait for a rank that runs out of memory; try a number, or parallel=ddp"
        )
    count = planned or 1
    while True:
        kept = [text for text in request.command.overrides if text.lstrip("+").partition("=")[0] != "micro_batches"]
        command = replace(request.command, overrides=(*kept, f"micro_batches={count}"))
        settled = replace(request, config=replace(config, micro_batches=count), command=command)
        try:
            return run_once(settled, world, is_repeatable)
        except TooLarge as error:
            request = replace(request, destination=replace(request.destination, directory=error.directory))
        count *= 2
        gc.collect()  # autograd graphs of the failed steps


def _planned_count(request: Request, world: World) -> int | None:
    """Return the number of micro-batches according to rank 0's plan; None without a plan. All ranks must call it."""
    from runner.jobs.fit import count_that_fits, from_rank_0, plan_for  # imported late, because few jobs need them
    from runner.planning.imagined_rank import ModeConfig

    config, command = request.config, request.command

    def plan() -> int | None:
        mode = ModeConfig(config, command.choices)
        (cell,) = plan_for(world, {command.choices["parallel"]: mode}, command.config_dirs)
        return count_that_fits(cell, config.batch_size)

    planned: int | None = from_rank_0(world, as_backend(config.backend), plan)
    return planned
