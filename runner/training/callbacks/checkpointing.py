"""Saving of checkpoints: periodically, after the best evaluations, and at the end of the run."""

import logging
import math
import time
from collections.abc import Callable

from runner.checkpoints.base_weights import BaseWeights, complete
from runner.checkpoints.layout import LAST, TrainState, list_checkpoints, step_of
from runner.checkpoints.retention import retain, set_link
from runner.checkpoints.save import file_sizes, partial_of, path_of, save
from runner.checkpoints.save_coordination import UNSEEN_FACTOR, SaveCoordinator, StoreLost
from runner.checkpoints.saved_state import LocalState, SavedState, weights_sha256
from runner.checkpoints.snapshot import Snapshot
from runner.config.schema import Checkpoints
from runner.errors import JobFailed
from runner.records.background import BackgroundThread
from runner.records.monitor import Monitor
from runner.records.run_directory import RunDirectory
from runner.training.callbacks.contract import Callback, Callbacks, Outcome, Progress, RunInfo
from runner.training.mode import ParallelModel
from runner.training.throughput import ThroughputMeter

log = logging.getLogger(__name__)
MAX_WAIT_S = 60.0  # the longest time that a failed run waits for the checkpoint that is being written


class Checkpointing(Callback):
    """Saves checkpoints. All ranks must have it: each writes its part, and rank 0 completes the checkpoint.

    Before each checkpoint, the writing rank calls `flush`, so that no earlier metric is lost, and all ranks call
    `check` with the step, which raises an exception if the checkpoint must not be saved.
    """

    def __init__(
        self,
        options: Checkpoints,
        parallel_model: ParallelModel,
        directory: RunDirectory,
        meter: ThroughputMeter,
        callbacks: Callbacks,
        monitor: Monitor,
        flush: Callable[[], None],
        check: Callable[[int], None],
        coordinator: SaveCoordinator,
        base: BaseWeights | None = None,
    ):
        """Save checkpoints according to the options. base: weights that a run that is not resumed leaves out."""
        self._options, self._parallel_model, self._directory = options, parallel_model, directory
        self._meter, self._callbacks, self._flush = meter, callbacks, flush
        self._monitor, self._check, self._coordinator = monitor, check, coordinator
        self._best: dict[int, float] = {}  # the monitor's values of the best checkpoints, by step, the best first
        self._saved_step: int | None = None  # the step of the last checkpoint that was saved or restored
        self._abandoned_step: int | None = None  # the step of the last checkpoint that could not be completed
        self._saved_at = time.monotonic()
        self._writing: TrainState | None = None  # the state of the checkpoint that is being written
        self._damaged: set[int] = set()  # steps of checkpoints newer than the one that the run was resumed from
        self._base = base
        self._writer, self._snapshot = BackgroundThread("checkpoint"), Snapshot()

    def on_start(self, run: RunInfo) -> None:
        """Adopt the checkpoint that the run was resumed from: it is not saved again, and `last` points to it."""
        values = {step: value for step, value in run.evaluations.items() if step in run.checkpoints}
        self._best = {step: values[step] for step in self._monitor.best(values)[: self._options.keep_best]}
        self._record_best()
        if run.first_step:
            steps = map(step_of, list_checkpoints(self._directory.checkpoints))
            self._damaged = {step for step in steps if step > run.first_step}
        if run.first_step in run.checkpoints:  # otherwise, the run continues from a copy in memory
            self._saved_step = run.first_step
            if self._directory.writes:
                set_link(self._directory.checkpoints, LAST, self._directory.checkpoints / f"step_{run.first_step}")
                self._retain()

    def state(self, model: LocalState) -> LocalState:
        """Return which weights checkpoints leave out. A copy in memory contains them, but its run leaves them out."""
        return LocalState(facts=self._base.fact() if self._base is not None else {})

    def load_state(self, saved: SavedState) -> None:
        """Leave out the same weights as the checkpoint that is restored."""
        self._base = BaseWeights.of_checkpoint(saved)

    @property
    def is_due(self) -> bool:
        """Return True on rank 0 if `every_seconds` have passed; the vote of each step informs the other ranks."""
        every = self._options.every_seconds
        return every is not None and self._coordinator.rank == 0 and time.monotonic() - self._saved_at >= every

    def when_due(self, now: Progress) -> None:
        self._save(now.state)
        self._meter.pause()

    def after_step(self, now: Progress) -> None:
        self._writer.wait(0)
        if self._options.every_steps and now.step % self._options.every_steps == 0:
            self._save(now.state)
            self._meter.pause()

    def after_evaluation(self, now: Progress) -> None:
        """Save a checkpoint if the evaluation is one of the best; on all ranks, because their metrics are equal."""
        values = self._best | {now.step: now.metrics.get(self._monitor.name, math.nan)}
        best = {step: values[step] for step in self._monitor.best(values)[: self._options.keep_best]}
        if now.step in best:
            self._best = best
            self._record_best()
            self._save(now.state)
            self._retain()

    def after_epoch(self, now: Progress) -> None:
        if now.state.epoch % self._options.every_epochs == 0:
            self._save(now.state)

    def on_end(self, now: Progress, outcome: Outcome) -> None:
        if outcome == "failed":
            self._coordinator.run_failed.set()
            # The wait is shorter than the peers' timeout, so that they receive the reason of the failure.
            try:
                self._writer.wait(min(MAX_WAIT_S, self._coordinator.timeout_s / 3))
            except JobFailed as error:
                if not error.follows:  # otherwise the loop's exception is the cause
                    raise
            return
        for _ in range(2):  # the store may be lost during the first attempt
            self._save(now.state, is_last=True)
            self._wait_until_complete()
        if self._directory.writes:
            self._record_best()
            self._directory.complete(path_of(self._directory.checkpoints, now.state))
            saved = SavedState.open(path_of(self._directory.checkpoints, now.state))
            try:
                self._directory.record.weights_sha256 = weights_sha256(complete(saved).model())
            except ValueError as error:  # the run itself has ended well
                log.warning("%s", error)

    def _save(self, state: TrainState, is_last: bool = False) -> None:
        """Save a checkpoint, once per step, after the previous one is complete. All ranks must call it."""
        if self._saved_step == state.step and not is_last:
            return
        self._wait_until_complete()
        again = self._coordinator.agree(is_last, self._abandoned_step == state.step)
        if self._saved_step == state.step and not again:
            return
        self._directory.check_lock()
        self._check(state.step)
        self._saved_step, self._saved_at = state.step, time.monotonic()
        self._damaged.discard(state.step)
        local = self._callbacks.state(self._parallel_model.state())
        if self._base is not None:
            local = self._base.remove_from(local)
        local.facts["parallel"] = self._directory.record.parallel
        if self._directory.writes:
            self._flush()
        if self._options.asynchronous and not self._coordinator.synchronous:
            local = self._snapshot.of(local)
        self._writing = state
        self._do(lambda: self._write(local, state))
        self._retain()
        if self._callbacks.need_checkpoints or not self._options.asynchronous:
            self._wait_until_complete()
        if self._callbacks.need_checkpoints and self._abandoned_step != state.step:
            self._directory.complete(path_of(self._directory.checkpoints, state))
            self._callbacks.call("after_checkpoint", Progress(state), path_of(self._directory.checkpoints, state))

    def _write(self, local: LocalState, state: TrainState) -> None:
        try:
            save(self._directory.checkpoints, local, state, self._coordinator, self._directory.check_lock)
            if self._abandoned_step == state.step:
                self._abandoned_step = None  # saved at the second attempt
        except StoreLost as error:  # the next checkpoint is written without the store
            self._abandoned_step = state.step
            log.warning("step_%d was not written: %s", state.step, error)

    def _wait_until_complete(self) -> None:
        """Wait until the last checkpoint is complete; a rank that waited in a collective instead might time out."""
        self._writer.wait()
        if self._coordinator.rank > 0 and self._writing is not None:
            directory, timeout_s = self._directory.checkpoints, self._coordinator.timeout_s
            if not directory.parent.is_dir():  # the run directory is not visible on this machine
                timeout_s *= UNSEEN_FACTOR
            partial = partial_of(directory, self._writing)
            self._coordinator.wait_for_end(self._writing.step, lambda: file_sizes(partial), timeout_s)
        self._writing = None

    def _retain(self) -> None:
        """Remove old checkpoints, after the current one is complete. If it could not be completed, keep all."""
        newest, best, damaged = self._saved_step, [*self._best], {*self._damaged}
        if not self._directory.writes:
            return
        assert newest is not None

        def remove_old() -> None:
            self._directory.check_lock()
            if self._abandoned_step is None:
                retain(self._directory.checkpoints, self._options.keep, best, newest, damaged)

        self._do(remove_old)

    def _do(self, work: Callable[[], object]) -> None:
        """Do the work in the background, or immediately if `checkpoint.asynchronous` is false."""
        if self._options.asynchronous and not self._coordinator.synchronous:
            self._writer.submit(work)
        else:
            work()

    def _record_best(self) -> None:
        """Record the best complete checkpoint in result.json."""
        complete = ({"step": s, "value": v} for s, v in self._best.items() if s != self._abandoned_step)
        self._directory.record.best = next(complete, None)
