"""Errors of disks and limits of the machine at any time of a run end the command with one line, not a traceback."""

import errno
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Commands

SMALL = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "logger=none", "threads=1", "max_steps=3")
ERRORS = ("EIO", "EROFS", "ENOSPC", "EDQUOT", "ESTALE", "EFBIG", "EACCES", "EMFILE", "ENFILE")
# What is opened, by a pattern of its path.
PLACES = {
    "the lock": r"/holder-1\.json$",
    "the configuration": r"/\.config\.yaml\.",
    "the log": r"/log\.txt$",
    "a line of metrics": r"/metrics\.jsonl$",
    "a shard": r"/rank_0\.safetensors$",
    "the result": r"/\.result\.json\.",
    "the attempts": r"/attempts\.jsonl$",
}


FAILING = """
def call(*args, **options):
    error = error_of(*args)
    if error is not None:
        raise error
    return function(*args, **options)
"""


def failing(function: Callable[..., Any], error_of: Callable[..., BaseException | None]) -> Callable[..., Any]:
    """Return the function, which raises the error of its arguments if there is one.

    It belongs to Python: the error of custom code would be reported with a traceback.
    """
    names = {"function": function, "error_of": error_of}
    exec(compile(FAILING, "<frozen faults>", "exec"), names)
    call: Callable[..., Any] = names["call"]  # type: ignore[assignment]
    return call


def one_line(out: str, err: str) -> None:
    """Assert that the output of a command ends with one error, of at most two lines and without a traceback."""
    assert "Traceback" not in out + err
    lines = [line for line in (out + err).splitlines() if not line.startswith("warning: ")]
    errors = [line for line in lines if any(os.strerror(getattr(errno, each)) in line for each in (*ERRORS, "EAGAIN"))]
    assert len(errors) == 1, out + err


@pytest.mark.fault("an error of the disk or of open files, at any time", outcome="refused")
@pytest.mark.parametrize(
    "code", [pytest.param(code, marks=[] if code in ("EIO", "EROFS") else pytest.mark.thorough) for code in ERRORS]
)
@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_a_file_is_one_line(
    place: str, code: str, here: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    number = getattr(errno, code)

    def error_of(path: Any, *args: Any) -> OSError | None:
        is_place = re.search(PLACES[place], str(path))
        return OSError(number, os.strerror(number), str(path)) if is_place else None

    monkeypatch.setattr(os, "open", failing(os.open, error_of))
    monkeypatch.setattr(Path, "open", failing(Path.open, error_of))
    status = here(*SMALL)
    monkeypatch.undo()
    out, err = capsys.readouterr()
    if status == 0:
        assert place == "the attempts" and "Traceback" not in out + err
    else:
        assert status in (1, 2)
        one_line(out, err)


@pytest.mark.fault("no further thread or process may be started", outcome="refused")
@pytest.mark.parametrize("allowed", [0, pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_limit_of_threads_is_one_line(
    allowed: int, here: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = list[str]()

    def error_of(thread: threading.Thread) -> RuntimeError | None:
        started.append(thread.name)
        return RuntimeError("can't start new thread") if len(started) > allowed else None

    monkeypatch.setattr(threading.Thread, "start", failing(threading.Thread.start, error_of))
    status = here(*SMALL)
    monkeypatch.undo()
    if status:
        one_line(*capsys.readouterr())
    else:
        assert allowed == 2


@pytest.mark.fault("no further thread or process may be started", outcome="refused")
@pytest.mark.parametrize("words", [("-m", "hydra/launcher=slots", "hydra.launcher.slots=1", "seed=0,1")])
def test_a_limit_of_processes_is_one_line(
    words: tuple[str, ...],
    here: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    monkeypatch.setattr("runner.sweeps.slots.subprocess.Popen", failing(subprocess.Popen, lambda *args: error))
    assert here(*SMALL, *words) == 1
    one_line(*capsys.readouterr())


WITH_PROCESSES = {
    "loader.num_workers=2": ("loader.num_workers=2",),
    "launcher=spawn": ("launcher=spawn", "parallel=ddp"),
    "launcher=torchrun": ("launcher=torchrun", "parallel=ddp"),
}


@pytest.mark.fault("a low limit of open files", outcome="refused")
@pytest.mark.parametrize("option", WITH_PROCESSES)
def test_a_limit_of_open_files_is_refused_before_processes_start(
    option: str, here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, largest = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = {int(name) for name in os.listdir("/proc/self/fd")}
    low = [number for number in range(len(opened) + 20) if number not in opened][19]  # 19 more can be opened
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, largest))
    try:
        assert here(*SMALL, *WITH_PROCESSES[option]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"{option} needs 3[06] more open files, and the limit is {low} in all; raise it, as with ulimit -n 1024", line
    )
    assert not (tmp_path / "outputs").exists()


@pytest.mark.soak
@pytest.mark.fault("a low limit of open files", outcome="refused")
@pytest.mark.parametrize("limit", range(20, 84, 4))
@pytest.mark.parametrize(
    "words", [(), *WITH_PROCESSES.values(), ("loader.num_workers=2", "launcher=spawn", "parallel=ddp")]
)
def test_every_limit_of_open_files_is_one_line(words: tuple[str, ...], limit: int, commands: Commands) -> None:
    command = [sys.executable, "-m", "runner", *SMALL, *words]
    done = commands.finish(commands.start_as(["bash", "-c", f'ulimit -n {limit}; exec "$@"', "bash", *command]))
    assert "Traceback" not in done.stdout + done.stderr
    if done.returncode:  # a run of several ranks reports its failure on standard output
        assert (done.stdout + done.stderr).count("open files") == 1
    if done.returncode == 2:
        assert done.stderr.count("\n") == 1
