"""What growth.py measures of a run, as a callback: callbacks=growth_meter, with this folder as --config-dir."""

import itertools
import json
import os
import statistics
import time
from pathlib import Path

from peers.meter import FIGURES, STARTED, peak_memory_mib

from runner.training.callback import Callback, Moment, Outcome, RunInfo


class GrowthMeter(Callback):
    """The loop waits for each checkpoint, because this hears of them. Those after a step are timed, from that step on.

    A step is the median of the pauses between two of them, without those of the warm-up and those with a checkpoint.
    """

    def __init__(self, warmup_steps: int = 5) -> None:
        self._warmup_steps = warmup_steps
        self._ended: list[float] = []  # each step, in seconds since the epoch, as all here
        self._saved: dict[int, float] = {}  # by how many steps had ended then
        self._evaluated = 0.0

    def on_start(self, run: RunInfo) -> None:
        self._writes = run.rank == 0

    def after_step(self, now: Moment) -> None:
        self._ended.append(time.time())

    def after_checkpoint(self, now: Moment, path: Path) -> None:
        self._saved.setdefault(now.step, time.time())

    def after_evaluation(self, now: Moment) -> None:
        self._evaluated = self._evaluated or time.time()

    def on_end(self, now: Moment, outcome: Outcome) -> None:
        if not self._writes or outcome != "finished":
            return
        last = len(self._ended)
        pauses = [
            after - before
            for step, (before, after) in enumerate(itertools.pairwise(self._ended), start=1)
            if step >= self._warmup_steps and step not in self._saved
        ]
        figures = {
            "step_s": statistics.median(pauses),
            "first_step_s": self._ended[0] - float(os.environ[STARTED]),
            "evaluation_s": self._evaluated - self._ended[-1],
            # The last step's comes after the evaluation.
            "checkpoint_s": statistics.median(at - self._ended[n - 1] for n, at in self._saved.items() if n < last),
            "last_step_at": self._ended[-1],
            "memory_mib": peak_memory_mib(),
        }
        Path(os.environ[FIGURES]).write_text(json.dumps(figures))
