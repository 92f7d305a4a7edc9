"""Takes the checkpoints of a run: every so many steps and epochs, after its best evaluations, and at its end."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from runner.config.schema import Checkpoints
from runner.errors import JobFailed
from runner.fault_tolerance.background import Background, Snapshot
from runner.fault_tolerance.checkpoint import partial_of, path_of, point, retain, save, weights_sha256
from runner.fault_tolerance.finite_weights import FiniteWeights
from runner.fault_tolerance.seen import sizes
from runner.fault_tolerance.writers import StoreGone, Writers
from runner.runs.monitor import Monitor
from runner.runs.run_directory import RunDirectory
from runner.runs.train_state import LAST, TrainState, available, step_of
from runner.training.callback import Callback, Callbacks, Moment, Outcome, RunInfo
from runner.training.saved_state import HeldState, SavedState
from runner.training.strategy import Spread
from runner.training.throughput import ThroughputMeter
from runner.training.weight_average import WeightAverage

log = logging.getLogger(__name__)
GIVE_UP_S = 60.0  # that a run which has failed waits at most for what is being written, if other ranks go on writing
UNSEEN = 10  # times as long rank 0 is waited for where nobody sees whether it gets on


class Checkpointing(Callback):
    """All ranks must have it: each writes what it holds, and rank 0 puts the checkpoint in its place.

    best: the monitor's value of the checkpoints that there are, by step; the same on all ranks.
    flush: called there before a checkpoint, from which the run may be resumed: what was logged before must not be lost.
    """

    def __init__(
        self,
        options: Checkpoints,
        spread: Spread,
        directory: RunDirectory,
        meter: ThroughputMeter,
        callbacks: Callbacks,
        monitor: Monitor,
        best: Mapping[int, float],
        flush: Callable[[], None],
        finite: FiniteWeights,
        writers: Writers,
        average: WeightAverage | None = None,
    ):
        self._options, self._spread, self._directory = options, spread, directory
        self._meter, self._callbacks, self._flush = meter, callbacks, flush
        self._monitor, self._finite = monitor, finite
        self._best = {step: best[step] for step in monitor.best(best)[: options.keep_best]}
        self._writers, self._average = writers, average
        self._saved_step: int | None = None  # the last one of which there is a checkpoint, taken or read
        self._given_up_step: int | None = None  # of the last one that nobody could put in its place
        self._saved_at = time.monotonic()
        self._placing: TrainState | None = None  # of the one that is being written
        self._damaged: set[int] = set()  # steps of checkpoints that the run was not resumed from, newer ones than that
        self._background, self._snapshot = Background(), Snapshot()

    def on_start(self, run: RunInfo) -> None:
        """What the run is resumed from is not taken again: a crash meanwhile would lose it.

        The links name no later one, which is damaged.
        """
        self._tell_best()
        if run.first_step:
            self._saved_step = run.first_step
            there = [step_of(path) for path in available(self._directory.checkpoints)]
            self._damaged = {step for step in there if step > run.first_step}
            self._finite.begin(run.first_step, there)
            if self._directory.writes:
                point(self._directory.checkpoints, LAST, self._directory.checkpoints / f"step_{run.first_step}")
                self._retain()

    @property
    def is_due(self) -> bool:
        """By the clock of rank 0: the others are told with whether to stop."""
        every = self._options.every_seconds
        return every is not None and self._writers.rank == 0 and time.monotonic() - self._saved_at >= every

    def when_due(self, now: Moment) -> None:
        self._save(now.state)
        self._meter.pause()

    def after_step(self, now: Moment) -> None:
        self._background.check()
        if self._options.every_steps and now.step % self._options.every_steps == 0:
            self._save(now.state)
            self._meter.pause()

    def after_evaluation(self, now: Moment) -> None:
        """Whether it is one of the best follows from what was measured: all ranks come to the same."""
        values = self._best | {now.step: now.metrics.get(self._monitor.name, math.nan)}
        best = {step: values[step] for step in self._monitor.best(values)[: self._options.keep_best]}
        if now.step in best:
            self._best = best
            self._tell_best()
            self._save(now.state)
            self._retain()

    def after_epoch(self, now: Moment) -> None:
        if now.state.epoch % self._options.every_epochs == 0:
            self._save(now.state)

    def on_end(self, now: Moment, outcome: Outcome) -> None:
        if outcome == "failed":
            self._writers.given_up.set()
            # It may be all that is left of the last steps. Who misses this rank must hear why before it gives up.
            try:
                self._background.wait(min(GIVE_UP_S, self._writers.timeout_s / 3))
            except JobFailed as error:
                if not error.follows:  # else what the loop has raised says more
                    raise
            return
        for _ in range(2):  # the store may go while the first is being written
            self._save(now.state, is_last=True)
            self._settle()
        if self._directory.writes:
            self._tell_best()
            saved = SavedState.open(path_of(self._directory.checkpoints, now.state))
            self._directory.result.weights_sha256 = weights_sha256(saved.model())

    def _save(self, state: TrainState, is_last: bool = False) -> None:
        """Once per step: the end of an epoch may be the end of the run. It waits until the last one is written."""
        if self._saved_step == state.step and not is_last:
            return
        self._settle()
        again = self._writers.agree(is_last, self._given_up_step == state.step)
        if self._saved_step == state.step and not again:
            return
        self._directory.check_held()
        self._finite.check(state.step)
        self._saved_step, self._saved_at = state.step, time.monotonic()
        self._damaged.discard(state.step)
        held = self._spread.state()
        if self._average is not None:
            held |= self._average.state(held)
        held.facts["parallel"] = self._directory.result.parallel
        if self._directory.writes:
            self._flush()
        if self._options.asynchronous and not self._writers.together:
            held = self._snapshot.of(held)
        self._placing = state
        self._do(lambda: self._write(held, state))
        self._retain()
        if self._callbacks.hear_of_checkpoints or not self._options.asynchronous:
            self._settle()
        if self._callbacks.hear_of_checkpoints and self._given_up_step != state.step:
            self._callbacks.after_checkpoint(Moment(state), path_of(self._directory.checkpoints, state))

    def _write(self, held: HeldState, state: TrainState) -> None:
        try:
            save(self._directory.checkpoints, held, state, self._writers, self._directory.check_held)
            if self._given_up_step == state.step:
                self._given_up_step = None  # it has been made up for
        except StoreGone as error:  # the next one is written without it
            self._given_up_step = state.step
            log.warning("step_%d was not written: %s", state.step, error)

    def _settle(self) -> None:
        """Until the last one is in its place: in a collective the others would miss rank 0 while that still writes."""
        self._background.wait()
        if self._writers.rank > 0 and self._placing is not None:
            folder, patience_s = self._directory.checkpoints, self._writers.timeout_s
            if not folder.parent.is_dir():  # on a disk that this machine does not see
                patience_s *= UNSEEN
            partial = partial_of(folder, self._placing)
            self._writers.wait_for_end(self._placing.step, lambda: sizes(partial), patience_s)
        self._placing = None

    def _retain(self) -> None:
        """When what is being written is there."""
        if self._directory.writes:
            assert self._saved_step is not None
            what = self._options.keep, [*self._best], self._saved_step, [*self._finite.protected], {*self._damaged}
            self._do(lambda: self._retain_held(*what))

    def _retain_held(self, *what: Any) -> None:
        """what: as `retain` takes it. It goes by a checkpoint that may have been given up: then all stay."""
        self._directory.check_held()
        if self._given_up_step is None:
            retain(self._directory.checkpoints, *what)

    def _do(self, work: Callable[[], object]) -> None:
        """Beside training, or at once."""
        if self._options.asynchronous and not self._writers.together:
            self._background.do(work)
        else:
            work()

    def _tell_best(self) -> None:
        """The first of them that is there: they are in order."""
        there = ({"step": s, "value": v} for s, v in self._best.items() if s != self._given_up_step)
        self._directory.result.best = next(there, None)
