"""Exit of a process while one of its threads waits for a store whose server is killed."""

import signal
import subprocess
import sys

import pytest
from commands import free_port

CODE = """\
import os, signal, sys, time
from datetime import timedelta

import torch.distributed as dist

import runner.__main__ as entry
import runner.cli
from runner.distributed.failures.daemon_threads import call_with_timeout

PORT = int(sys.argv[1])


def store(serves):
    return dist.TCPStore("127.0.0.1", PORT, None, serves, timedelta(seconds=60), wait_for_workers=False)


server = os.fork()
if server == 0:
    served = store(True)
    time.sleep(600)
    os._exit(0)
ready, tell = os.pipe()
if os.fork() == 0:  # before there is a thread that could hold a lock
    os.close(tell)
    os.read(ready, 1)  # or the other has ended
    time.sleep(0.1)
    os.kill(server, signal.SIGKILL)
    os._exit(0)
asked = store(False)
asked.set("there", "")
os.kill(server, signal.SIGSTOP)
os.waitpid(server, os.WUNTRACED)  # until all its threads have stopped
assert call_with_timeout(0.2, lambda: asked.check(["any"])) is None
os.write(tell, b"x")
runner.cli.main = lambda: 1
sys.exit(entry.main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks beside torch's threads")
def test_process_with_a_waiting_thread_exits_with_its_own_status() -> None:
    args = [sys.executable, "-c", CODE, str(free_port())]
    done = subprocess.run(args, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, f"{signal.Signals(-done.returncode).name}: {done.stderr}"
    assert "terminate called" not in done.stderr
