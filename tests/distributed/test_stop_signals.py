"""Signals: counted Ctrl-C, the terminal after SIGHUP, and signals while a rank connects."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from runner.distributed import rendezvous
from runner.distributed.failures import signals
from runner.errors import Preempted


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


def test_signal_interrupts_a_connection_to_an_unresponsive_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "TRY_S", 0.01)
    monkeypatch.setattr(rendezvous, "STOP_GRACE_S", 0.05)
    monkeypatch.setattr(rendezvous, "received", lambda: "SIGTERM")
    monkeypatch.setattr(rendezvous, "seconds_since_received", lambda: 100.0)

    def connect() -> dist.Store:
        time.sleep(3)
        return dist.HashStore()

    with pytest.raises(Preempted):
        rendezvous._connect_before(time.monotonic() + 300, connect)
