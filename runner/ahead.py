"""What can be said of a run before its processes exist: from its configuration and the size of their world alone."""

from collections.abc import Mapping

import torch
from torch import nn

from runner.build import lay_out, make_group, make_task
from runner.checks import check_size
from runner.config import Config, InputError, check_combination


def check_conducts(config: Config, choices: Mapping[str, str]) -> None:
    """Raises InputError where the task starts processes of its own, and would here, although a launcher queues jobs."""
    task = make_task(config)
    if task.conducts and not task.reads_run:
        raise InputError(
            f"launcher={choices['launcher']} queues a job, but task={choices['task']} starts processes of its own "
            "where it is typed; type it inside an allocation (of salloc, or in a script for sbatch), with launcher=env"
        )


def check_ahead(config: Config, choices: Mapping[str, str], world_size: int) -> None:
    """Raises InputError where no world of this size can run it. What model, data or device decide is told later."""
    task = make_task(config)
    if messages := check_combination(config, uses_gpu=None) + check_size(config, task, world_size):
        raise InputError(*messages)
    if not task.needs_experiment:
        return
    lay_out(config, make_group(choices, "parallel", config.parallel), world_size)
    make_group(choices, "optimizer", config.optimizer, [nn.Parameter(torch.zeros(1))])
    for key in ("scheduler", "logger"):
        make_group(choices, key, getattr(config, key))
