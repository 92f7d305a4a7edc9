"""The measurements of growth.py as a callback: callbacks=growth_meter, with this directory as --config-dir."""

import itertools
import json
import os
import statistics
import time
from pathlib import Path

from peers.meter import FIGURES, STARTED, peak_memory_mib

from runner.training.callbacks.contract import Callback, Outcome, Progress, RunInfo


class GrowthMeter(Callback):
    """Measures steps and checkpoints; training waits for each checkpoint because of `after_checkpoint`.

    The step time is the median time between two steps, without the warm-up and without steps that save a checkpoint.
    """

    def __init__(self, warmup_steps: int = 5) -> None:
        self._warmup_steps = warmup_steps
        self._ended: list[float] = []  # the end of each step, in seconds since the epoch, like all times here
        self._saved: dict[int, float] = {}  # by the number of steps done
        self._evaluated = 0.0

    def on_start(self, run: RunInfo) -> None:
        self._writes = run.rank == 0

    def after_step(self, now: Progress) -> None:
        self._ended.append(time.time())

    def after_checkpoint(self, now: Progress, path: Path) -> None:
        self._saved.setdefault(now.step, time.time())

    def after_evaluation(self, now: Progress) -> None:
        self._evaluated = self._evaluated or time.time()

    def on_end(self, now: Progress, outcome: Outcome) -> None:
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
            # The checkpoint of the last step follows the evaluation.
            "checkpoint_s": statistics.median(at - self._ended[n - 1] for n, at in self._saved.items() if n < last),
            "last_step_at": self._ended[-1],
            "memory_mib": peak_memory_mib(),
        }
        Path(os.environ[FIGURES]).write_text(json.dumps(figures))
