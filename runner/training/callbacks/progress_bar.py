"""What a run shows while it trains: a bar over its steps on a terminal, and a line per evaluation everywhere."""

import logging
from contextlib import ExitStack

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from runner.runs.monitor import Monitor, evaluated, shown
from runner.training.callback import Callback, Moment, Outcome, RunInfo
from runner.training.callbacks.debugger import stopping_for_debugger
from runner.training.throughput import ThroughputMeter

log = logging.getLogger(__name__)

MAX_METRICS = 6  # of an evaluation's line


class ProgressBar(Callback):
    """console: where to draw, None on a rank that does not; without a terminal there is no bar.

    monitor: the metric that an evaluation's line shows even where it is a part of one, as val/f1/macro.
    """

    def __init__(self, console: Console | None, meter: ThroughputMeter, monitor: Monitor | None = None):
        self._console, self._meter, self._monitor = console, meter, monitor
        self._bar: Progress | None = None
        self._entered = ExitStack()
        self._train_loss: dict[str, float] = {}  # the last one that was logged

    def on_start(self, run: RunInfo) -> None:
        if self._console is None or not self._console.is_terminal:
            return
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, TextColumn("{task.description}"), console=self._console, transient=True)
        self._task = self._bar.add_task("", total=run.num_steps, completed=run.first_step)
        self._entered.enter_context(self._bar)
        self._entered.enter_context(stopping_for_debugger(self._bar))

    def after_step(self, now: Moment) -> None:
        if "train/loss" not in now.metrics:
            return
        self._train_loss = {"train/loss": now.metrics["train/loss"]}
        if self._bar:
            text = f"loss {now.metrics['train/loss']:.4f}  {self._meter.samples_per_second or 0:,.0f} samples/s"
            self._bar.update(self._task, completed=now.step, description=text)

    def after_evaluation(self, now: Moment) -> None:
        monitored = shown([self._monitor] if self._monitor else [], now.metrics)
        first = [name for name in evaluated(now.metrics) if name not in monitored][: MAX_METRICS - len(monitored)]
        known = self._train_loss | {name: now.metrics[name] for name in now.metrics if name in (*monitored, *first)}
        words = [f"epoch {now.epoch:3d}  step {now.step:6d}"]
        words += [f"{name} {value:.4f}" for name, value in known.items()]
        if rate := self._meter.samples_per_second:
            words.append(f"{rate:,.0f} samples/s")
        log.info("%s", "  ".join(words))

    def on_end(self, now: Moment, outcome: Outcome) -> None:
        self._entered.close()
