"""A run on two machines, whose agents are forks of the tests' process, with ranks that only exit."""

import sys
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import IO

import pytest
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from worlds import configure

from runner.distributed.failures.signals import PREEMPTED
from runner.distributed.rendezvous import serve_store
from runner.errors import JobFailed, Preempted
from runner.launchers.agent import Assignment
from runner.launchers.elastic import Ranks, run_worlds
from runner.launchers.machine_run import AgentWorld, run_on_machines
from runner.launchers.machines import Agent, Machine, Machines
from runner.launchers.node_rendezvous import Nodes
from runner.launchers.torchrun import Torchrun
from runner.records.run_directory import Destination
from runner.records.run_record import RunRecord

LOST = 255
# Ranks save and exit in the first `num` starts, and finish in the next one.
RANK = """\
import os, sys
from pathlib import Path

folder, num, rank = Path(sys.argv[1]), int(sys.argv[2]), os.environ["RANK"]
start = len([*folder.glob(f"start_{rank}_*")])
(folder / f"start_{rank}_{start}").touch()
sys.exit(143 if start < num else 0)
"""


class Fork:
    """An agent in a fork. is_cut_off: its connection is lost, which is why its ranks save."""

    def __init__(self, run: Callable[[], None], is_cut_off: bool):
        self._process, self._is_cut_off = get_context("fork").Process(target=run), is_cut_off
        self._process.start()

    @property
    def status(self) -> int | None:
        return LOST if self._is_cut_off and self._process.exitcode == PREEMPTED else self._process.exitcode

    def send_signal(self, number: int) -> None:
        self._process.kill()

    def close(self) -> None:
        pass

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class Forks(Machines):
    """Two machines, of which the connection to the second one is lost `num_losses` times."""

    key, save_s = "launcher.names", 60.0
    machines = (Machine("first", 1), Machine("second", 1))

    def __init__(self, folder: Path, num_losses: int):
        self._ranks = Ranks(1, sys.executable, ("-c", RANK, str(folder), str(num_losses)))

    def find_facts(self, number: int, shared: str) -> str:
        return "not called"

    def start(self, number: int, assignment: Assignment, output: IO[bytes] | int, errors: IO[bytes] | int) -> Agent:
        assert isinstance(assignment.launcher, Torchrun)
        RunRecord(Path(assignment.request.destination.directory or "")).save()
        return Fork(partial(self._run, assignment.launcher, assignment.request.destination), number == 1)

    def why_lost(self, number: int, status: int, output: str) -> str | None:
        return "no heartbeats" if status == LOST else None

    def _run(self, launcher: Torchrun, destination: Destination) -> None:
        endpoint = f"{launcher.host}:{launcher.port}"
        parameters = RendezvousParameters(
            "c10d", endpoint, launcher.rdzv_id, 2, 2, "localhost", join_timeout=60, last_call_timeout=1, is_host=False
        )
        try:
            run_worlds(Nodes(parameters, node_rank=launcher.node_rank), self._ranks, destination, 0, [])
        except Preempted:
            sys.exit(PREEMPTED)
        except RendezvousError:
            sys.exit(2)


@pytest.mark.parametrize("num_losses", [1, 2])
def test_the_run_starts_again_after_each_lost_connection_up_to_a_limit(
    num_losses: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, request = configure("model=mlp", "backend=gloo", "max_steps=1", f"outputs={tmp_path}")
    store = serve_store("localhost", 0, loopback=True, timeout_s=60)  # is not lost with the agents
    world = AgentWorld("ray", f"localhost:{store.port}", 2, max_restarts=1, join_timeout_s=60, host=None)
    if num_losses == 1:
        run_on_machines(Forks(tmp_path, num_losses), world, request)
    else:
        with pytest.raises(JobFailed, match=r"^second is lost: no heartbeats; resume=\S+ continues the run$"):
            run_on_machines(Forks(tmp_path, num_losses), world, request)
    assert len([*tmp_path.glob("start_0_*")]) == len([*tmp_path.glob("start_1_*")]) == 2
    assert capfd.readouterr().err.count("second is lost: no heartbeats\n") == num_losses
