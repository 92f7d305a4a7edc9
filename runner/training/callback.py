"""The contract of a callback: what observes a run, on every rank, and changes no number of it."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from torch import nn

from runner.config.schema import Config
from runner.runs.monitor import BY_LOSS, Monitor
from runner.runs.train_state import TrainState
from runner.training.confusion import Predictions

log = logging.getLogger(__name__)

Outcome = Literal["finished", "pruned", "preempted", "failed"]


@dataclass(frozen=True)
class RunInfo:
    """The run that begins, or is resumed, as this rank sees it."""

    config: Config
    directory: Path
    rank: int
    world_size: int
    first_step: int  # the steps that are done already
    num_steps: int  # of the whole run
    steps_per_epoch: int
    # A copy of the model as it is now, whole, on the CPU, in evaluation mode: on rank 0, None on the others. All ranks
    # must call it. It costs what a checkpoint does.
    copy_model: Callable[[], nn.Module | None]
    # Numbers of one's own, by names of one's own, into metrics.jsonl and to the logger; those of rank 0 are kept.
    log: "Callable[[Moment, Mapping[str, float]], None]"
    monitor: Monitor = BY_LOSS  # the metric that runs are compared by, and which end of it is the best


@dataclass(frozen=True)
class Moment:
    """Where the run is when a callback is called, and what was just measured; the same on all ranks but perf/*."""

    state: TrainState
    metrics: Mapping[str, float] = field(default_factory=dict)  # of a step only where it is logged: see log_every
    predictions: Predictions | None = None  # of an evaluation whose logger shows them

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", MappingProxyType(dict(self.metrics)))  # whoever is told cannot change them

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.step

    @property
    def epoch(self) -> int:
        """The epoch that the last step was in, counted from 1."""
        return self.state.epoch + bool(self.state.step_in_epoch)


class Callback:
    """Derive from it and define what is of interest; the others do nothing. Every rank has one and calls it alike.

    What it raises fails the run, with its name. It may draw random numbers: each step begins a stream of its own.
    """

    may_stop: bool = False  # declared by one that may set wants_to_stop; the same on all ranks
    wants_to_stop: bool = False  # asked at the start and after each evaluation but the last; if any rank does, the run
    # ends there, saved, in this state
    stops_as: Literal["finished", "pruned"] = "pruned"
    stop_reason: str = ""  # which result.json and the last lines tell

    @property
    def is_due(self) -> bool:
        """Asked before each step: whether `when_due` is to be called after it, on all ranks if it is on one."""
        return False

    def on_start(self, run: RunInfo) -> None:
        """Before the first step of this process."""

    def after_step(self, now: Moment) -> None:
        """After each optimizer step."""

    def when_due(self, now: Moment) -> None:
        """After a step before which `is_due` was true on a rank."""

    def after_evaluation(self, now: Moment) -> None:
        """After each evaluation, whose metrics are the whole validation data's."""

    def after_epoch(self, now: Moment) -> None:
        """After each epoch but the run's last, and its evaluation where one is due."""

    def after_checkpoint(self, now: Moment, path: Path) -> None:
        """When a checkpoint is complete on the disk: on rank 0; the others do not wait for that.

        One that defines it lets the loop wait for each checkpoint to be written.
        """

    def on_end(self, now: Moment, outcome: Outcome) -> None:
        """After the last step of this process, however it came; the callback that was started last is told first."""


class Callbacks:
    """The callbacks of one run on one rank, in the order in which they are called, each with its name."""

    def __init__(self, named: Sequence[tuple[str, Callback]] = ()):
        self._named = list(named)
        self._started: list[tuple[str, Callback]] = []

    def add(self, name: str, callback: Callback) -> None:
        self._named.append((name, callback))

    @property
    def may_stop(self) -> bool:
        return any(callback.may_stop for _, callback in self._named)

    @property
    def hear_of_checkpoints(self) -> bool:
        """Whether one has to be told when a checkpoint is complete."""
        return any(type(callback).after_checkpoint is not Callback.after_checkpoint for _, callback in self._named)

    @property
    def is_due(self) -> bool:
        return any(callback.is_due for _, callback in self._named)

    @property
    def want_to_stop(self) -> bool:
        return any(callback.wants_to_stop for _, callback in self._named)

    def told_to_stop(self) -> tuple[Literal["finished", "pruned"], str]:
        """The state of a run that ends because one of them, here or on another rank, wants it, and the reason."""
        for name, callback in self._named:
            if callback.wants_to_stop and callback.stops_as == "finished":
                return "finished", callback.stop_reason or f"the callback {name} asked for it"
        return "pruned", next((callback.stop_reason for _, callback in self._named if callback.wants_to_stop), "")

    def on_start(self, run: RunInfo) -> None:
        for name, callback in self._named:
            self._started.append((name, callback))
            with _naming(name, "on_start"):
                callback.on_start(run)

    def after_step(self, now: Moment) -> None:
        self._call("after_step", now)

    def after_evaluation(self, now: Moment) -> None:
        self._call("after_evaluation", now)

    def when_due(self, now: Moment) -> None:
        self._call("when_due", now)

    def after_epoch(self, now: Moment) -> None:
        self._call("after_epoch", now)

    def after_checkpoint(self, now: Moment, path: Path) -> None:
        self._call("after_checkpoint", now, path)

    def _call(self, method: str, now: Moment, *arguments: object) -> None:
        call = methodcaller(method, now, *arguments)
        for name, callback in self._named:
            with _naming(name, method):
                call(callback)

    def on_end(self, now: Moment, outcome: Outcome) -> None:
        """Tell every callback that was started. Raises what the first of them raised, unless the run failed already."""
        first: BaseException | None = None
        for name, callback in reversed(self._started):
            try:
                with _naming(name, "on_end"):
                    callback.on_end(now, outcome)
            except BaseException as error:  # a second Ctrl-C too: the bar must leave the terminal, the logger its file
                if outcome == "failed":
                    log.warning("the callback %s raised at the end: %s: %s", name, type(error).__name__, error)
                else:
                    first, outcome = error, "failed"
        self._started.clear()
        if first is not None:
            raise first


@contextmanager
def _naming(name: str, method: str) -> Iterator[None]:
    """Say whose error it is. The error itself stays what it was: whether a peer is missed is read off its kind."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "__notes__"):  # of one that another one has called, the first is whose it is
            error.add_note(f"raised by the callback {name} in {method}")
        raise
