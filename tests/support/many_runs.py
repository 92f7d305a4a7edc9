"""Directories of runs and sweeps without training, and processes that own the lock of such a directory."""

import contextlib
import json
import multiprocessing
import time
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import yaml

from runner.records.ledger import lock_sweep, write_lines
from runner.records.run_lock import lock_directory

SMALL = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=200", "logger=none", "threads=1")


def make_run(
    path: Path,
    *overrides: str,
    state: str = "finished",
    age_s: float = 60,
    values: tuple[float, float] = (0.9, 0.8),
    **facts: Any,
) -> Path:
    """Write a run. `values` are those of val/accuracy: the best one, which comes first, and the last one."""
    path.mkdir(parents=True)
    settings = dict(word.split("=") for word in overrides)
    started = datetime.fromtimestamp(time.time() - age_s, UTC).isoformat(timespec="milliseconds")
    monitor = {"name": "val/accuracy", "direction": "max"}
    measured = {
        "metrics": {"val/accuracy": values[1], "val/loss": 0.5},
        "best": {"step": 1, "value": values[0]},
        "error": None,
    }
    result = {"state": state, "task": "train", "started": started, "monitor": monitor, "model": "mlp", "world_size": 1}
    result |= measured if state == "finished" else {"metrics": {}, "best": None, "error": None}
    (path / "result.json").write_text(json.dumps(result | facts))
    (path / "overrides.yaml").write_text(yaml.safe_dump(["model=mlp", *overrides]))
    optimizer = {"lr": float(settings.get("optimizer.lr", 0.1))}
    (path / "config.yaml").write_text(yaml.safe_dump({"seed": 0, "optimizer": optimizer, "model": {"hidden": [16]}}))
    lines = [{"step": step, "epoch": 1, "val/accuracy": value} for step, value in enumerate(values, start=1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make_sweep(path: Path, *states: str, age_s: float = 60, **facts: Any) -> Path:
    """Write a sweep with a job for each state: optimizer.lr=0.1, 0.2, ..."""
    path.mkdir(parents=True)
    write_lines(
        path, {"sweep": {"typed": [], "config_dirs": [], "command": [], "shared": {}}, "at": time.time() - age_s}
    )
    for number, state in enumerate(states):
        word = f"optimizer.lr=0.{number + 1}"
        write_lines(path, {"number": number, "label": f"{number}-lr-0.{number + 1}", "overrides": ["model=mlp", word]})
        if state != "waiting":
            write_lines(path, {"number": number, "state": "running", "at": time.time() - age_s, **facts})
            make_run(path / f"{number}-lr-0.{number + 1}", word, state=state, age_s=age_s)
        if state not in ("waiting", "running"):
            write_lines(path, {"number": number, "state": state, "at": time.time() - age_s})
    return path


@contextlib.contextmanager
def owned(*directories: Path) -> Iterator[list[BaseProcess]]:
    """Lock each directory in a process of its own, which a signal ends, for the duration of the context."""
    context = multiprocessing.get_context("fork")

    def own(directory: Path, is_locked: Any) -> None:
        (lock_sweep if (directory / "ledger.jsonl").exists() else lock_directory)(directory)
        is_locked.set()
        time.sleep(600)

    processes = []
    try:
        for directory in directories:
            is_locked = context.Event()
            processes.append(context.Process(target=own, args=(directory, is_locked)))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
                processes[-1].start()
            assert is_locked.wait(120)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join(120)
