"""The contract of a callback: an object on every rank that observes a run, and may skip updates or stop the run."""

import functools
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from runner.checkpoints.layout import TrainState
from runner.checkpoints.saved_state import LocalState, SavedState
from runner.config.schema import Config
from runner.distributed.readings import Readings
from runner.errors import raised_by
from runner.input.batch import StepBatch
from runner.records.monitor import BY_LOSS, Monitor
from runner.training.metrics.confusion import Predictions

log = logging.getLogger(__name__)

Outcome = Literal["finished", "pruned", "paused", "preempted", "failed"]
STOPS: tuple[Outcome, ...] = ("finished", "pruned", "paused")  # the first one counts if callbacks differ


@dataclass(frozen=True)
class RunInfo:
    """The run that starts or is resumed, as this rank sees it.

    Attributes:
        first_step: Number of steps that are already done.
        num_steps: Number of steps of the whole run.
        copy_model: Returns a copy of the whole current model on rank 0, on the CPU and in evaluation mode, and None on
            the other ranks. All ranks must call it. It costs as much as a checkpoint.
        log: Records custom metrics in metrics.jsonl and the loggers; only those of rank 0 are kept.
        monitor: The metric that compares runs, with its direction.
        evaluations: The monitor's values of earlier evaluations of a resumed run, by step.
        checkpoints: The steps of the run's checkpoints.
    """

    config: Config
    directory: Path
    rank: int
    world_size: int
    first_step: int
    num_steps: int
    steps_per_epoch: int
    copy_model: Callable[[], nn.Module | None]
    log: "Callable[[Progress, Mapping[str, float]], None]"
    monitor: Monitor = BY_LOSS
    evaluations: Mapping[int, float] = field(default_factory=dict)
    checkpoints: Sequence[int] = ()


@dataclass(frozen=True)
class Progress:
    """The position of the run when a callback is called, and the new metrics.

    Attributes:
        known_metrics: The metrics that are already read from the device.
        predictions: Counted in an evaluation if a logger shows them.
        updated: After a step, the names of the objective's losses by which parameters were updated.
        checksums: Of the samples (runner.input.checksum): one for each step since the last logged one, or for each
            batch of the first evaluation. Empty after the first epoch. Read from the device with the metrics.
        is_logged: The step is logged (`log_every`), or an evaluation has metrics.
        readings: Its method `then` calls a function when the metrics are read, without waiting for them.
    """

    state: TrainState
    known_metrics: Mapping[str, float] = field(default_factory=dict)
    predictions: Predictions | None = None
    updated: Sequence[str] = ()
    checksums: Sequence[float] = ()
    is_logged: bool = False
    readings: Readings = field(default_factory=Readings)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The new metrics; empty after a step without logging (`log_every`). On a GPU, this waits for the step.

        perf/* and local gradient norms differ between ranks.
        """
        if self.is_logged and not self.known_metrics:
            self.readings.flush()
        return self.known_metrics

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return self.state.step

    @property
    def epoch(self) -> int:
        """The epoch of the last step, counted from 1."""
        return self.state.epoch + bool(self.state.step_in_epoch)


@dataclass(frozen=True)
class Update:
    """An update of parameters that a step is about to make."""

    name: str  # of a loss of the objective
    loss: torch.Tensor  # this rank's part of the mean loss over the global batch, ()
    gradients: Callable[[], list[torch.Tensor]]  # returns this rank's gradients: whole, or its shards
    batch: StepBatch
    state: TrainState  # before the step


class Callback:
    """The base class of callbacks: override the methods that you need. Every rank calls its own instance.

    An exception fails the run, with the name of the callback. A callback may draw random numbers, because each step
    has its own random stream.

    Attributes:
        may_stop: The callback may set `wants_to_stop`; equal on all ranks.
        wants_to_stop: Read at the start, after each evaluation except the last, and after each step if the class
            defines `after_step`. If it is true on any rank, the run ends there: it evaluates, saves a checkpoint, and
            its state is `stops_as`.
        stop_reason: Recorded in result.json and logged.
    """

    may_stop: bool = False
    wants_to_stop: bool = False
    stops_as: Literal["finished", "pruned", "paused"] = "pruned"
    stop_reason: str = ""

    @property
    def is_due(self) -> bool:
        """Read before each step. If it is true on any rank, `when_due` is called on all ranks after the step."""
        return False

    def on_start(self, run: RunInfo) -> None:
        """Called before the first step of this process."""

    def before_forward(self) -> None:
        """Called before the forward passes of each loss of a step."""

    def allows_update(self, update: Update) -> bool:
        """Return False to skip an update; the result must be equal on all ranks. Called before each update."""
        return True

    def after_step(self, now: Progress) -> None:
        """Called after each optimizer step."""

    def when_due(self, now: Progress) -> None:
        """Called after a step before which `is_due` was true on a rank."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context manager that is entered during each evaluation; it may replace the weights meanwhile."""
        return nullcontext()

    def after_evaluation(self, now: Progress) -> None:
        """Called after each evaluation, with the metrics of the whole validation data.

        A run that is resumed from a checkpoint before this call repeats the evaluation, and then calls it.
        """

    def after_epoch(self, now: Progress) -> None:
        """Called after each epoch except the last, and after its evaluation if one is due.

        A run that is resumed from a checkpoint before this call calls it after `on_start` and that evaluation.
        """

    def after_checkpoint(self, now: Progress, path: Path) -> None:
        """Called on rank 0 when a checkpoint is complete; on the other ranks it may still be incomplete.

        If a callback defines this method, training waits until each checkpoint is written.
        """

    def state(self, model: LocalState) -> LocalState:
        """Return what this rank adds to a checkpoint, given what it writes of the model; fact names must be unique."""
        return LocalState()

    def load_state(self, saved: SavedState) -> None:
        """Restore what `state` added to a checkpoint, if the checkpoint has it. Called before `on_start`."""

    def on_end(self, now: Progress, outcome: Outcome) -> None:
        """Called after the last step of this process, in reverse order of `on_start`, even after a failure."""


class Callbacks:
    """The callbacks of one run on one rank, each with its name, in the order in which they are called."""

    def __init__(self, named: Sequence[tuple[str, Callback]] = ()):
        self._named = list(named)
        self._started: list[tuple[str, Callback]] = []

    def add(self, name: str, callback: Callback) -> None:
        self._named.append((name, callback))

    @property
    def may_stop(self) -> bool:
        return any(callback.may_stop for _, callback in self._named)

    @property
    def may_stop_after_steps(self) -> bool:
        return any(callback.may_stop for _, callback in self._defining("after_step"))

    @property
    def need_checkpoints(self) -> bool:
        """Return True if a callback defines `after_checkpoint`."""
        return bool(self._defining("after_checkpoint"))

    @property
    def is_due(self) -> bool:
        return any(callback.is_due for _, callback in self._defining("is_due"))

    def stop_reasons(self) -> dict[str, str]:
        """Return the reasons of the callbacks on this rank that stop the run, by the state in which it ends."""
        return {callback.stops_as: callback.stop_reason for _, callback in self._named if callback.wants_to_stop}

    def on_start(self, run: RunInfo) -> None:
        for name, callback in self._named:
            self._started.append((name, callback))
            with raised_by(f"the callback {name}", "on_start"):
                callback.on_start(run)

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of each callback that defines it. Return the results."""
        call, results = operator.methodcaller(method, *arguments), []
        for name, callback in self._defining(method):
            with raised_by(f"the callback {name}", method):
                results.append(call(callback))
        return results

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with ExitStack() as stack:
            for context in self.call("evaluating"):
                stack.enter_context(context)
            yield

    def state(self, model: LocalState) -> LocalState:
        """Return the model's state with what the callbacks add to it."""
        return functools.reduce(operator.or_, self.call("state", model), model)

    def _defining(self, member: str) -> list[tuple[str, Callback]]:
        """Return the callbacks whose class overrides the member."""
        default = getattr(Callback, member)
        return [(name, callback) for name, callback in self._named if getattr(type(callback), member) is not default]

    def on_end(self, now: Progress, outcome: Outcome) -> None:
        """Call every callback that was started. Raise the first exception, unless the run has already failed."""
        first: BaseException | None = None
        for name, callback in reversed(self._started):
            try:
                with raised_by(f"the callback {name}", "on_end"):
                    callback.on_end(now, outcome)
            except BaseException as error:  # also a second Ctrl-C: the progress bar and the loggers must be closed
                if outcome == "failed":
                    log.warning("the callback %s raised in on_end: %s: %s", name, type(error).__name__, error)
                else:
                    first, outcome = error, "failed"
        self._started.clear()
        if first is not None:
            raise first
