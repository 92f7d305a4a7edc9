"""One world at a time can lock a run directory; if several take over the lock of a dead owner, one succeeds."""

import json
import multiprocessing
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.errors import InputError
from runner.records import run_lock
from runner.records.attempts import read_attempts
from runner.records.run_lock import lock_directory

SMALL = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=200", "logger=none", "threads=1")


def write_lock(directory: Path, number: int = 1) -> Path:
    """Write the lock file of an owner on another machine."""
    owner = {"number": number, "hosts": ["elsewhere"], "user": "me", "pid": 7, "started": "then", "machine": "another"}
    path = directory / f"holder-{number}.json"
    path.write_text(json.dumps(owner))
    return path


@pytest.mark.fault("two simultaneous resumes of one run", outcome="refused")
def test_a_second_resume_is_refused_with_the_lock_owner(
    here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(*SMALL, "max_steps=2") == 0
    (run,) = (tmp_path / "outputs" / "run").iterdir()
    owner = lock_directory(run)
    before = contents(run)
    capsys.readouterr()
    assert here(f"resume={run}", "max_steps=4") == 2
    error = capsys.readouterr().err
    assert f"has been locked by process {os.getpid()} on {os.uname().nodename} (" in error
    assert len(error.splitlines()) == 1
    assert contents(run) == before
    owner.release()
    assert here(f"resume={run}", "max_steps=4") == 0
    assert not list(run.glob("*holder-*"))
    assert [attempt.number for attempt in read_attempts(run)] == [1, 2]


def contents(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def try_to_lock(directory: Path, start: Any, done: Any, won: Any) -> None:
    start.wait(300)
    try:
        mine = lock_directory(directory)
    except InputError:
        won.put(False)
        return
    won.put(True)
    done.wait(300)
    mine.release()


@pytest.mark.fault("kill -9 of the lock owner of a run", outcome="survived")
def test_one_of_several_takes_over_from_a_killed_process(tmp_path: Path) -> None:
    """The new owner records the end of the killed attempt."""
    context = multiprocessing.get_context("fork")
    died = context.Process(target=lambda: (lock_directory(tmp_path), os._exit(1)))
    died.start()
    died.join()
    start, done, won = context.Barrier(6), context.Event(), context.Queue()
    processes = [context.Process(target=try_to_lock, args=(tmp_path, start, done, won)) for _ in range(6)]
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


def test_an_owner_on_another_machine_is_alive_while_it_touches_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lock(tmp_path)
    stop = threading.Event()

    def touch() -> None:
        while not stop.wait(0.1):
            os.utime(path)

    touching = threading.Thread(target=touch)
    touching.start()
    with pytest.raises(InputError, match=r"locked by process 7 on elsewhere \(me\) since then; wait for it, or end"):
        lock_directory(tmp_path)
    stop.set()
    touching.join()
    monkeypatch.setattr(run_lock, "DEAD_AFTER_S", 1.0)
    mine = lock_directory(tmp_path)  # the file is not touched any more
    assert mine.path.name == "holder-2.json"
    (killed,) = read_attempts(tmp_path)
    assert (killed.number, killed.hosts, killed.state) == (1, ["elsewhere"], "killed")
    mine.release()
    os.utime(write_lock(tmp_path, 3), (1, 1))
    lock_directory(tmp_path).release()  # immediately: the file is old
    assert not list(tmp_path.glob("*holder-*"))


@pytest.mark.fault("two simultaneous resumes of one run", outcome="refused")
def test_a_suspended_owner_has_lost_its_lock_to_a_later_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The world that took over has ended, and a third one has locked the directory."""
    stalled = lock_directory(tmp_path)
    second = lock_directory(tmp_path, previous=1)
    monkeypatch.setattr(run_lock, "CHECK_S", 0.0)  # so that is_lost() checks the file
    assert stalled.is_lost() and not second.is_lost()
    second.release()
    third = lock_directory(tmp_path)
    assert stalled.is_lost() and not third.is_lost()
    stalled.release()
    assert third.path.exists()
    third.release()


@pytest.mark.fault("a full disk while the lock is written", outcome="refused")
def test_a_lock_is_written_whole_or_not_at_all(
    tmp_path: Path, here: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(*SMALL, "max_steps=2") == 0
    (run,) = (tmp_path / "outputs" / "run").iterdir()
    before, create = contents(run), run_lock._create

    def create_on_full_disk(path: Path, text: str) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
        try:
            create(path, text)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(run_lock, "_create", create_on_full_disk)
    capsys.readouterr()
    assert here(f"resume={run}", "max_steps=4") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{run}/holder-2.json could not be written: File too large; raise the limit of file sizes")
    assert contents(run) == before
    monkeypatch.undo()
    assert lock_directory(run).attempt.number == 2


@pytest.mark.fault("no further thread may be started", outcome="refused")
def test_a_lock_without_its_thread_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        lock_directory(tmp_path)
    assert not list(tmp_path.iterdir())
