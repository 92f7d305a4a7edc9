"""The peak memory of torch's CPU allocator on this rank, as torch's profiler counts it.

usage: torchrun --nproc-per-node N benchmarks/allocated_memory.py FILE OVERRIDES...
Each rank runs three steps of `runner OVERRIDES`, and writes the peak of steps 2 and 3 to FILE.RANK: the bytes without
those of the datasets. The profiler does not count threads that the runner starts, such as those of RPC.
"""

import os
import sys
from pathlib import Path
from typing import Any

from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from runner.cli import main as run
from runner.training import build
from runner.training.callbacks.contract import Callback, Progress

STEP, DATA, MEMORY = "end of a step", "loading of the data", "[memory]"  # names of events
OPTIONS = ["max_steps=3", "logger=none", "log_every=1000", "callbacks=allocated_memory"]


class Steps(Callback):
    """Marks the end of each step for the profiler."""

    def after_step(self, now: Progress) -> None:
        with record_function(STEP):
            pass


def main() -> None:
    load_data = build.load_data

    def load(*args: Any) -> Any:
        with record_function(DATA):
            return load_data(*args)

    build.load_data = load
    file = f"{sys.argv[1]}.{os.environ['RANK']}"
    sys.argv[1:] = [*sys.argv[2:], *OPTIONS, f"--config-dir={Path(__file__).parent}"]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        if status := run():
            sys.exit(status)
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    first, _, last = (event.start_ns() for event in events if event.name() == STEP)
    (loading,) = (event for event in events if event.name() == DATA)
    total, peak, data = 0, 0, 0
    for event in (event for event in events if event.name() == MEMORY):
        total += event.nbytes()
        if loading.start_ns() <= event.start_ns() <= loading.end_ns():
            data += event.nbytes()
        if first <= event.start_ns() <= last:
            peak = max(peak, total)
    Path(file).write_text(str(peak - data))


if __name__ == "__main__":
    main()
