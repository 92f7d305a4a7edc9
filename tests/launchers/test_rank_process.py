"""Signals that a launcher forwards to its ranks."""

import multiprocessing
import os
import signal
import time
from multiprocessing.synchronize import Event

import pytest

from runner.distributed.failures import signals
from runner.launchers.rank_process import forwarding_signals


def ignore_signals(is_ready: Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    is_ready.set()
    time.sleep(100)


def test_a_second_ctrl_c_kills_ranks_that_do_not_exit_but_not_the_callers_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signals, "EXIT_DELAY_S", 0.2)
    context, handler = multiprocessing.get_context("fork"), signal.getsignal(signal.SIGINT)
    events = [context.Event(), context.Event()]
    callers, rank = (context.Process(target=ignore_signals, args=(event,)) for event in events)
    callers.start()
    try:
        with pytest.raises(KeyboardInterrupt), forwarding_signals(is_embedded=True) as received:
            rank.start()
            assert all(event.wait(60) for event in events)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
            assert received == ["SIGINT"] and rank.is_alive(), "it may save without a time limit"
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        rank.join(60)
        assert rank.exitcode == -signal.SIGKILL
        assert callers.is_alive()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        for process in (callers, rank):
            process.kill()
            process.join()
