"""The time of each step's end, as a callback: callbacks=step_times, with this directory as --config-dir."""

import array
import time
from pathlib import Path

from runner.training.callbacks.contract import Callback, Outcome, Progress


class StepTimes(Callback):
    """Writes the times to `file` at the end of the run: seconds, float64. A checkpoint is saved after the callback."""

    def __init__(self, file: str) -> None:
        self._file, self._times = Path(file), array.array("d")

    def after_step(self, now: Progress) -> None:
        self._times.append(time.perf_counter())

    def on_end(self, now: Progress, outcome: Outcome) -> None:
        self._file.write_bytes(self._times.tobytes())
