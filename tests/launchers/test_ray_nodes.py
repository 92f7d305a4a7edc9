"""The parts of launcher=ray that need no cluster: its actor, the check of its nodes, and their release."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import wait_until
from custom_files import write_files
from worlds import configure

import runner.errors
from runner.distributed.environment import RankInfo
from runner.distributed.failures.signals import Stopped
from runner.errors import InputError, Preempted
from runner.launchers.launch import launch
from runner.launchers.machines import check_machines
from runner.launchers.ray.cluster import connect
from runner.launchers.ray.starter import LOST, Starter
from runner.records.ledger import read_ledger
from runner.sweeps.slot_machines import ThisMachine

READ = "import os, sys; open('started', 'w'); print(os.environ.get('OMP_NUM_THREADS'), sys.stdin.read()); sys.exit(3)"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.mark.parametrize(("env", "threads"), [({}, "None"), ({"OMP_NUM_THREADS": "4"}, "4")])
def test_a_process_receives_its_input_but_not_the_number_of_threads_of_ray(
    env: dict[str, str], threads: str, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    starter = Starter(str(tmp_path), env, silence_s=60)
    ended = pool.submit(starter.run, 0, ("-c", READ), b"a ", None)
    wait_until((tmp_path / "started").exists)
    starter.send(0, b"b ")
    starter.send(None, b"c")
    starter.send(1, b"of an earlier process")
    starter.close(0)
    assert ended.result() == (3, f"{threads} a b c\n".encode(), b"")


def test_bytes_that_arrive_early_do_not_precede_the_input(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    starter, popen = Starter(str(tmp_path), {}, silence_s=60), subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> Any:
        process = popen(*args, **kwargs)
        pipe = process.stdin

        def write(content: bytes) -> None:
            if content == b"input ":
                starter.send(None, b"heartbeat ")
                starter.send(0, b"signal ")
            pipe.write(content)

        process.stdin = SimpleNamespace(write=write, flush=pipe.flush, close=pipe.close)
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    ended = pool.submit(starter.run, 0, ("-c", READ), b"input ", None)
    wait_until((tmp_path / "started").exists)
    starter.close(0)
    assert ended.result().output == b"None input signal \n"


def test_the_output_is_appended_to_a_file(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    starter, log = Starter(str(tmp_path), {}, silence_s=60), tmp_path / "log"
    log.write_text("before\n")
    ended = pool.submit(starter.run, 0, ("-c", READ), b"", str(log))
    wait_until((tmp_path / "started").exists)
    starter.kill(0)
    assert ended.result() == (-9, b"", b"")
    assert starter.run(1, ("-c", "raise SystemExit('wrong')"), b"", str(log)).status == 1
    assert log.read_text() == "before\nwrong\n"


def test_an_agent_that_received_nothing_for_too_long_is_lost(tmp_path: Path) -> None:
    assert Starter(str(tmp_path), {}, silence_s=0).run(0, ("-c", ""), b"", None).status == LOST


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runner.errors, "find_spec", lambda package: None if package == "ray" else SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(tmp_path)
    _, request = configure("model=mlp", "parallel=ddp", "launcher=ray", "backend=gloo")
    with pytest.raises(InputError, match=r"launcher=ray needs ray; pip install 'experiment-runner\[ray\]'"):
        launch(request, RankInfo())
    assert not [*tmp_path.iterdir()]


VERSIONS = "Version mismatch: The cluster has:\n    Ray: 2.60.0\nThis process has:\n    Ray: 2.50.0\n"


@pytest.mark.parametrize(
    ("address", "variable", "error", "message"),
    [
        (
            "local",
            "",
            RuntimeError(VERSIONS),
            "=local: Version mismatch: The cluster has: Ray: 2.60.0 This process has: Ray: 2.50.0$",
        ),
        ("auto", "http://head:8265", None, "=auto .RAY_ADDRESS=http://head:8265.: the address must be HOST:PORT"),
        ("local", "", SystemExit(15), "SIGTERM"),
    ],
)
def test_a_failed_connection_names_its_reason(
    address: str, variable: str, error: BaseException | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(*args: Any, **options: Any) -> None:
        assert error is not None
        raise error

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    monkeypatch.setenv("RAY_ADDRESS", variable)
    with pytest.raises(Stopped if isinstance(error, SystemExit) else InputError, match=message):
        connect("launcher.address", address)


def test_a_signal_does_not_wait_for_machines_that_do_not_respond(tmp_path: Path) -> None:
    released, has_ended, are_daemons = threading.Event(), threading.Event(), []

    class Silent(ThisMachine):
        def find_facts(self, number: int, shared: str) -> Any:
            are_daemons.append(threading.current_thread().daemon)
            os.kill(os.getpid(), signal.SIGTERM)
            released.wait(30)
            has_ended.set()

    with pytest.raises(Preempted, match="SIGTERM"):
        check_machines(Silent(), tmp_path, [])
    assert are_daemons == [True] and not has_ended.is_set()
    released.set()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("hydra.launcher.fault=broken", "hydra.launcher.names=: broken"),
        ("launcher=spawn", "launcher.nproc_per_node=2: a job needs a slot for each rank"),
    ],
)
def test_a_sweep_that_is_refused_releases_its_machines(
    word: str, message: str, here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reserved = """\
        from pathlib import Path

        from runner.sweeps.slot_machines import ThisMachine


        class Reserved(ThisMachine):
            key = "hydra.launcher.names"

            def __init__(self, prefix, num, fault):
                self.fault = fault

            def find_facts(self, number, shared):
                return self.fault or super().find_facts(number, shared)

            def close(self):
                with Path("closed").open("a") as file:
                    file.write("closed ")
        """
    option = """\
        _target_: hydra_plugins.runner.sweeps.SlotsLauncher
        machines: reserved.Reserved
        slots: 1
        fault: null
        """
    write_files(tmp_path, {"mine/reserved.py": reserved, "mine/hydra/launcher/reserved.yaml": option})
    launcher = ("--config-dir=mine", "hydra/launcher=reserved")
    assert here("-m", *launcher, "model=mlp", "backend=gloo", "seed=0,1", word) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "closed").read_text() == "closed "


def test_the_job_of_a_lost_machine_runs_on_another_one(
    here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losable = """\
        from runner.launchers.agent_process import AgentProcess
        from runner.launchers.machines import Machine
        from runner.sweeps.slot_machines import ThisMachine


        class Losable(ThisMachine):
            key, save_s = "hydra.launcher.names", 0.5
            machines = (Machine("first", 1), Machine("second", 1))

            def __init__(self, prefix, num):
                pass

            def start(self, number, assignment, output, errors):
                if number == 0:
                    return AgentProcess(assignment, output, errors, ("sh", "-c", "exit 255"))
                return super().start(number, assignment, output, errors)

            def why_lost(self, number, status, output):
                return "it is off" if status == 255 else None
        """
    option = "_target_: hydra_plugins.runner.sweeps.SlotsLauncher\nmachines: losable.Losable\nslots: 1\n"
    write_files(tmp_path, {"mine/losable.py": losable, "mine/hydra/launcher/losable.yaml": option})
    words = ("model=mlp", "backend=gloo", "max_steps=2", "seed=0,1", "run_id=grid", "logger=none")
    assert here("-m", "--config-dir=mine", "hydra/launcher=losable", *words) == 0
    output = capsys.readouterr().out
    assert "first is lost: it is off\n" in output and "2 of 2 jobs finished" in output
    jobs = read_ledger(tmp_path / "outputs" / "run" / "grid")
    assert [(job.state, job.num_starts) for job in jobs] == [("finished", 2), ("finished", 1)]
