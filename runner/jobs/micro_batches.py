"""micro_batches=auto: a job that runs out of memory is repeated with twice as many micro-batches, until they fit."""

import gc
from collections.abc import Callable
from dataclasses import replace

import torch

from runner.config.schema import Config
from runner.distributed.world import World
from runner.errors import InputError, JobFailed
from runner.records.run_directory import Request
from runner.training.build import Experiment
from runner.training.components import make_parallel

RAN_OUT = "ran out of memory:"  # in the first line of a rank's failure report, which all ranks receive
_CPU_ALLOCATOR = "DefaultCPUAllocator"  # named in the RuntimeError that torch raises on the CPU


class TooLarge(JobFailed):
    """A rank ran out of memory, and smaller micro-batches may fit. `directory` is the run directory."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)


def may_double_again(config: Config, experiment: Experiment, text: str) -> bool:
    """Return True if the job is repeated with twice as many micro-batches; the same on all ranks."""
    if RAN_OUT not in text.partition("\n")[0]:
        return False
    axes = experiment.axes
    return 2 * config.micro_batches * axes.micro_batches * axes.data_ranks <= config.batch_size


def run_until_it_fits(
    run_once: Callable[[Config, Request, World, bool], dict[str, float]], config: Config, request: Request, world: World
) -> dict[str, float]:
    """Run the job in one run directory, from its last checkpoint if it has one. All ranks must call it.

    The run records the number that fits instead of auto. Raises InputError for a mode that cannot repeat a job.
    """
    mode = request.choices["parallel"]
    if world.world_size > 1 and not make_parallel(config, request.choices).fails_at_once:
        raise InputError(
            f"micro_batches=auto: under parallel={mode} ranks would wait for one that is out of memory; try a number, "
            "or parallel=ddp"
        )
    count = 1
    while True:
        kept = [text for text in request.overrides if text.lstrip("+").partition("=")[0] != "micro_batches"]
        settled = replace(request, overrides=(*kept, f"micro_batches={count}"))
        try:
            return run_once(replace(config, micro_batches=count), settled, world, True)
        except TooLarge as error:
            request = replace(request, directory=error.directory)
        count *= 2
        gc.collect()  # autograd graphs of the failed steps
