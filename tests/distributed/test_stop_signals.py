"""Signals: counted Ctrl-C, and the terminal after SIGHUP."""

import os
import signal

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
        signals._count_interrupts(read_end)
    finally:
        os.close(read_end)
        os.close(write_end)
    assert len(lookups) == 4


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
