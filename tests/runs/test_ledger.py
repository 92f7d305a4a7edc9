"""The ledger of a sweep is readable whenever it was cut short, and one process at a time holds the sweep."""

import json
import multiprocessing
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from runner.errors import InputError
from runner.runs.ledger import LEDGER, hold, is_sweep, read_ledger, read_sweep, write_lines, write_state

SWEEP = {"typed": ["seed=0,1"], "config_dir": None, "command": ["x"], "shared": {"epochs": 1}}
JOBS = [{"number": n, "label": f"{n}-seed-{n}", "overrides": [f"seed={n}"]} for n in (0, 1)]


def begin(folder: Path) -> None:
    write_lines(folder, {"sweep": SWEEP}, *JOBS)


def test_later_lines_add_to_earlier_ones(tmp_path: Path) -> None:
    begin(tmp_path)
    write_state(tmp_path, 0, "running", slots=[1])
    write_state(tmp_path, 0, "failed", error="lost")
    write_state(tmp_path, 0, "running")
    write_state(tmp_path, 0, "finished", metrics={"val/loss": 0.5})
    first, second = read_ledger(tmp_path)
    assert is_sweep(tmp_path) and read_sweep(tmp_path).typed == ["seed=0,1"]
    assert (first.state, first.num_starts, first.metrics, first.error) == ("finished", 2, {"val/loss": 0.5}, None)
    assert first.start is not None and first.end is not None and first.start <= first.end
    assert (second.state, second.start, second.directory) == ("waiting", None, tmp_path / "1-seed-1")


def test_it_is_readable_wherever_it_was_cut(tmp_path: Path) -> None:
    begin(tmp_path)
    write_state(tmp_path, 0, "running")
    write_state(tmp_path, 0, "finished", metrics={"val/loss": 0.5})
    whole = (tmp_path / LEDGER).read_bytes()
    least = whole.index(b'"state"')
    for length in range(least, len(whole) + 1):
        (tmp_path / LEDGER).write_bytes(whole[:length])
        assert [job.number for job in read_ledger(tmp_path)] == [0, 1]
        write_state(tmp_path, 1, "running")  # what is appended to a torn line is not lost
        assert read_ledger(tmp_path)[1].state == "running"


def test_a_runs_own_result_tells_that_it_finished(tmp_path: Path) -> None:
    begin(tmp_path)
    write_state(tmp_path, 0, "running")
    result = {"state": "finished", "metrics": {"val/loss": 0.25}, "error": None}
    (tmp_path / "0-seed-0").mkdir()
    (tmp_path / "0-seed-0" / "result.json").write_text(json.dumps(result))
    assert [(job.state, job.metrics) for job in read_ledger(tmp_path)] == [
        ("finished", {"val/loss": 0.25}),
        ("waiting", {}),
    ]


def hold_until_killed(folder: Path, ready: Any) -> None:
    hold(folder)
    ready.set()
    signal.pause()


@pytest.mark.fault("kill -9 of the holder of a sweep", outcome="survived")
def test_one_process_holds_a_sweep_until_it_dies(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=hold_until_killed, args=(tmp_path, ready))
    holder.start()
    try:
        assert ready.wait(120)
        with pytest.raises(InputError, match=f"process {holder.pid} on {socket.gethostname()} runs this sweep"):
            hold(tmp_path)
    finally:
        assert holder.pid is not None
        os.kill(holder.pid, signal.SIGKILL)
        holder.join(120)
    hold(tmp_path)
