"""Which Ctrl-C counts, whose terminal is dropped, and how soon a signal is heard while a rank connects."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from runner.distributed import rendezvous, signals
from runner.errors import Preempted


def test_only_a_ctrl_c_that_the_runner_itself_answers_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a debugger's, nor one that a launcher passes on to its ranks."""
    asked: list[object] = []
    handlers = [signal.default_int_handler, signal.default_int_handler, signals._receive, signals._receive]

    def handler_of(number: int) -> object:
        asked.append(number)
        return handlers[len(asked) - 1]

    monkeypatch.setattr(signal, "getsignal", handler_of)
    monkeypatch.setattr(signals, "_end_late", lambda: None)
    heard, tells = os.pipe()
    try:
        os.write(tells, bytes([signal.SIGINT] * 4))
        signals._count(heard)
    finally:
        os.close(heard)
        os.close(tells)
    assert len(asked) == 4


def test_a_guests_terminal_stays_its_own_after_it_has_hung_up(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[int] = []
    monkeypatch.setattr(os, "isatty", lambda stream: True)
    monkeypatch.setattr(os, "dup2", lambda source, stream: dropped.append(stream))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and stays so
    try:
        with signals.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received() == "SIGHUP"
    finally:
        signal.signal(signal.SIGHUP, before)
    assert dropped == []


def test_a_signal_is_heard_while_who_is_connected_to_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "TRY_S", 0.01)
    monkeypatch.setattr(rendezvous, "TOLD_S", 0.05)
    monkeypatch.setattr(rendezvous, "received", lambda: "SIGTERM")
    monkeypatch.setattr(rendezvous, "seconds_since", lambda: 100.0)

    def connect() -> dist.Store:
        time.sleep(3)
        return dist.HashStore()

    with pytest.raises(Preempted):
        rendezvous._made_before(time.monotonic() + 300, connect)
