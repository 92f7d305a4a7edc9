"""The measurements of all peers and of the runner: time to the first step, steady rate, memory."""

import json
import os
import time
from pathlib import Path

STARTED = "BENCHMARK_STARTED"  # the start of the command, in seconds since the epoch
FIGURES = "BENCHMARK_FIGURES"  # the file for the result, one JSON line
DEVICE = os.environ.get("BENCHMARK_DEVICE", "cpu")  # or cuda


class Meter:
    """Call it after each step and after the final evaluation."""

    def __init__(self, batch_size: int, warmup_steps: int, num_steps: int) -> None:
        self._batch_size, self._warmup_steps, self._num_steps = batch_size, warmup_steps, num_steps
        self._steps = 0
        self._first = self._warm = self._last = 0.0
        self._evaluation_s: float | None = None

    def tick(self) -> None:
        self._steps += 1
        if DEVICE == "cuda" and self._steps in (1, self._warmup_steps, self._num_steps):
            import torch

            torch.cuda.synchronize()
        self._last = time.time()  # not perf_counter, whose zero may differ between processes
        if self._steps == 1:
            self._first = self._last
        if self._steps == self._warmup_steps:
            self._warm = self._last

    def evaluated(self) -> None:
        self._evaluation_s = time.time() - self._last

    def write(self) -> None:
        """Write one line on rank 0 at the end, to the suite's file or to the terminal."""
        started = os.environ.get(STARTED)
        figures = {
            "samples_per_second": (self._steps - self._warmup_steps) * self._batch_size / (self._last - self._warm),
            "first_step_s": self._first - float(started) if started else None,
            "evaluation_s": self._evaluation_s,
            "last_step_at": self._last,
            "memory_mib": peak_memory_mib(),
        }
        line = json.dumps(figures)
        if path := os.environ.get(FIGURES):
            Path(path).write_text(line + "\n")
        else:
            print(line)


def peak_memory_mib() -> float:
    """Return the peak memory of this process."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) / 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS counts bytes
