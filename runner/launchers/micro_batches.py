"""micro_batches=auto: a job that is out of memory begins again with twice as many micro-batches, until they fit."""

import gc
from collections.abc import Callable
from dataclasses import replace

import torch

from runner.config.schema import Config
from runner.config.validate import check_batch
from runner.distributed.world import World
from runner.errors import InputError, JobFailed
from runner.runs.run_directory import Request
from runner.training.build import Experiment, make_parallel
from runner.training.modes import modes_that, take

RAN_OUT = "ran out of memory:"  # in the first line of what a rank says of its failure, which all ranks are told
_CPU_SAYS = "DefaultCPUAllocator"  # torch raises a plain RuntimeError there


class TooLarge(JobFailed):
    """A rank was out of memory, and smaller micro-batches may not be; directory: the run's."""

    def __init__(self, text: str, directory: str):
        super().__init__(text, directory=directory)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _CPU_SAYS in str(error)


def may_halve(config: Config, experiment: Experiment, text: str) -> bool:
    """Whether to begin again after this failure, with twice as many micro-batches: the same answer on all ranks."""
    if RAN_OUT not in text.partition("\n")[0]:
        return False
    twice = replace(config, micro_batches=2 * config.micro_batches)
    return not check_batch(twice, experiment.axes.data_ranks, experiment.axes.micro_batches)


def run_until_it_fits(
    run_once: Callable[[Config, Request, World, bool], dict[str, float]], config: Config, request: Request, world: World
) -> dict[str, float]:
    """Run the job in one run directory, from its last checkpoint if it has one. All ranks must call it.

    What is recorded has the number that was found in the place of auto, for whoever resumes or repeats the run. Raises
    InputError, before anything is written, for a mode that cannot begin again on several ranks.
    """
    mode = request.choices["parallel"]
    if world.world_size > 1 and not make_parallel(config, request.choices).fails_at_once:
        others = modes_that(lambda other: other.fails_at_once and take(other, world.world_size))
        raise InputError(
            f"micro_batches=auto: under parallel={mode} ranks would wait for one that is out of memory; type a number, "
            f"or choose among {others}"
        )
    count = 1
    while True:
        words = [word for word in request.overrides if word.lstrip("+").partition("=")[0] != "micro_batches"]
        settled = replace(request, overrides=(*words, f"micro_batches={count}"))
        try:
            return run_once(replace(config, micro_batches=count), settled, world, True)
        except TooLarge as error:
            request = replace(request, directory=error.directory)
        count *= 2
        gc.collect()  # of graphs that went with the failure
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
