"""task=rerun: train a finished run again from its record, compare the weights, and list what has changed."""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from runner.checkpoints.layout import list_checkpoints, read_train_state
from runner.config.changes import differences
from runner.config.schema import OF_TASKS, Config
from runner.distributed.world import World
from runner.errors import InputError, quantity
from runner.jobs.task import JobTask
from runner.records.compared_runs import LOCATION_KEYS
from runner.records.custom_code import read_code
from runner.records.logged_numbers import compare_numbers, describe_other_samples
from runner.records.provenance import DIFF
from runner.records.run_directory import RunDirectory
from runner.records.run_files import read_bytes, read_mapping
from runner.records.run_record import find_run
from runner.records.settings import CONFIG, dotted
from runner.tasks.train import Train
from runner.training.build import Experiment

log = logging.getLogger(__name__)

# Keys that do not affect the weights, and `threads`, which depends on the machine.
IGNORED_KEYS = frozenset((*LOCATION_KEYS, "code"))
IGNORED_KEYS |= {"launcher", "metrics", "monitor", "monitor_direction", "callbacks", "profile", *OF_TASKS}


class Rerun(JobTask):
    """Trains with the configuration of `config.run` in a new directory and compares the results."""

    reads_run = trains = True

    def check(self, config: Config, world_size: int) -> list[str]:
        path = Path(str(config.run))
        record = find_run(path)
        if record.task not in ("train", "rerun"):
            return [f"run={path} is a run of task={record.task}; task=rerun needs a training run"]
        if record.state != "finished" or not record.weights_sha256:
            return [f"run={path} is {record.state} and has no final weights to compare with; try resume={path}"]
        if (size := record.world_size) != world_size:
            ranks = quantity(size, "rank")
            return [
                f"run={path} had {ranks} and cannot be repeated to the bit on {world_size}, because sums are rounded "
                f"differently; start {ranks}, or add launcher=spawn launcher.nproc_per_node={size}"
            ]
        return []

    def run(
        self, config: Config, experiment: Experiment, world: World, directory: RunDirectory, console: Console
    ) -> dict[str, float]:
        then = Path(str(config.run))
        if directory.writes:
            if config.fork:  # `possible_causes` reads this record, which the training would write later
                directory.commit(read_train_state(list_checkpoints(directory.checkpoints)[-1]).step)
            lines = possible_causes(then, directory.path)
            log.info("rerun   %s", then)
            for line in lines or ["nothing: commit, versions, machine and configuration are the same"]:
                log.info("differs %s", line)
        metrics = Train().run(config, experiment, world, directory, console)
        if not directory.writes:
            return metrics
        was, now = find_run(then).weights_sha256, directory.record.weights_sha256
        log.info("same weights: %s" if now == was else f"other weights: they were {was} and are %s", now)
        if now != was:
            numbers = compare_numbers((then, directory.path), tolerance=0.0, grows=False)
            for samples in describe_other_samples((then, directory.path)):
                log.info("differs %s", samples)
            difference = numbers.first_unexplained
            log.info("the logged numbers %s", f"differ at {difference}" if difference else "are equal")
        return metrics | {"rerun/same_weights": float(now == was)}


def possible_causes(then: Path, now: Path) -> list[str]:
    """Return the possible causes of different weights of two runs, one line each."""
    old, new = (
        dotted({"git": run.git, "code": run.code or {}, "versions": run.versions, "machine": run.machine})
        | {"hosts": run.hosts, "world_size": run.world_size}
        | _settings(run.directory)
        for run in (find_run(then), find_run(now))
    )
    changes = differences(old, new)
    lines = [f"{key}: was {before}, is {after}" for key, (before, after) in changes.items()]
    lines = [line for line in lines if not line.startswith(("code.submitted", "code.copy", "code.modules"))]
    with suppress(InputError):  # raised if a copy of the code has been removed
        before, after = (read_code(path) if "code.hash" in changes else None for path in (then, now))
        if before is not None and after is not None:
            names = [name for name in before.modules if before.sources[name] != after.sources.get(name)]
            added = [name for name in after.modules if name not in before.modules]
            files = ", ".join(filter(None, (before.describe(names), after.describe(added))))
            lines.append(f"code: {files}: compare {before.directory} with {after.directory}")
    if _diff(then) != _diff(now):
        lines.append(f"uncommitted changes: compare {then / DIFF} with {now / DIFF}")
    return lines


def _diff(path: Path) -> str:
    return read_bytes(path / DIFF).decode(errors="replace") if (path / DIFF).exists() else ""


def _settings(path: Path) -> dict[str, Any]:
    """Return the recorded configuration with dotted keys, without IGNORED_KEYS."""
    return dotted({key: value for key, value in read_mapping(path / CONFIG).items() if key not in IGNORED_KEYS})
