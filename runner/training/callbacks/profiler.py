"""profile=true: a trace of a few steps of rank 0 by torch.profiler, and its table of the slowest operations."""

import logging
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import profile, schedule

from runner.distributed.environment import quiet_profiler
from runner.records.run_files import make_directory
from runner.training.callbacks.contract import Callback, Outcome, Progress, RunInfo

log = logging.getLogger(__name__)

# Both together are fewer than ThroughputMeter's warm-up, so that samples_per_second excludes the profiled steps.
SKIPPED_STEPS, RECORDED_STEPS = 4, 5
LISTED = 15


class Profiler(Callback):
    """Writes the trace to the run directory and the table to the log; only for the rank that records."""

    def __init__(self, device: torch.device):
        self._device = device
        self._profile: Any = None
        self._stack = ExitStack()

    def on_start(self, run: RunInfo) -> None:
        # A short run skips fewer steps, so that at least its last one is recorded; a single step cannot be recorded.
        num_steps = run.num_steps - run.first_step
        skipped = min(SKIPPED_STEPS, num_steps - 2)
        if skipped < 0:
            return
        recorded = min(RECORDED_STEPS, num_steps - skipped - 1)
        path = run.directory / "profile" / "rank_0.json"
        quiet_profiler()
        self._profile = self._stack.enter_context(
            profile(
                schedule=schedule(skip_first=skipped, wait=0, warmup=1, active=recorded, repeat=1),
                on_trace_ready=lambda profiler: _save_trace(profiler, path, recorded, self._device),
            )
        )

    def after_step(self, now: Progress) -> None:
        if self._profile:
            self._profile.step()

    def on_end(self, now: Progress, outcome: Outcome) -> None:
        self._stack.close()


def _save_trace(profiler: Any, path: Path, steps: int, device: torch.device) -> None:
    make_directory(path.parent)
    with TemporaryDirectory(dir=path.parent) as partial:
        profiler.export_chrome_trace(f"{partial}/{path.name}")
        Path(partial, path.name).replace(path)
    order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    for line in profiler.key_averages().table(sort_by=order, row_limit=LISTED).splitlines():
        log.info("%s", line.rstrip())
    log.info("profile of %d steps: %s; open it in https://ui.perfetto.dev or chrome://tracing", steps, path)
