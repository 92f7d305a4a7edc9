"""Leftovers fail the test that left them, and no other; faults are added to the matrix. Checked on generated tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os, socket, subprocess, time
import leftovers, pytest

leftovers.WAIT_S = 3
kept = []

@pytest.fixture(scope="module")
def server():
    process, listener = subprocess.Popen(["sleep", "SECONDS"]), socket.create_server(("127.0.0.1", 0))
    yield process
    listener.close()
    process.kill()
    process.wait()

@pytest.fixture(scope="module")
def forgotten():
    subprocess.Popen(["sleep", "SECONDS"])

def test_fork():
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            time.sleep(SECONDS)
        os._exit(0)
    os.wait()

@pytest.mark.fault("two kinds", outcome="refused")
def test_orphan():
    subprocess.run(["sh", "-c", "sleep SECONDS & sleep 0.5"], start_new_session=True)  # by when it has its name

def test_socket():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_shared():
    open("/dev/shm/SHARED", "w").close()

def test_half(tmp_path):
    (tmp_path / "run/checkpoints/step_1.tmp").mkdir(parents=True)

@pytest.mark.leaves_tmp
@pytest.mark.fault("a half", outcome="survived")
def test_allowed(tmp_path, record_property):
    record_property("injected", 7)
    (tmp_path / "run/checkpoints/step_1.tmp").mkdir(parents=True)

@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.fault("two kinds", outcome="refused")
def test_clean(n, server):
    short = subprocess.Popen(["sleep", "0.05"])  # ends by itself
    kept.append(short)

@pytest.mark.thorough
@pytest.mark.soak
@pytest.mark.fault("not here", outcome="refused")
def test_skipped():
    pytest.skip("no such machine")

def test_last(forgotten, server):
    pass
"""
SECONDS = 100_000 + os.getpid()  # no other test sleeps this long, so that it can be identified
SHARED = f"runner-test-left-{os.getpid()}"
MARKERS = ["faults", "fault", "leaves_tmp", "soak", "thorough"]


def pytest_in(folder: Path, *args: str) -> str:
    (folder / "test_inner.py").write_text(TESTS.replace("SECONDS", str(SECONDS)).replace("SHARED", SHARED))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n" + "".join(f"  {name}\n" for name in MARKERS))
    plugins = ("-p", "fault_matrix", "-p", "leftovers")
    command = [sys.executable, "-m", "pytest", *plugins, "-q", "--no-header", "-rA", *args]
    env = {"PYTHONPATH": str(Path(__file__).parent), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    return done.stdout + done.stderr


@pytest.mark.thorough
def test_leftovers_fail_their_test_and_faults_are_in_the_matrix(tmp_path: Path) -> None:
    try:
        output = pytest_in(tmp_path, "-n", "2", "-m", "faults or not faults")
    finally:
        Path("/dev/shm", SHARED).unlink(missing_ok=True)
    parts = re.findall(r"ERROR at teardown of (\w+).*?\n(.*?)(?=\n___|\n===)", output, re.DOTALL)
    left = {name.removeprefix("test_"): text for name, text in parts}
    assert left.keys() == {"fork", "orphan", "socket", "shared", "half", "last"}, output
    assert "process" in left["fork"] and f"sleep {SECONDS}" in left["orphan"] and f"sleep {SECONDS}" in left["last"]
    assert "listens at 0100007F:" in left["socket"] and SHARED in left["shared"]
    assert "step_1.tmp" in left["half"]
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if f"sleep\0{SECONDS}" in words_of(path)]

    rows = [re.sub(r" \d+\.\d \|", "", line) for line in output.splitlines()]
    assert [row for row in rows if row.startswith("| ") and "test_inner" in row] == [
        "| not here | 0 | skipped: no such machine | test_inner.py |",
        "| two kinds | 3 | FAILED in 1 of 3 tests | test_inner.py |",
        "| a half | 7 | survived to the bit | test_inner.py |",
    ]


def words_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has exited
        return ""
