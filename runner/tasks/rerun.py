"""task=rerun: a finished run once more, from what it recorded; are the weights the same, and what differs now?"""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from runner.config.renamed_targets import rename_targets
from runner.config.schema import Config
from runner.distributed.world import World
from runner.runs.provenance import DIFF
from runner.runs.records import dotted
from runner.runs.run_directory import CONFIG, RunDirectory, read_result
from runner.runs.train_state import OLDER_ORDER, ORDER
from runner.tasks.train import Train
from runner.training.build import Experiment

log = logging.getLogger(__name__)

# What has no influence on the numbers. The threads are the machine's.
ASIDE = (
    "task",
    "run",
    "resume",
    "name",
    "outputs",
    "launcher",
    "logger",
    "metrics",
    "monitor",
    "monitor_direction",
    "callbacks",
    "threads",
    "report",
    "compare",
    "profile",
)


class Rerun:
    """Trains as config.run did, in a new directory, and compares the two."""

    section = None
    reads_run = True
    reads_checkpoint = False
    needs_experiment = True
    trains = True
    picks_split = False
    min_world_size = 1

    def check(self, config: Config, world_size: int) -> list[str]:
        """Why the run cannot be made again in a world of this size."""
        path = Path(str(config.run))
        result = read_result(path) or {}
        if result.get("task") not in ("train", "rerun"):
            return [f"run={path} is of task={result.get('task')}, and task=rerun trains; name a training run"]
        if result["state"] != "finished":
            return [f"run={path} is {result['state']}, and has no final weights to compare with; try resume={path}"]
        if (order := _order_of(path)) not in (OLDER_ORDER, ORDER):
            return [
                f"run={path} read its samples in order={order}, which this version does not know; use the one it is of"
            ]
        if (size := result["world_size"]) != world_size:
            return [
                f"run={path} ran in a world of {size}, and this one is of {world_size}, in which sums are "
                f"rounded otherwise; start it as it was, or add launcher=spawn launcher.nproc_per_node={size}"
            ]
        return []

    def run(
        self, config: Config, experiment: Experiment, world: World, directory: RunDirectory, console: Console
    ) -> dict[str, float]:
        then = Path(str(config.run))
        if directory.writes:
            lines = differences(then, directory)
            log.info("again   %s", then)
            for line in lines or ["nothing: commit, versions, machine and configuration are the same"]:
                log.info("differs %s", line)
        order = int(world.agreement.share("order", lambda: str(_order_of(then))))
        metrics = Train().run(config, experiment, world, directory, console, order)
        if not directory.writes:
            return metrics
        was, now = (read_result(then) or {})["weights_sha256"], directory.result.weights_sha256
        log.info("same weights: %s" if now == was else f"other weights: they were {was} and are %s", now)
        return metrics | {"rerun/same_weights": float(now == was)}


def differences(then: Path, now: RunDirectory) -> list[str]:
    """What the numbers could differ by, a line each."""
    was, result = read_result(then) or {}, asdict(now.result)
    lines = []
    for topic in ("git", "versions", "machine"):
        before, after = was.get(topic) or {}, result[topic]
        lines += [
            f"{key}: was {before.get(key)}, is {after.get(key)}"
            for key in {**before, **after}
            if before.get(key) != after.get(key)
        ]
    if _diff(then) != _diff(now.path):
        lines.append(f"uncommitted changes: compare {then / DIFF} with {now.path / DIFF}")
    old, new = (_settings(path) for path in (then, now.path))
    return lines + [f"{key}: was {old[key]}, is {new.get(key)}" for key in old if old[key] != new.get(key)]


def _order_of(run: Path) -> Any:
    """Of its samples, as its result says; that of a version which knew one order alone says nothing."""
    return (read_result(run) or {}).get("order", OLDER_ORDER)


def _diff(path: Path) -> str:
    return (path / DIFF).read_text() if (path / DIFF).exists() else ""


def _settings(path: Path) -> dict[str, Any]:
    """The configuration with dotted keys, without what is aside."""
    recorded = yaml.safe_load((path / CONFIG).read_text())
    return dotted(rename_targets({key: value for key, value in recorded.items() if key not in ASIDE}))
