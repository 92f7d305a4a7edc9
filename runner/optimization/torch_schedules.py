"""Schedulers that change an optimizer, such as those of torch.optim.lr_scheduler, as functions of the step."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from runner.config.diagnostics.signature import parameters_of, takes_optimizer
from runner.config.instantiate import make_group
from runner.errors import InputError, failed_with, quantity
from runner.optimization.lr_schedules import Schedule
from runner.optimization.optimizers import Options

EVERY = ("epoch", "step")


class TorchSchedule:
    """The options of each parameter group in a step, as a scheduler changes them in a stand-in for the optimizer.

    A resumed run steps the scheduler from the first step on again, which takes about 10 µs per step. So the scheduler
    needs no state in checkpoints, and it is the same on all ranks: some update only a part of the parameter groups.

    Args:
        make: Constructs the scheduler of an optimizer.
        groups: The options of each parameter group.
        per_epoch: The scheduler is stepped after each epoch; otherwise after each step.
    """

    def __init__(self, make: Callable[[torch.optim.Optimizer], Any], groups: Sequence[Options], per_epoch: bool):
        self._make, self._groups, self._per_epoch = make, groups, per_epoch
        self._start()

    def _start(self) -> None:
        self._optimizer = _StandIn(self._groups)
        self.scheduler, self._count = self._make(self._optimizer), 0

    def __call__(self, step: int, num_steps: int, steps_per_epoch: int) -> list[Options]:
        count = step // steps_per_epoch if self._per_epoch else step
        if count < self._count:
            self._start()
        if self._count == 0 < count:
            self._optimizer.step()  # otherwise the scheduler warns that it is stepped first
        while self._count < count:
            self.scheduler.step()
            self._count += 1
        pairs = zip(self._optimizer.param_groups, self._groups, strict=True)
        return [{name: group[name] for name in options} for group, options in pairs]


class _StandIn(torch.optim.Optimizer):
    """An optimizer without parameters."""

    def __init__(self, groups: Sequence[Options]):
        super().__init__([{**options, "params": []} for options in groups], dict(groups[0]))

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Do nothing."""


def make_schedule(
    node: Mapping[str, Any],
    choices: Mapping[str, str],
    groups: Sequence[Options],
    num_steps: int,
    steps_per_epoch: int,
) -> Schedule:
    """Construct the configured schedule. Raise InputError for an option that does not work.

    groups: the options of each parameter group of the optimizer. num_steps: the number of steps of the whole run.
    """
    target = node["_target_"]
    if not takes_optimizer(target):
        schedule: Schedule = make_group(choices, "scheduler", dict(node))
        return schedule
    key, name, every = f"scheduler={choices.get('scheduler')}", target.rpartition(".")[2], node.get("every")
    if every not in EVERY:
        wrong = f"scheduler.every={every} must be epoch or step"
        missing = f"{key}: write `every: epoch` or `every: step` into its file"
        raise InputError(f"{wrong if 'every' in node else missing}, because {name} can be stepped after either")
    options = {option: value for option, value in node.items() if option != "every"}
    times = num_steps if every == "step" else -(-num_steps // steps_per_epoch)
    if "total_steps" in parameters_of(target) and options.get("total_steps") is options.get("epochs") is None:
        options["total_steps"] = times

    def make(optimizer: torch.optim.Optimizer) -> Any:
        try:
            return make_group(choices, "scheduler", _with_optimizer(options, optimizer))
        except InputError:
            raise
        except Exception as error:  # custom code can raise anything
            raise InputError(f"{key}: {name} cannot be constructed{failed_with(error)}") from None

    schedule = TorchSchedule(make, groups, every == "epoch")
    _check(schedule.scheduler, f"scheduler._target_={target}", times)
    try:
        schedule(min(num_steps - 1, steps_per_epoch if every == "epoch" else 1), num_steps, steps_per_epoch)
    except Exception as error:  # such as StepLR's for step_size=0
        raise InputError(f"{key}: {name} cannot be stepped{failed_with(error)}") from None
    return schedule


def _check(scheduler: Any, key: str, times: int) -> None:
    """Raise InputError unless the scheduler can be stepped without arguments, as often as the run steps it."""
    step = getattr(scheduler, "step", None)
    if step is None:
        raise InputError(f"{key}: {type(scheduler).__name__} has no method step; see torch.optim.lr_scheduler")
    required = [each.name for each in inspect.signature(step).parameters.values() if each.default is each.empty]
    required = [name for name in required if name not in ("args", "kwargs")]
    if required:
        raise InputError(f"{key}: its step needs {required[0]}, which no scheduler gets; try scheduler=cosine")
    total = getattr(scheduler, "total_steps", None)
    if isinstance(total, int) and total < times - 1:  # OneCycleLR would fail in the middle of the run
        raise InputError(
            f"{key}: it ends after {quantity(total, 'step')}, but the run steps it {times} times; leave out "
            "total_steps, epochs and steps_per_epoch, which the runner then sets"
        )


def _with_optimizer(node: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return the node with the optimizer as an option of each scheduler in it, such as those of a SequentialLR."""
    if isinstance(node, list):
        return [_with_optimizer(each, optimizer) for each in node]
    if not isinstance(node, Mapping):
        return node
    options = {name: _with_optimizer(value, optimizer) for name, value in node.items()}
    if takes_optimizer(node.get("_target_")):
        options |= {"optimizer": optimizer, "_partial_": False}  # a partial awaits the optimizer
    return options
