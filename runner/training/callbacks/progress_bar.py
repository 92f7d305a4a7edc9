"""The progress bar on a terminal, and a log line for each evaluation."""

import logging
import pdb
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from runner.records.monitor import Monitor, evaluation_metrics, main_metrics
from runner.records.tables import format_number
from runner.training.callbacks.contract import Callback, Outcome, Progress, RunInfo
from runner.training.throughput import ThroughputMeter

log = logging.getLogger(__name__)

MAX_METRICS = 6  # in the line of an evaluation


class ProgressBar(Callback):
    """Draws a bar over the steps if the console is a terminal, and logs each evaluation with the monitor."""

    def __init__(self, console: Console | None, meter: ThroughputMeter, monitor: Monitor):
        self._console, self._meter, self._monitor = console, meter, monitor
        self._bar: Bar | None = None
        self._stack = ExitStack()
        self._train_loss: dict[str, float] = {}  # the last logged loss

    def on_start(self, run: RunInfo) -> None:
        if self._console is None or not self._console.is_terminal:
            return
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, TextColumn("{task.description}"), console=self._console, transient=True)
        self._task = self._bar.add_task("", total=run.num_steps, completed=run.first_step)
        self._stack.enter_context(self._bar)
        self._pause_in_debugger(self._bar)

    def after_step(self, now: Progress) -> None:
        if now.is_logged:
            now.readings.then(lambda: self._show(now))

    def _show(self, now: Progress) -> None:
        self._train_loss = {"train/loss": now.metrics["train/loss"]}
        if self._bar:
            rate = format_number(round(self._meter.samples_per_second or 0))
            text = f"loss {format_number(now.metrics['train/loss'])}  {rate} samples/s"
            self._bar.update(self._task, completed=now.step, description=text)

    def after_evaluation(self, now: Progress) -> None:
        monitored = main_metrics([self._monitor], now.metrics)
        others = [name for name in evaluation_metrics(now.metrics) if name not in monitored]
        first = others[: MAX_METRICS - len(monitored)]
        known = self._train_loss | {name: now.metrics[name] for name in now.metrics if name in (*monitored, *first)}
        fields = [f"epoch {now.epoch:3d}  step {now.step:6d}"]
        fields += [f"{name} {format_number(value)}" for name, value in known.items()]
        if rate := self._meter.samples_per_second:
            fields.append(f"{format_number(round(rate))} samples/s")
        log.info("%s", "  ".join(fields))

    def on_end(self, now: Progress, outcome: Outcome) -> None:
        self._stack.close()

    def _pause_in_debugger(self, bar: Bar) -> None:
        """Hide the bar at each prompt of pdb, until a command continues the run.

        breakpoint() and pdb.set_trace() cannot be wrapped, because they return before the first prompt. IPython's
        debugger derives from Pdb.
        """
        interaction = pdb.Pdb.interaction

        def without_bar(debugger: pdb.Pdb, *arguments: Any) -> None:
            if not bar.live.is_started:
                return interaction(debugger, *arguments)
            bar.stop()
            if isinstance(debugger.stdout, FileProxy):  # created while the bar had replaced the standard output
                debugger.stdout = debugger.stdout.rich_proxied_file
            try:
                interaction(debugger, *arguments)
            finally:
                bar.start()

        self._stack.callback(setattr, pdb.Pdb, "interaction", interaction)
        pdb.Pdb.interaction = without_bar  # type: ignore[method-assign, assignment]
