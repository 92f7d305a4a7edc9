"""profile=true: a few steps of rank 0 under torch.profiler, as a trace for a browser and a table of what was slow."""

import logging
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from runner.distributed.environment import quiet_profiler
from runner.training.callback import Callback, Moment, Outcome, RunInfo

log = logging.getLogger(__name__)

# Fewer than the ThroughputMeter leaves out as warm-up: samples_per_second is that of the steps that nobody watches.
SKIPPED_STEPS, RECORDED_STEPS = 4, 5
LISTED = 15


class Profiler(Callback):
    """For the one rank that records; what it finds is in the run's directory and its log."""

    def __init__(self, device: torch.device):
        self._device = device
        self._profile: Any = None
        self._entered = ExitStack()

    def on_start(self, run: RunInfo) -> None:
        num_steps = run.num_steps - run.first_step
        if num_steps == 0:
            return
        warmup = min(1, num_steps - 1)  # the step before the recorded ones warms the profiler up
        skipped = min(SKIPPED_STEPS, max(num_steps - 2, 0))
        recorded = min(RECORDED_STEPS, num_steps - skipped - warmup)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._device.type == "cuda")
        path = run.directory / "profile" / "rank_0.json"

        quiet_profiler()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Profiler won't be using warmup")  # where there is a single step
            plan = schedule(skip_first=skipped, wait=0, warmup=warmup, active=recorded, repeat=1)
        self._profile = self._entered.enter_context(
            profile(
                activities=activities,
                schedule=plan,
                on_trace_ready=lambda profiler: _keep(profiler, path, recorded, self._device),
            )
        )

    def after_step(self, now: Moment) -> None:
        if self._profile:
            self._profile.step()

    def on_end(self, now: Moment, outcome: Outcome) -> None:
        self._entered.close()


def _keep(profiler: Any, path: Path, steps: int, device: torch.device) -> None:
    path.parent.mkdir(exist_ok=True)
    profiler.export_chrome_trace(str(path))
    for line in _slowest(profiler, steps, device):
        log.info("%s", line)
    log.info("profile of %d steps: %s; open it in https://ui.perfetto.dev or chrome://tracing", steps, path)


def _slowest(profiler: Any, steps: int, device: torch.device) -> list[str]:
    """The operations that took the most time themselves, without those that they call."""
    attribute = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = [event for event in profiler.key_averages() if not event.key.startswith("ProfilerStep")]
    total = sum(getattr(event, attribute) for event in events) or 1
    events.sort(key=lambda event: getattr(event, attribute), reverse=True)
    lines = [f"{'ms per step':>11}  {'share':>6}  {'calls':>7}  operation on {device.type}"]
    for event in events[:LISTED]:
        time_us = getattr(event, attribute)
        lines.append(
            f"{time_us / steps / 1000:11.3f}  {time_us / total:6.1%}  {event.count / steps:7.1f}  {event.key[:80]}"
        )
    return lines
