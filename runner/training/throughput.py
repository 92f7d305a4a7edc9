"""Measurements of steps: throughput, the fraction of a step that waits for data, memory, and the slowest rank."""

import resource
import sys
import time
from collections.abc import Callable, Sequence

import torch

from runner.distributed.world import World
from runner.input.batch import StepBatch
from runner.training.mode import Axes

WARMUP_STEPS = 20
GOODPUT, PRODUCTIVE = "perf/goodput", "perf/productive_s"
# Of this thread, in nanoseconds: time on a CPU, time runnable but waiting for one, and number of time slices.
_SCHEDSTAT = "/proc/thread-self/schedstat"


class ThroughputMeter:
    """Times steps from the end of one to the end of the next, without the time from a pause to the next step.

    Args:
        warmup_steps: Excluded from the throughput: they warm up caches and allocators.
        elapsed_s: Returns the seconds of all attempts of the run so far; None if the goodput is not measured.

    Attributes:
        productive_s: Seconds of the steps that led to the current weights, also in earlier attempts, without the time
            that they waited for data.
        shortest_s: The time that the devices of the run need for a sample at their peak rates; None if it is unknown.
    """

    def __init__(self, warmup_steps: int = WARMUP_STEPS, elapsed_s: Callable[[], float] | None = None):
        self._warmup_steps, self._elapsed_s = warmup_steps, elapsed_s
        self.productive_s = 0.0
        self.shortest_s: float | None = None
        self._steps = self._samples = 0
        self._seconds = 0.0
        self._wait_s = self._step_s = 0.0
        self._last = time.perf_counter()

    def tick(self, batch: StepBatch) -> None:
        """Record the end of a step."""
        now = time.perf_counter()
        self._steps += 1
        self._step_s, self._wait_s = now - self._last, batch.wait_s
        self.productive_s += max(self._step_s - self._wait_s, 0.0)
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

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization after the warm-up, 0 to 1; None before its end, and for unknown devices."""
        rate = self.samples_per_second
        return None if rate is None or self.shortest_s is None else rate * self.shortest_s

    @property
    def goodput(self) -> float | None:
        """Productive seconds over all seconds of the run, 0 to 1; None if they are not measured."""
        return None if self._elapsed_s is None else self.productive_s / max(self._elapsed_s(), 1e-9)

    def measured(self) -> dict[str, float]:
        """Return the metrics of the last step."""
        metrics = {"perf/step_time_s": self._step_s, "perf/data_wait": min(self._wait_s / max(self._step_s, 1e-9), 1.0)}
        if self.samples_per_second is not None:
            metrics["perf/samples_per_second"] = self.samples_per_second
        if self.mfu is not None:
            metrics["perf/mfu"] = self.mfu
        if self.goodput is not None:
            metrics |= {GOODPUT: self.goodput, PRODUCTIVE: self.productive_s}
        return metrics


def peak_memory_mib(device: torch.device) -> float:
    """Return the peak memory of the device, or of this process if the device is the CPU, in MiB."""
    if device.type == "cuda":  # max_memory_allocated would convert all 200 statistics, which takes 0.3 ms
        peak: int = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"]
        return peak / 2**20
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
        self._start = self._start_work = 0.0  # of the current step
        self._step_s = self._work_s = 0.0  # since the last logged step

    def begin_step(self) -> None:
        """Record the start of a step, after its data are read."""
        if self._is_enabled:
            self._start, self._start_work = time.perf_counter(), _work_s()

    def end_step(self, wait_s: float) -> None:
        """Record the end of a step that waited `wait_s` seconds for its data."""
        if self._is_enabled:
            self._work_s += wait_s + _work_s() - self._start_work
            self._step_s += wait_s + time.perf_counter() - self._start

    def work_s(self) -> torch.Tensor:
        """Return the working time of each rank, to be summed over the ranks: (ranks,), or (0,) if not measured."""
        num_ranks = self._world.world_size if self._is_enabled else 0
        table = torch.zeros(num_ranks, dtype=torch.float64, device=self._world.device)
        if self._is_enabled:
            table[self._world.rank] = self._work_s
        return table

    def measured(self, of_ranks: Sequence[float]) -> dict[str, float]:
        """Return the metrics since the last call, given `work_s` of each rank.

        perf/straggler is the fraction of the time, 0 to 1, in which the other ranks wait on average for the one that
        works longest, perf/slowest_rank.
        """
        if not self._is_enabled:
            return {}
        work_s = [of_ranks[rank] for rank in self._ranks]
        slowest = work_s.index(max(work_s))
        wait_s = sum(work_s[slowest] - each for each in work_s) / (len(self._ranks) - 1)
        fraction = min(wait_s / max(self._step_s, 1e-9), 1.0)
        self._step_s = self._work_s = 0.0
        return {"perf/straggler": fraction, "perf/slowest_rank": float(self._ranks[slowest])}


def _work_s() -> float:
    """Return how long this thread has been running or runnable."""
    try:
        with open(_SCHEDSTAT, "rb", buffering=0) as schedstat:
            delayed_ns = int(schedstat.read(64).split()[1])
    except (OSError, IndexError):  # not on Linux
        delayed_ns = 0
    return time.thread_time() + delayed_ns / 1e9
