"""The ledger of a sweep is readable after a crash, and one process at a time can lock the sweep."""

import json
import multiprocessing
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from runner.errors import InputError
from runner.records.ledger import LEDGER, is_sweep, lock_sweep, read_ledger, read_sweep, write_lines, write_state

SWEEP = {"typed": ["seed=0,1"], "config_dirs": [], "command": ["x"], "shared": {"epochs": 1}}
JOBS = [{"number": n, "label": f"{n}-seed-{n}", "overrides": [f"seed={n}"]} for n in (0, 1)]


def begin(directory: Path) -> None:
    write_lines(directory, {"sweep": SWEEP}, *JOBS)


def test_later_lines_add_to_earlier_ones(tmp_path: Path) -> None:
    begin(tmp_path)
    write_state(tmp_path, 0, "running", slots=[1])
    write_state(tmp_path, 0, "failed", error="lost")
    write_state(tmp_path, 0, "running")
    write_state(tmp_path, 0, "finished", metrics={"val/loss": 0.5})
    (tmp_path / "0-seed-0").mkdir()
    result = {"state": "finished", "metrics": {"val/loss": 0.5}, "error": None}
    (tmp_path / "0-seed-0" / "result.json").write_text(json.dumps(result))
    first, second = read_ledger(tmp_path)
    assert is_sweep(tmp_path) and read_sweep(tmp_path).typed == ["seed=0,1"]
    assert (first.state, first.num_starts, first.metrics, first.error) == ("finished", 2, {"val/loss": 0.5}, None)
    assert first.start is not None and first.end is not None and first.start <= first.end
    assert (second.state, second.start, second.directory) == ("waiting", None, tmp_path / "1-seed-1")


def test_the_ledger_is_readable_wherever_it_was_truncated(tmp_path: Path) -> None:
    begin(tmp_path)
    write_state(tmp_path, 0, "running")
    write_state(tmp_path, 0, "finished", metrics={"val/loss": 0.5})
    whole = (tmp_path / LEDGER).read_bytes()
    first = whole.index(b'"state"')
    for length in range(first, len(whole) + 1):
        (tmp_path / LEDGER).write_bytes(whole[:length])
        assert [job.number for job in read_ledger(tmp_path)] == [0, 1]
        write_state(tmp_path, 1, "running")  # a line after a truncated one is readable
        assert read_ledger(tmp_path)[1].state == "lost"  # no process runs the sweep


def test_the_result_of_a_run_takes_precedence_if_it_is_finished(tmp_path: Path) -> None:
    begin(tmp_path)
    write_state(tmp_path, 0, "running")
    result = {"state": "finished", "metrics": {"val/loss": 0.25}, "error": None}
    (tmp_path / "0-seed-0").mkdir()
    (tmp_path / "0-seed-0" / "result.json").write_text(json.dumps(result))
    assert [(job.state, job.metrics) for job in read_ledger(tmp_path)] == [
        ("finished", {"val/loss": 0.25}),
        ("waiting", {}),
    ]


def lock_until_killed(directory: Path, ready: Any) -> None:
    lock_sweep(directory)
    ready.set()
    signal.pause()


@pytest.mark.fault("kill -9 of the lock owner of a sweep", outcome="survived")
def test_a_sweep_is_locked_until_the_owner_dies(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    owner = context.Process(target=lock_until_killed, args=(tmp_path, ready))
    owner.start()
    try:
        assert ready.wait(120)
        with pytest.raises(InputError, match=f"has been locked by process {owner.pid} on {socket.gethostname()} "):
            lock_sweep(tmp_path)
    finally:
        assert owner.pid is not None
        os.kill(owner.pid, signal.SIGKILL)
        owner.join(120)
    lock_sweep(tmp_path)
