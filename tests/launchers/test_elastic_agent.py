"""torch's agent on one node or two, with ranks that do nothing but reach a checkpoint and end."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from commands import free_port, wait_until
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from runner.launchers.elastic_agent import Agent, counting_from_checkpoints
from runner.launchers.restarts import Told

DIED = f"on {socket.gethostname()} died: SIGKILL"


KILLED, CRASHED = signal.SIGKILL, signal.SIGSEGV
End = tuple[int, signal.Signals]  # the step of the checkpoint that a start has come to, and what it dies of


def reach_and_die(folder: str, ends: list[End]) -> None:
    """A rank's part; where they have run out, the start is the last one and ends well."""
    rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    Path(folder, f"start_{rank}_{start}").touch()
    if start < len(ends):
        step, number = ends[start]
        checkpoint = Path(folder, "checkpoints", f"step_{step}")
        if rank == 0:
            checkpoint.mkdir(parents=True, exist_ok=True)
        # By another's death the agents end this rank too, wherever it is.
        wait_until(lambda: checkpoint.exists() and Path(folder, f"start_0_{start}").exists())
        os.kill(os.getpid(), number)


def wait_or_die(folder: str, ends: list[End]) -> None:
    """A rank 0 that is lost by no agent, and ended by its own where the other one's has died."""
    if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        Path(folder, "checkpoints", f"step_{ends[0][0]}").mkdir(parents=True)
        Path(folder, "start_0_0").touch()
        time.sleep(600)
    reach_and_die(folder, ends)


def launch(
    folder: Path, ends: list[End], max_restarts: int, nodes: int, part: Callable[..., None] = reach_and_die
) -> list[int | None]:
    """Their exit statuses: 0, or 3 where torch has told of a failed rank, or that the rendezvous was closed."""
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=1,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{free_port()}",
        max_restarts=max_restarts,
        monitor_interval=0.05,
        start_method="fork",
        local_addr="localhost",
    )

    def agent() -> None:
        try:
            with counting_from_checkpoints(Told(lambda: str(folder))):
                elastic_launch(config, part)(str(folder), ends)
        except (ChildFailedError, RendezvousError):
            sys.exit(3)

    agents = [get_context("fork").Process(target=agent) for _ in range(nodes)]
    try:
        for each in agents:
            each.start()
        for each in agents:
            each.join(300)
        return [each.exitcode for each in agents]
    finally:
        for each in agents:
            each.kill()
            each.join()


@pytest.mark.parametrize(
    ("ends", "max_restarts", "starts", "told"),
    [
        ([(step, KILLED) for step in (3, 5, 7)], 1, 4, f"rank 0 {DIED}: started again, from step 7"),
        (
            [(3, KILLED), (5, KILLED), (5, KILLED), (5, KILLED)],
            3,
            3,
            "not started again: it has failed twice in the same way, and got no further than step 5",
        ),
        (
            [(3, KILLED), (3, CRASHED), (3, KILLED)],
            1,
            2,
            "not started again: launcher.max_restarts=1, and it got no further than step 3",
        ),
        ([(3, KILLED)], 0, 1, None),
    ],
)
def test_restarts_are_counted_from_each_checkpoint(
    ends: list[End],
    max_restarts: int,
    starts: int,
    told: str | None,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert launch(tmp_path, ends, max_restarts, nodes=1) == [0 if starts > len(ends) else 3]
    assert len(list(tmp_path.glob("start_0_*"))) == starts
    said = [line for line in capfd.readouterr().err.splitlines() if "started again" in line]
    assert said[-1:] == ([told] if told else [])


def test_a_start_gets_on_from_where_all_began_though_one_agent_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of the other one have made their checkpoint by then."""
    start = Agent._start_workers

    def start_late(self: Agent, group: Any) -> dict[int, Any]:
        if group.group_rank == 1:
            made = tmp_path / "checkpoints" / f"step_{3 if not self._restarts._starts else 5}"
            wait_until(made.exists)
        return start(self, group)

    monkeypatch.setattr(Agent, "_start_workers", start_late)
    assert launch(tmp_path, [(3, KILLED), (5, KILLED)], 3, nodes=2) == [0, 0]
    assert len(list(tmp_path.glob("start_0_*"))) == 3


@pytest.mark.parametrize("ends", [[(3, KILLED), (5, KILLED)], [(3, KILLED)] * 4])
def test_the_agents_of_two_nodes_go_on_and_end_together(ends: list[End], tmp_path: Path) -> None:
    goes_on = len(ends) == 2
    assert launch(tmp_path, ends, 3, nodes=2) == ([0, 0] if goes_on else [3, 3])
    assert len(list(tmp_path.glob("start_0_*"))) == (3 if goes_on else 2)


def test_starts_have_the_same_number_on_both_nodes_though_one_has_lost_no_rank(tmp_path: Path) -> None:
    assert launch(tmp_path, [(3, KILLED)], 3, nodes=2, part=wait_or_die) == [0, 0]
    begun = sorted(path.name for path in tmp_path.glob("start_*"))
    assert begun == ["start_0_0", "start_0_1", "start_1_0", "start_1_1"]
