"""Measurements of steps: throughput, the fraction of a step that waits for data, and memory."""

import resource
import sys
import time

import torch

from runner.input.batch import StepBatch

WARMUP_STEPS = 20


class ThroughputMeter:
    """Times steps from the end of one to the end of the next, without the time from a pause to the next step."""

    def __init__(self, warmup_steps: int = WARMUP_STEPS):
        self._warmup_steps = warmup_steps  # excluded: they warm up caches and allocators
        self._steps = self._samples = 0
        self._seconds = 0.0
        self._wait_s = self._step_s = 0.0
        self._last = time.perf_counter()

    def tick(self, batch: StepBatch) -> None:
        """Record the end of a step."""
        now = time.perf_counter()
        self._steps += 1
        self._step_s, self._wait_s = now - self._last, batch.wait_s
        if self._steps > self._warmup_steps:
            self._samples += batch.num_samples
            self._seconds += self._step_s
        self._last = now

    def pause(self) -> None:
        """Exclude the time before this call, such as an evaluation or a checkpoint, from the next step."""
        self._last = time.perf_counter()

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second over all ranks, after the warm-up; None before its end."""
        return self._samples / self._seconds if self._seconds else None

    @property
    def seconds_per_step(self) -> float:
        """Mean time of a step after the warm-up; 0 before its end."""
        return self._seconds / max(self._steps - self._warmup_steps, 1)

    def measured(self) -> dict[str, float]:
        """Return the metrics of the last step."""
        metrics = {"perf/step_time_s": self._step_s, "perf/data_wait": min(self._wait_s / max(self._step_s, 1e-9), 1.0)}
        if self.samples_per_second is not None:
            metrics["perf/samples_per_second"] = self.samples_per_second
        return metrics


def peak_memory_mib(device: torch.device) -> float:
    """Return the peak memory of the device, or of this process if the device is the CPU, in MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest / (2**20 if sys.platform == "darwin" else 2**10)  # in bytes on macOS, in KiB on Linux
