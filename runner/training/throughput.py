"""How fast a run steps, what part of a step waits for its data, and how much memory a rank has used."""

import contextlib
import time

import torch

from runner.training.batch import StepBatch

WARMUP_STEPS = 20


class ThroughputMeter:
    """Times steps from the end of one to the end of the next; what lies between pause and the next step is left out."""

    def __init__(self, warmup_steps: int = WARMUP_STEPS):
        self._warmup_steps = warmup_steps  # they warm caches and allocators up
        self._steps = self._samples = 0
        self._seconds = 0.0
        self._wait_s = self._step_s = 0.0
        self._last = time.perf_counter()

    def tick(self, batch: StepBatch) -> None:
        """A step has ended."""
        now = time.perf_counter()
        self._steps += 1
        self._step_s, self._wait_s = now - self._last, batch.wait_s
        if self._steps > self._warmup_steps:
            self._samples += batch.num_samples
            self._seconds += self._step_s
        self._last = now

    def pause(self) -> None:
        """What comes until the next step is not training: an evaluation, a checkpoint."""
        self._last = time.perf_counter()

    @property
    def samples_per_second(self) -> float | None:
        """Over all ranks, in the steady state; None before there is one."""
        return self._samples / self._seconds if self._seconds else None

    @property
    def seconds_per_step(self) -> float:
        """The mean in the steady state; 0 before there is one."""
        return self._seconds / max(self._steps - self._warmup_steps, 1)

    def measured(self) -> dict[str, float]:
        """Of the last step."""
        metrics = {"perf/step_time_s": self._step_s, "perf/data_wait": min(self._wait_s / max(self._step_s, 1e-9), 1.0)}
        if self.samples_per_second is not None:
            metrics["perf/samples_per_second"] = self.samples_per_second
        return metrics


def peak_memory_mib(device: torch.device) -> float:
    """Memory of the device at its highest so far, or of this process where the device is the CPU, in MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    with contextlib.suppress(OSError):  # not on Linux
        # Each logged step asks: as bytes, and no more of them than are needed, which takes a third of the time.
        with open("/proc/self/status", "rb", buffering=0) as status:
            _, _, highest = status.read(4096).partition(b"VmHWM:")
        return int(highest.split()[0]) / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS counts bytes
