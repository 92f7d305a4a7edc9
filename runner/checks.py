"""Everything that can be said about a configuration before anything is built or written, all failures at once."""

from typing import Any

import torch

from runner.config import GROUPS, Comparison, Config, Reporting, check_combination, check_values
from runner.explain.locate import locate
from runner.explain.options import PROVIDED, check_options
from runner.world import World

# What a data set's node says for the models to interpolate; its constructor may take it or not.
DESCRIBED = {"data": ("sample_shape", "num_outputs")}


def check_input(config: Config) -> list[str]:
    """What is wrong with each value by itself, one message each: no other choice could make it right."""
    messages = check_values(config)
    for group in GROUPS:
        messages += check_options(group, getattr(config, group), PROVIDED.get(group, ()), DESCRIBED.get(group, ()))
    return messages or _check_task(config)


def check_fit(config: Config, world: World) -> list[str]:
    """What does not fit together in this world, one message each."""
    return check_combination(config, uses_gpu=world.device.type == "cuda") + _check_compiler(config, world.device)


def check_size(config: Config, task: Any, world_size: int) -> list[str]:
    """Why the task cannot be done in a world of this size, one message each."""
    messages = task.check(config, world_size) if hasattr(task, "check") else []
    if world_size < task.min_world_size:
        messages.append(
            f"task={type(task).__name__.lower()} needs at least {task.min_world_size} ranks, and this world has "
            f"{world_size}; try launcher=spawn"
        )
    return messages


def _check_task(config: Config) -> list[str]:
    task = locate(config.task["_target_"])
    if task.reads_run and config.resume:
        return [f"resume={config.resume} goes on with training; to read a run, type run={config.resume}"]
    if task.reads_run and not config.run and not config.report.runs:
        return [f"task={task.__name__.lower()} needs the run to read; type run=last, or run=RUN_DIR"]
    for section, default in (("compare", Comparison()), ("report", Reporting())):
        if (given := getattr(config, section)) != default and task.section != section:
            names = [f"{section}.{key}" for key, value in vars(given).items() if value != getattr(default, key)]
            return [f"{' and '.join(names)}: no effect without task={section}; add it, or leave the key out"]
    if config.profile and task.__name__ not in ("Train", "Rerun"):
        return [f"profile=true has no effect on task={task.__name__.lower()}; drop it, or profile the training"]
    going_on = {key: value for key, value in (("resume", config.resume), ("run", config.run)) if value}
    if going_on and not (task.needs_experiment or task.reads_run):
        (key, value), *_ = going_on.items()
        return [f"{key}={value} has no effect on task={task.__name__.lower()}; drop it"]
    if config.run and not task.reads_run:
        return [f"run={config.run} has no effect on training; to go on with that run, type resume={config.run}"]
    return []


def _check_compiler(config: Config, device: torch.device) -> list[str]:
    if not config.compile or device.type != "cpu":
        return []
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return ["compile=true needs a C++ compiler for the CPU, and none was found; install g++ or set compile=false"]
    return []
