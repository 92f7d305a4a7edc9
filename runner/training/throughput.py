"""Measurements of steps: throughput, the fraction of a step that waits for data, memory, and the slowest rank."""

import resource
import sys
import time
from collections import deque

import torch

from runner.distributed.world import World
from runner.input.batch import StepBatch
from runner.training.mode import Axes

WARMUP_STEPS = 20
MAX_STEPS = 1000  # the last steps whose times all ranks exchange
# Of this thread, in nanoseconds: time on a CPU, time runnable but waiting for one, and number of time slices.
_SCHEDSTAT = "/proc/thread-self/schedstat"


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


class StragglerMeter:
    """Finds the rank that the others wait for, and how long they wait, in a world on CPUs.

    A rank works while its thread computes, waits for a CPU, or waits for its data. Sleeping, and waiting for a file
    within a step, are not detected. On other devices, work cannot be distinguished from waiting in the device's queue.
    """

    def __init__(self, world: World, axes: Axes):
        self._world = world
        # A parameter server has no steps.
        self._ranks = [rank for rank in range(world.world_size) if axes.data_rank(rank) is not None]
        self._is_enabled = len(self._ranks) > 1 and world.device.type == "cpu"
        # Working time and duration of each step since the last logged step.
        self._steps: deque[tuple[float, float]] = deque(maxlen=MAX_STEPS)
        self._start = self._start_work = 0.0

    def begin_step(self) -> None:
        """Record the start of a step, after its data are read."""
        if self._is_enabled:
            self._start, self._start_work = time.perf_counter(), _work_s()

    def end_step(self, wait_s: float) -> None:
        """Record the end of a step that waited `wait_s` seconds for its data."""
        if not self._is_enabled:
            return
        work_s, step_s = _work_s() - self._start_work, time.perf_counter() - self._start
        self._steps.append((wait_s + work_s, wait_s + step_s))

    def work_s(self) -> list[torch.Tensor]:
        """Return the working times since the last `measured`, (steps, ranks), to be summed over ranks; or nothing."""
        if not self._is_enabled:
            return []
        table = torch.zeros(len(self._steps), self._world.world_size, dtype=torch.float64)
        table[:, self._world.rank] = torch.tensor([work_s for work_s, _ in self._steps], dtype=torch.float64)
        return [table]

    def measured(self, *work_s: torch.Tensor) -> dict[str, float]:
        """Return the metrics of the same steps, given the sum of `work_s` over the ranks.

        perf/straggler is the fraction of the time, 0 to 1, in which the other ranks wait on average for the slowest
        rank of each step. perf/slowest_rank is the rank that they wait longest for.
        """
        if not work_s:
            return {}
        duration_s = sum(step_s for _, step_s in self._steps)
        self._steps.clear()
        waits_s, slowest = waits_for_slowest(work_s[0][:, self._ranks])
        return {
            "perf/straggler": min(float(waits_s.sum()) / max(duration_s, 1e-9), 1.0),
            "perf/slowest_rank": float(self._ranks[slowest]),
        }


def waits_for_slowest(work_s: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the mean waiting time of the other ranks in each step, and the column that they wait longest for.

    `work_s` has the working times, (steps, ranks).
    """
    longest_s, slowest = work_s.max(dim=1)
    waits_s = (longest_s[:, None] - work_s).sum(dim=1) / (work_s.shape[1] - 1)
    for_each_s = torch.zeros(work_s.shape[1], dtype=work_s.dtype).index_add_(0, slowest, waits_s)
    return waits_s, int(for_each_s.argmax())


def _work_s() -> float:
    """Return how long this thread has been running or runnable."""
    try:
        with open(_SCHEDSTAT, "rb", buffering=0) as schedstat:
            delayed_ns = int(schedstat.read(64).split()[1])
    except (OSError, IndexError):  # not on Linux
        delayed_ns = 0
    return time.thread_time() + delayed_ns / 1e9
