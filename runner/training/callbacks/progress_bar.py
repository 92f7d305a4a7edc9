"""What a run shows while it trains: a bar over its steps on a terminal, and a line per evaluation everywhere."""

import logging

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from runner.training.callback import Callback, Moment, Outcome, RunInfo
from runner.training.throughput import ThroughputMeter

log = logging.getLogger(__name__)


class ProgressBar(Callback):
    """console: where to draw, None on a rank that does not; without a terminal there is no bar."""

    def __init__(self, console: Console | None, meter: ThroughputMeter):
        self._console, self._meter = console, meter
        self._bar: Progress | None = None
        self._train_loss: dict[str, float] = {}  # the last one that was logged

    def on_start(self, run: RunInfo) -> None:
        if self._console is None or not self._console.is_terminal:
            return
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, TextColumn("{task.description}"), console=self._console, transient=True)
        self._task = self._bar.add_task("", total=run.num_steps, completed=run.first_step)
        self._bar.start()

    def after_step(self, now: Moment) -> None:
        if "train/loss" not in now.metrics:
            return
        self._train_loss = {"train/loss": now.metrics["train/loss"]}
        if self._bar:
            text = f"loss {now.metrics['train/loss']:.4f}  {self._meter.samples_per_second or 0:,.0f} samples/s"
            self._bar.update(self._task, completed=now.step, description=text)

    def after_evaluation(self, now: Moment) -> None:
        known = self._train_loss | dict(now.metrics)
        words = [f"epoch {now.epoch:3d}  step {now.step:6d}"]
        words += [f"{name} {known[name]:.4f}" for name in ("train/loss", "val/loss", "val/accuracy") if name in known]
        if rate := self._meter.samples_per_second:
            words.append(f"{rate:,.0f} samples/s")
        log.info("%s", "  ".join(words))

    def on_end(self, now: Moment, outcome: Outcome) -> None:
        if self._bar:
            self._bar.stop()
