"""What a rank keeps of itself for the others."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from runner.distributed.rank_trace import RankTrace, state_of, take_stacks


def test_a_system_that_does_not_say_which_it_is_leaves_a_rank_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "read_text", refuse)
    trace = RankTrace(1)
    process = trace.open()
    trace.at("step 12")
    assert (process.rank, process.page) == (1, -1)
    assert trace.where() == ("", 0.0) and trace.own_stacks() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="stacks are read through /proc")
def test_a_stopped_process_answers_with_where_it_was_stopped() -> None:
    """Whichever of its threads wakes first, its main thread has not gone on by then."""

    def wake_often() -> None:
        while True:
            time.sleep(0.0001)

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def child(tells: Connection) -> None:
        tells.send(RankTrace(0).open())
        for _ in range(8):
            threading.Thread(target=wake_often, daemon=True).start()
        while True:
            stop()
            time.sleep(0.5)  # were it to go on first, it would be seen here

    def wait_until(happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not happened():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    hears, tells = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=child, args=(tells,))
    process.start()
    try:
        trace = hears.recv()
        for _ in range(5):
            wait_until(lambda: state_of(trace) == "stopped")
            stacks = take_stacks(trace, 60)
            (main_thread,) = [part for part in stacks.split("\n\n") if " in child\n" in part]
            assert main_thread.splitlines()[1].endswith(" in stop")
    finally:
        process.kill()
        process.join()
        hears.close()
        tells.close()
