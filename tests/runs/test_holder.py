"""A run directory is held by one world at a time; of a holder that has died it is taken over, by one alone."""

import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from commands import Commands, wait_until

from runner.config.schema import Config
from runner.distributed.agreement import Agreement
from runner.distributed.environment import RankInfo
from runner.errors import InputError
from runner.launchers.going_on import holding
from runner.runs import holder
from runner.runs.attempts import append_attempt, begin_attempt, read_attempts
from runner.runs.holder import hold, next_number
from runner.runs.run_directory import CHECKPOINTS, Request, RunDirectory

SMALL = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=200", "logger=none", "threads=1")
GATE = """
import time
from pathlib import Path

from runner.training.callback import Callback


class Gate(Callback):
    def after_step(self, now):
        deadline = time.monotonic() + 300
        while now.step == 50 and not Path("go").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
"""


def take(directory: Path, again: int | None = None) -> holder.Holder:
    return hold(directory, begin_attempt(next_number(directory)), again)


def leave(directory: Path, number: int = 1, **facts: Any) -> Path:
    """The file of a holder on another machine."""
    told = {"number": number, "host": "elsewhere", "user": "me", "pid": 7, "started": "then", "machine": "another"}
    path = directory / f"holder-{number}.json"
    path.write_text(json.dumps(told | facts))
    return path


@pytest.mark.fault("two resumes of one run at a time", outcome="refused")
def test_a_second_resume_is_told_who_holds_the_run(
    commands: Commands, here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(*SMALL, "max_steps=10", "epochs=20") == 0
    (run,) = (tmp_path / "outputs" / "run").iterdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "gate.py").write_text(GATE)
    first = commands.start(
        "-m", "runner", f"resume={run}", "max_steps=100", "--config-dir=mine", "+callbacks.gate._target_=gate.Gate"
    )
    wait_until(lambda: '"step": 50' in (run / "metrics.jsonl").read_text(), first)
    checkpoints = run / CHECKPOINTS
    wait_until(lambda: (checkpoints / "step_48").exists() and not [*checkpoints.glob("*.*")], first)
    before = contents(run)
    (held,) = run.glob("holder-*.json")
    capsys.readouterr()
    assert here(f"resume={run}", "max_steps=100") == 2
    told = capsys.readouterr().err
    assert f"is held by process {json.loads(held.read_text())['pid']} on {os.uname().nodename} (" in told
    assert len(told.splitlines()) == 1
    assert contents(run) == before
    (tmp_path / "go").touch()
    assert commands.finish(first).returncode == 0
    steps = [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "train/loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 101))
    assert not list(run.glob("*holder-*"))
    assert [attempt.number for attempt in read_attempts(run)] == [1, 2]


def contents(run: Path) -> dict[Path, bytes]:
    """Without the checkpoints, of which the holder may be removing one."""
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and CHECKPOINTS not in path.parts}


def try_to_take(directory: Path, start: Any, done: Any, won: Any) -> None:
    start.wait(300)
    try:
        mine = take(directory)
    except InputError:
        won.put(False)
        return
    won.put(True)
    done.wait(300)
    mine.release()


@pytest.mark.fault("kill -9 of the holder of a run", outcome="survived")
def test_of_several_one_takes_over(tmp_path: Path) -> None:
    """From a process that was killed, of which nobody else can write how it ended."""
    context = multiprocessing.get_context("fork")
    died = context.Process(target=lambda: (take(tmp_path), os._exit(1)))
    died.start()
    died.join()
    start, done, won = context.Barrier(6), context.Event(), context.Queue()
    processes = [context.Process(target=try_to_take, args=(tmp_path, start, done, won)) for _ in range(6)]
    for process in processes:
        process.start()
    assert sorted(won.get(timeout=120) for _ in processes) == [False] * 5 + [True]
    done.set()
    for process in processes:
        process.join(120)
    won.close()
    (killed,) = read_attempts(tmp_path)
    assert (killed.number, killed.state, killed.pid) == (1, "killed", died.pid)
    assert not list(tmp_path.glob("*holder-*"))


def test_one_on_another_machine_lives_as_long_as_it_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = leave(tmp_path)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.1):
            os.utime(path)

    beating = threading.Thread(target=beat)
    beating.start()
    with pytest.raises(InputError, match=r"is held by process 7 on elsewhere \(me\) since then; wait for that, or end"):
        take(tmp_path)
    stop.set()
    beating.join()
    monkeypatch.setattr(holder, "DEAD_AFTER_S", 1.0)
    mine = take(tmp_path)  # it beats no more
    assert mine.path.name == "holder-2.json"
    (killed,) = read_attempts(tmp_path)
    assert (killed.number, killed.host, killed.state) == (1, "elsewhere", "killed")
    mine.release()
    os.utime(leave(tmp_path, 3), (1, 1))
    take(tmp_path).release()  # at once: nobody has seen it for long
    assert not list(tmp_path.glob("*holder-*"))


def test_a_world_that_is_started_again_takes_over_from_itself(tmp_path: Path) -> None:
    leave(tmp_path)
    take(tmp_path, again=1).release()
    assert not list(tmp_path.glob("*holder-*"))


class Store:
    """What an agent keeps; the keys of one world in it are those of a prefix."""

    def __init__(self, restart: int, kept: dist.Store):
        self.job, self.root, self._kept = None, None, kept

    def kept(self) -> dist.Store:
        return self._kept

    def memory(self) -> None:
        return None


@pytest.mark.fault("two resumes of one run at a time", outcome="refused")
def test_a_refused_world_that_its_agent_starts_again_is_refused_again(tmp_path: Path) -> None:
    """Only what it has held itself does it take over without asking whether the holder lives."""
    config, request = Config(), Request(directory=str(tmp_path), choices={"parallel": "single"})
    own, other, kept = RunDirectory(tmp_path), RunDirectory(tmp_path), dist.HashStore()

    def worlds(restart: int) -> Any:
        agreement = Agreement(RankInfo(restart=restart), Store(restart, kept), 5.0)  # type: ignore[arg-type]
        assert agreement.share_once("directory", lambda: str(tmp_path)) == str(tmp_path)
        return SimpleNamespace(agreement=agreement, world_size=1)

    other.hold()
    for restart in range(3):
        with pytest.raises(InputError, match="is held by process"), holding(own, config, request, worlds(restart)):
            pass
    other.release()
    with holding(own, config, request, worlds(3)):
        pass
    with holding(own, config, request, worlds(3)), holding(other, config, request, worlds(4)):  # its agent ended that
        assert other.attempt.number == own.attempt.number + 1
    assert not list(tmp_path.glob("*holder-*"))


def test_one_that_wakes_after_its_file_was_made_anew_has_lost_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken over from, the next has ended, and another holds the directory now."""
    stalled = take(tmp_path)
    second = take(tmp_path, again=1)
    append_attempt(tmp_path, begin_attempt(2))
    second.release()
    third = take(tmp_path)
    assert third.path not in (stalled.path, second.path)
    text = third.path.read_text()
    leave(tmp_path, 1)  # as an older version would have made it
    monkeypatch.setattr(holder, "BEAT_S", 0.0)
    assert stalled.is_lost() and not third.is_lost()
    stalled.release()
    assert third.path.read_text() == text and (tmp_path / "holder-1.json").exists()
    third.release()


@pytest.mark.fault("two resumes of one run at a time", outcome="refused")
def test_one_that_seemed_dead_writes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = take(tmp_path)
    second = take(tmp_path, again=1)
    monkeypatch.setattr(holder, "BEAT_S", 0.0)  # as if it had not looked for long
    assert first.is_lost() and not second.is_lost()
    first.release()
    assert second.path.exists()
    second.release()
