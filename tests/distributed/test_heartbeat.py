"""A rank's heartbeat and stacks, as other ranks read them."""

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

from runner.distributed.failures.heartbeat import Heartbeat, read_stacks, state_of


def test_heartbeat_without_proc_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "read_text", refuse)
    trace = Heartbeat(1)
    process = trace.start()
    trace.record("step 12")
    assert (process.rank, process.position_file) == (1, -1)
    assert trace.last() == ("", 0.0) and trace.own_stacks() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="stacks are read through /proc")
def test_stopped_process_writes_the_stacks_of_its_stop() -> None:
    """Its main thread has not continued by then, whichever of its threads wakes first."""

    def wake_often() -> None:
        while True:
            time.sleep(0.0001)

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def child(sender: Connection) -> None:
        sender.send(Heartbeat(0).start())
        for _ in range(8):
            threading.Thread(target=wake_often, daemon=True).start()
        while True:
            stop()
            time.sleep(0.5)  # if it continued first, this would show it

    def wait_until(happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not happened():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=child, args=(sender,))
    process.start()
    try:
        trace = receiver.recv()
        for _ in range(5):
            wait_until(lambda: state_of(trace) == "stopped")
            stacks = read_stacks(trace, 60)
            (main_thread,) = [part for part in stacks.split("\n\n") if " in child\n" in part]
            assert main_thread.splitlines()[1].endswith(" in stop")
    finally:
        process.kill()
        process.join()
        receiver.close()
        sender.close()
