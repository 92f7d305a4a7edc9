"""The state of a run whose process was killed: lost, everywhere where states are shown."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from many_runs import SMALL, make_run, make_sweep, owned

import runner
from runner.records.compared_runs import read_jobs
from runner.records.ledger import read_ledger, write_state


@pytest.mark.fault("kill -9 of the lock owner of a run", outcome="survived")
def test_a_killed_run_is_lost_until_it_is_resumed(here: Callable[..., int], tmp_path: Path) -> None:
    assert here(*SMALL, "max_steps=2") == 0
    (run,) = runner.runs()
    result = run.path / "result.json"
    text = json.dumps(json.loads(result.read_text()) | {"state": "running"})
    with owned(run.path):
        result.write_text(text)
        assert run.state == runner.table([run])["state"][0] == "running"
    assert run.state == runner.table([run])["state"][0] == read_jobs(run.path, "run")[0].state == "lost"
    assert repr(run).startswith(f"<Run {run.path}: lost")
    assert result.read_text() == text  # a reader does not write
    assert here("resume=last", "max_steps=4") == 0
    assert run.state == "finished"


def test_an_owner_on_another_machine_is_dead_without_a_heartbeat(tmp_path: Path) -> None:
    run = runner.Run(make_run(tmp_path / "run", state="running"))
    lock = run.path / "holder-1.json"
    lock.write_text(json.dumps({"number": 1, "hosts": ["elsewhere"], "pid": os.getpid(), "machine": "another"}))
    assert run.state == "running"
    os.utime(lock, (time.time() - 61,) * 2)
    assert run.state == "lost"


def test_a_run_that_ends_while_it_is_read_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runner.Run(make_run(tmp_path / "run"))
    monkeypatch.setattr(runner.Run, "result", {"state": "running"})  # as it was before the lock was released
    assert run.state == "finished"


def test_a_job_of_a_killed_sweep_is_lost(tmp_path: Path) -> None:
    """A job that loads its data has no directory yet, so the process of the sweep counts."""
    sweep = make_sweep(tmp_path / "sweep-1", "finished", "running", "waiting")
    write_state(sweep, 2, "running")

    def states() -> list[str]:
        assert [job.state for job in read_jobs(sweep, "run")] == [job.state for job in read_ledger(sweep)]
        return [job.state for job in read_ledger(sweep)]

    with owned(sweep, sweep / "1-lr-0.2") as (_, job):
        assert states() == ["finished", "running", "running"]
        job.kill()
        job.join(120)
        assert states() == ["finished", "lost", "running"]
    assert states() == ["finished", "lost", "lost"]
    assert not (sweep / "2-lr-0.3").exists()
