"""Signals: counted Ctrl-C, and the terminal after SIGHUP."""

import os
import signal
import threading

import pytest

from runner.distributed.failures import signals


def test_only_own_handlers_count_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """A debugger's, or one that a launcher passes on to its ranks, does not count."""
    lookups: list[object] = []
    handlers = [signal.default_int_handler, signal.default_int_handler, signals._handle, signals._handle]

    def handler_of(number: int) -> object:
        lookups.append(number)
        return handlers[len(lookups) - 1]

    monkeypatch.setattr(signal, "getsignal", handler_of)
    monkeypatch.setattr(signals, "_exit_interrupted", lambda: None)
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, bytes([signal.SIGINT] * 4))
        signals._watch_signals(read_end)
    finally:
        os.close(read_end)
        os.close(write_end)
    assert len(lookups) == 4


def test_a_rank_exits_after_a_signal_if_its_start_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its main thread may wait for another rank in C++, where Python calls no handler."""
    statuses: list[int] = []
    monkeypatch.setattr(signals, "START_GRACE_S", 0.0)
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setattr(signals._state, "is_starting", True)
    monkeypatch.setattr(signals, "_exit_interrupted", lambda: None)
    monkeypatch.setattr(signal, "getsignal", lambda number: signals._handle)
    read_end, write_end = os.pipe()
    os.write(write_end, bytes([signal.SIGTERM, signal.SIGINT, signal.SIGINT]))
    signals._watch_signals(read_end)
    os.close(read_end)
    os.close(write_end)
    for timer in [each for each in threading.enumerate() if isinstance(each, threading.Timer)]:
        timer.join(60)
    assert set(statuses) == {signals.PREEMPTED}


def test_deferred_signals_are_handled_at_the_end() -> None:
    arrived: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: arrived.append(number))
    try:
        with signals.signals_deferred():
            os.kill(os.getpid(), signal.SIGUSR1)
            assert arrived == []
        assert arrived == [signal.SIGUSR1]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert arrived == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_embedded_run_keeps_the_callers_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[int] = []
    monkeypatch.setattr(os, "isatty", lambda stream: True)
    monkeypatch.setattr(os, "dup2", lambda source, stream: dropped.append(stream))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and stays so
    try:
        with signals.handling_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received() == "SIGHUP"
    finally:
        signal.signal(signal.SIGHUP, before)
    assert dropped == []
