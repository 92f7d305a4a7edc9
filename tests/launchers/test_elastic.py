"""Restarts by torch's elastic agent, on one machine and two, with ranks that only reach a checkpoint and die."""

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

import pytest
from commands import free_port
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters

from runner.distributed.failures.hung_ranks import KILLED
from runner.distributed.failures.signals import PREEMPTED
from runner.errors import JobFailed, Preempted
from runner.launchers import node_rendezvous
from runner.launchers.elastic import Ranks, refusal, reported_failure, run_worlds
from runner.launchers.node_rendezvous import Nodes, OneMachine
from runner.launchers.rank_process import FAILURE_REPORTED
from runner.records.run_directory import Destination
from runner.records.run_record import RunRecord, find_run, result_mtime_ns

HOST = socket.gethostname()
DIED = f"rank 0 on {HOST} died: SIGKILL"
RANK_1_DIED = "rank 1 on here died: SIGKILL"
SIGKILL = signal.SIGKILL
End = tuple[int, signal.Signals]  # the step of the checkpoint that a start reaches, and the signal that kills it

# Once `ends` are used up, the start is the last one and succeeds. Rank 0 makes the checkpoints.
RANK = """\
import json, os, sys, time
from pathlib import Path

folder, ends, waits = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
rank = int(os.environ["RANK"])
start = len(list(folder.glob(f"start_{rank}_*")))
(folder / f"start_{rank}_{start}").touch()
if start < len(ends):
    step, number = ends[start]
    checkpoint = folder / "checkpoints" / f"step_{step}"
    if rank == 0:
        checkpoint.mkdir(parents=True, exist_ok=True)
    while not (checkpoint.exists() and (folder / f"start_0_{start}").exists()):
        time.sleep(0.01)
    if rank == 0 and waits:
        time.sleep(600)
    os.kill(os.getpid(), number)
"""


def ranks_of(folder: Path, ends: Sequence[End], rank_0_waits: bool = False) -> Ranks:
    return Ranks(1, sys.executable, ("-c", RANK, str(folder), json.dumps(ends), json.dumps(rank_0_waits)))


def launch_on_two(folder: Path, ends: Sequence[End], max_restarts: int, rank_0_waits: bool = False) -> list[int | None]:
    """Return the exit statuses of two agents: 0, or 3 for a failed rank or a closed rendezvous."""
    endpoint = f"localhost:{free_port()}"

    def agent(is_host: bool) -> None:
        parameters = RendezvousParameters(
            "c10d", endpoint, "test", 2, 2, "localhost", join_timeout=60, last_call_timeout=1, is_host=is_host
        )
        try:
            ranks = ranks_of(folder, ends, rank_0_waits)
            run_worlds(Nodes(parameters), ranks, Destination(directory=str(folder)), max_restarts, [])
        except (JobFailed, RendezvousError):
            sys.exit(3)

    agents = [get_context("fork").Process(target=agent, args=(is_host,)) for is_host in (True, False)]
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
    ("ends", "num_starts", "last_line"),
    [
        ([(step, SIGKILL) for step in (3, 5, 7)], 4, f"{DIED}: restarted from step 7"),
        (
            [(3, SIGKILL), (5, SIGKILL), (5, SIGKILL)],
            3,
            "not restarted: it failed twice in the same way, without getting beyond step 5",
        ),
    ],
)
def test_restarts_are_counted_from_each_checkpoint(
    ends: list[End], num_starts: int, last_line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks, max_restarts = ranks_of(tmp_path, ends), 1 if num_starts > len(ends) else 3
    with pytest.raises(JobFailed) if max_restarts == 3 else nullcontext() as error:
        run_worlds(OneMachine(60), ranks, Destination(directory=str(tmp_path)), max_restarts, [])
    assert error is None or str(error.value) == f"{DIED}\n{last_line}"
    assert len(list(tmp_path.glob("start_0_*"))) == num_starts
    assert [line for line in capfd.readouterr().err.splitlines() if "restarted" in line][-1] == last_line


@pytest.mark.thorough
@pytest.mark.fault("a rank that calls os._exit(0)", outcome="refused")
def test_rank_that_exits_with_status_0_has_failed_and_the_failure_is_recorded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    RunRecord(tmp_path).save()
    try:
        with pytest.raises(JobFailed, match=f"rank 0 on {HOST} died: exit status 0"):
            run_worlds(OneMachine(60), Ranks(1, os._exit, (0,)), Destination(directory=str(tmp_path)), 0, [])
    finally:
        server: Any = forkserver._forkserver
        os.kill(server._forkserver_pid, SIGKILL)
        server._stop()
    line = f"rank 0 on {HOST} died: exit status 0"
    assert f"error: {line}\n" in capfd.readouterr().err
    run = find_run(tmp_path)
    assert (run.state, run.error) == ("failed", line)


@pytest.mark.thorough
def test_two_agents_restart_and_give_up_together(tmp_path: Path) -> None:
    assert launch_on_two(tmp_path, [(3, SIGKILL)] * 4, 3) == [3, 3]
    assert len(list(tmp_path.glob("start_0_*"))) == 2


@pytest.mark.thorough
def test_an_agent_restarts_ranks_that_do_not_notice_a_failure_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_rendezvous, "END_TIMEOUT_S", 1.0)
    assert launch_on_two(tmp_path, [(3, SIGKILL)], 3, rank_0_waits=True) == [0, 0]
    starts = sorted(path.name for path in tmp_path.glob("start_*"))
    assert starts == ["start_0_0", "start_0_1", "start_1_0", "start_1_1"]


REPORTS = """\
import json, os, sys
from pathlib import Path

if sys.argv[2]:
    Path(sys.argv[1], "result.json").write_text(json.dumps({"state": "failed", "error": sys.argv[2]}))
status = int(sys.argv[3])
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""
HUNG = f"rank 0 on here:\nno word from rank 1 on here, it hangs at this line; {KILLED}"


def run_and_report(directory: Path, status: int, report: str, received: Sequence[str] = ()) -> None:
    ranks = Ranks(1, sys.executable, ("-c", REPORTS, str(directory), report, str(status)))
    run_worlds(OneMachine(60), ranks, Destination(directory=str(directory)), 0, received)


@pytest.mark.parametrize(
    ("status", "report", "error"),
    [
        (FAILURE_REPORTED, "", "a rank has reported the reason above"),
        (-SIGKILL, HUNG, HUNG),
        (1, "a loss", "a loss"),
        (3, "", f"rank 0 on {HOST} died: exit status 3"),
        (-SIGKILL, "a loss", DIED),
    ],
)
def test_the_reported_failure_is_the_cause_unless_the_rank_died(
    status: int, report: str, error: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The agent only sees the exit status of a rank that has reported its failure or was terminated by the others."""
    with pytest.raises(JobFailed) as raised:
        run_and_report(tmp_path, status, report)
    assert str(raised.value) == error
    assert capfd.readouterr().err == (f"error: {error}\n" if "died" in error else "")


def test_a_stopped_rank_has_not_failed(tmp_path: Path) -> None:
    with pytest.raises(Preempted, match="SIGTERM"):
        run_and_report(tmp_path, -signal.SIGTERM, "", ["SIGTERM"])
    with pytest.raises(Preempted):
        run_and_report(tmp_path, PREEMPTED, "")


@pytest.mark.parametrize(
    ("failures", "step", "max_restarts", "reason"),
    [
        ([RANK_1_DIED, "rank 0 on here died: SIGSEGV"], 12, 2, None),
        ([RANK_1_DIED], 5, 0, "max_restarts=0 reached, without getting beyond step 5"),
        ([RANK_1_DIED, "rank 0 on here died: SIGKILL"], 5, 1, "max_restarts=1 reached, without getting beyond step 5"),
        ([RANK_1_DIED, RANK_1_DIED], 0, 3, "failed twice in the same way, without getting beyond the beginning"),
    ],
)
def test_a_world_is_restarted_unless_it_fails_in_the_same_way(
    failures: Sequence[str], step: int, max_restarts: int, reason: str | None
) -> None:
    found = refusal(failures, step, max_restarts)
    assert found is None if reason is None else reason in (found or "")


def test_the_same_failure_may_be_reported_by_another_rank_and_other_failures_may_end_in_the_same_line() -> None:
    def failure(rank: int, error: str, pid: int) -> str:
        calls = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'
        silent = f"no response from rank 3 on here: its process {pid} has exited"
        return f"rank {rank} on here:\n{calls}RuntimeError: {error}\nFor debugging, see there\n{silent}"

    first, again, other = failure(0, "out of range", 7), failure(1, "out of range", 8), failure(0, "uncorrectable", 9)
    assert "twice in the same way" in (refusal([first, again], 5, 9) or "")
    assert refusal([first, other], 5, 9) is None


def test_only_the_newest_start_is_reported(tmp_path: Path) -> None:
    before = result_mtime_ns(tmp_path)
    assert reported_failure(None, before) == reported_failure(str(tmp_path), before) == ""
    (tmp_path / "result.json").write_text(json.dumps({"state": "failed", "error": "of the first"}))
    assert reported_failure(str(tmp_path), before) == "of the first"
    assert reported_failure(str(tmp_path), result_mtime_ns(tmp_path)) == ""
