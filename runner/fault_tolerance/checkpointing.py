"""Takes the checkpoints of a run: every so many steps and epochs, and whenever it ends so that it can be resumed."""

from collections.abc import Callable

from runner.config.schema import Checkpoints
from runner.fault_tolerance.checkpoint import path_of, save, weights_sha256
from runner.runs.run_directory import RunDirectory
from runner.runs.train_state import TrainState
from runner.training.callback import Callback, Callbacks, Moment, Outcome
from runner.training.strategy import Spread
from runner.training.throughput import ThroughputMeter


class Checkpointing(Callback):
    """All ranks must have it: what they hold is gathered, and the one that writes keeps it.

    flush: called there before a checkpoint, from which the run may be resumed: what was logged before must not be lost.
    """

    def __init__(
        self,
        options: Checkpoints,
        spread: Spread,
        directory: RunDirectory,
        meter: ThroughputMeter,
        callbacks: Callbacks,
        flush: Callable[[], None],
    ):
        self._options, self._spread, self._directory = options, spread, directory
        self._meter, self._callbacks, self._flush = meter, callbacks, flush
        self._saved_step: int | None = None  # the last one that this process has taken a checkpoint of

    def after_step(self, now: Moment) -> None:
        if self._options.every_steps and now.step % self._options.every_steps == 0:
            self._save(now.state)
            self._meter.pause()

    def after_epoch(self, now: Moment) -> None:
        if now.state.epoch % self._options.every_epochs == 0:
            self._save(now.state)

    def on_end(self, now: Moment, outcome: Outcome) -> None:
        if outcome != "failed":
            self._save(now.state)

    def _save(self, state: TrainState) -> None:
        """Once per step: the end of an epoch may be the end of the run."""
        if self._saved_step == state.step:
            return
        self._saved_step = state.step
        tensors = self._spread.state()
        if self._directory.writes:
            self._flush()
            save(self._directory.checkpoints, tensors, state, self._options.keep)
            self._directory.result.weights_sha256 = weights_sha256(tensors["model"])
        self._callbacks.after_checkpoint(Moment(state), path_of(self._directory.checkpoints, state))
