"""When each step of a run ended, as a callback: callbacks=step_times, with this folder as --config-dir."""

import array
import time
from pathlib import Path

from runner.training.callback import Callback, Moment, Outcome


class StepTimes(Callback):
    """file: gets them at the run's end, in seconds, each a float64. A checkpoint comes after it is told of the step."""

    def __init__(self, file: str) -> None:
        self._file, self._times = Path(file), array.array("d")

    def after_step(self, now: Moment) -> None:
        self._times.append(time.perf_counter())

    def on_end(self, now: Moment, outcome: Outcome) -> None:
        self._file.write_bytes(self._times.tobytes())
