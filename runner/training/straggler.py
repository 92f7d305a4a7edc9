"""Which rank the others wait for, and how long: from how long each is at work in a step, and not in a collective."""

import time
from collections import deque

import torch

from runner.distributed.world import World
from runner.training.strategy import Axes

AT_MOST = 1000  # steps, the last ones: each rank's go to all ranks
# Of this thread, in nanoseconds: on a CPU, ready and waiting for one, and how often it was given one.
_SCHEDULED = "/proc/thread-self/schedstat"


class Straggler:
    """Of a world on CPUs. On other devices a rank waits in the device's own queue, which nobody can tell from work.

    A rank is at work while its thread computes, is kept from it by other processes, or waits for its data. One that
    sleeps, or waits for a file in the middle of a step, is not seen.
    """

    def __init__(self, world: World, axes: Axes):
        self._world = world
        # A parameter server has no step of its own.
        self._ranks = [rank for rank in range(world.world_size) if axes.data_rank(rank) is not None]
        self._is_seen = len(self._ranks) > 1 and world.device.type == "cpu"
        # At work in each step since the last one that was logged, and how long the step took.
        self._steps: deque[tuple[float, float]] = deque(maxlen=AT_MOST)
        self._began = self._began_work = 0.0

    def begin_step(self) -> None:
        """Its data are there."""
        if self._is_seen:
            self._began, self._began_work = time.perf_counter(), _work_s()

    def end_step(self, wait_s: float) -> None:
        """All is computed and exchanged. wait_s: for its data."""
        if not self._is_seen:
            return
        work_s, step_s = _work_s() - self._began_work, time.perf_counter() - self._began
        self._steps.append((wait_s + work_s, wait_s + step_s))

    def work_s(self) -> list[torch.Tensor]:
        """Of the steps since `measured` was last called, (steps, ranks), to be summed over the ranks; or nothing."""
        if not self._is_seen:
            return []
        table = torch.zeros(len(self._steps), self._world.world_size, dtype=torch.float64)
        table[:, self._world.rank] = torch.tensor([work_s for work_s, _ in self._steps], dtype=torch.float64)
        return [table]

    def measured(self, *work_s: torch.Tensor) -> dict[str, float]:
        """Of the same steps, given the sum of what all ranks have said of `work_s`.

        perf/straggler: the part of them, 0 to 1, in which the other ranks, in the mean, wait for the slowest of each
            step. perf/slowest_rank: for which they wait longest.
        """
        if not work_s:
            return {}
        took_s = sum(step_s for _, step_s in self._steps)
        self._steps.clear()
        waits_s, slowest = waits_for_slowest(work_s[0][:, self._ranks])
        return {
            "perf/straggler": min(float(waits_s.sum()) / max(took_s, 1e-9), 1.0),
            "perf/slowest_rank": float(self._ranks[slowest]),
        }


def waits_for_slowest(work_s: torch.Tensor) -> tuple[torch.Tensor, int]:
    """How long the others wait in each step, in the mean, and the column that they wait longest for.

    work_s: (steps, ranks).
    """
    longest_s, slowest = work_s.max(dim=1)
    waits_s = (longest_s[:, None] - work_s).sum(dim=1) / (work_s.shape[1] - 1)
    for_each_s = torch.zeros(work_s.shape[1], dtype=work_s.dtype).index_add_(0, slowest, waits_s)
    return waits_s, int(for_each_s.argmax())


def _work_s() -> float:
    """How long this thread has run so far, or could have."""
    try:
        with open(_SCHEDULED, "rb", buffering=0) as scheduled:
            delayed_ns = int(scheduled.read(64).split()[1])
    except (OSError, IndexError):  # not on Linux
        delayed_ns = 0
    return time.thread_time() + delayed_ns / 1e9
