"""What the launchers that start processes share."""

import os
import signal
import subprocess
import sys
import time

import pytest

from runner.launchers import rank_process
from runner.launchers.rank_process import passing_signals_on

DEAF = """
import signal, time
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
print(flush=True)
time.sleep(100)
"""


class Deaf:
    """A rank that does not end when it is asked to."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.pid, self.kill = self.process.pid, self.process.kill

    def is_alive(self) -> bool:
        return self.process.poll() is None


def test_a_guests_second_ctrl_c_ends_ranks_that_do_not_answer_and_not_the_process(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_process, "LAST_WORD_S", 0.2)
    rank, handler = Deaf(), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), passing_signals_on(lambda: [rank], is_guest=True) as received:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        assert received == ["SIGINT"] and rank.is_alive(), "it may save for as long as it takes"
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    assert rank.process.wait(60) == -signal.SIGKILL
    assert signal.getsignal(signal.SIGINT) is handler
    assert "the ranks did not end in time" in capfd.readouterr().err
    assert rank.process.stdout is not None
    rank.process.stdout.close()
