"""The meter as a callback of the runner: callbacks=meter, with this directory as --config-dir."""

from meter import Meter

from runner.training.callbacks.contract import Callback, Outcome, Progress, RunInfo


class RunnerMeter(Callback):
    def __init__(self, warmup_steps: int = 20) -> None:
        self.warmup_steps = warmup_steps

    def on_start(self, run: RunInfo) -> None:
        steps = run.config.max_steps
        assert steps is not None
        self._meter, self._writes = Meter(run.config.batch_size, self.warmup_steps, steps), run.rank == 0

    def after_step(self, now: Progress) -> None:
        self._meter.tick()

    def after_evaluation(self, now: Progress) -> None:
        self._meter.evaluated()

    def on_end(self, now: Progress, outcome: Outcome) -> None:
        if self._writes and outcome == "finished":
            self._meter.write()
