"""A rank dies or hangs: the others exit in time, and the first failure is reported once."""

import json
import os
import pickle
import re
import signal
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import wait_until
from mode_cases import tier
from ranks import exit_statuses
from worlds import MODES, configure

from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.failures import flight_recorder, shutdown, watchdog
from runner.distributed.failures.shutdown import Shutdown
from runner.distributed.world import World
from runner.distributed.world_store import WorldStore
from runner.errors import JobFailed
from runner.jobs import job
from runner.jobs.job import run_job
from runner.tasks.collectives import Collectives
from runner.training.callbacks.contract import Callbacks
from runner.training.trainer import Trainer

TINY = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=200", "logger=none", "threads=1")
# The ranks wait in sockets for the sums of BatchNorm, otherwise in gloo.
NORMALISED = {"ddp": ("model.batch_norm=true",)}
TIMEOUT_S = 60  # also for the rendezvous; failures are detected long before
HANG_TIMEOUT_S = 3
# None is being written when a rank dies.
SELDOM = ("checkpoint.every_epochs=99", "checkpoint.keep_best=0")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def read_result(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the directory of the only run, and its result, which must be a failure."""
    (path,) = (folder / "run").iterdir()
    result = json.loads((path / "result.json").read_text())
    assert result["state"] == "failed"
    return path, result


MESSAGE = "Error: the rank's own failure"


def sleep_too_long() -> None:
    time.sleep(600)


def fail() -> None:
    raise RuntimeError("the rank's own failure")


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("the rank's own failure")


def train(
    folder: Path,
    mode: str,
    world_size: int,
    victim: int,
    where: str,
    die: Callable[[], None],
    timeout_s: int = TIMEOUT_S,
) -> list[int | None]:
    """Return the ranks' exit statuses if one dies in the second epoch; None for a rank that still runs."""
    overrides = (*TINY, *SELDOM, *NORMALISED.get(mode, ()), f"parallel={mode}", f"backend.timeout_s={timeout_s}")
    config, request = configure(*overrides, f"outputs={folder}")
    owner = Callbacks if where == "on_end" else Trainer
    method = getattr(owner, where)

    def rank_of(rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)

        def act_or_die(self: Any, *args: Any) -> dict[str, float]:
            if rank == victim and where != "on_end" and self.state.step > 8:
                die()
            result = method(self, *args)
            if rank == victim and where == "on_end":
                die()
            return result

        setattr(owner, where, act_or_die)  # in this process alone
        if timeout_s == TIMEOUT_S:  # ends a loop that waits for a failed rank long before the timeout
            watchdog.QUIET_S, shutdown.PATIENCE_S = 1.0, min(shutdown.PATIENCE_S, 1.5)
        rank_info = RankInfo(rank, rank, world_size, world_size)
        world = World(rank_info, dist.FileStore(str(folder / "store"), world_size), as_backend(config.backend))
        try:
            run_job(request, world)
        except JobFailed:
            raise SystemExit(1) from None

    return exit_statuses(rank_of, world_size, range(world_size), timeout_s + 420)


WAYS = [(4, 2, "step", kill), (2, 1, "step", fail), (2, 1, "step", run_out_of_memory)]
CASES = [(mode, *way) for mode in MODES if mode not in ("none", "dp") for way in WAYS]
CASES.remove(("ps", *WAYS[0]))  # test_parameter_server.py
CASES += [("none", 1, 0, "step", die) for die in (fail, run_out_of_memory)]
# Only pipeline and fsdp communicate in an evaluation.
CASES += [("pipeline", 2, 1, "_evaluate", kill), ("fsdp", 2, 1, "_evaluate", kill)]
SLICE = [
    *(("ddp", *WAYS[0]), ("fsdp", *WAYS[1]), ("pipeline", 2, 1, "_evaluate", kill)),
    *(("none", 1, 0, "step", run_out_of_memory), ("pipeline", *WAYS[2])),
]


@pytest.mark.fault("a rank killed with -9, raising, or out of memory, in every mode", outcome="refused")
@pytest.mark.parametrize(
    ("mode", "world_size", "victim", "where", "die"),
    [pytest.param(*case, marks=tier(case in SLICE, case[0] in ("ddp", "pipeline"))) for case in CASES],
)
def test_all_ranks_exit_when_one_dies(
    mode: str,
    world_size: int,
    victim: int,
    where: str,
    die: Callable[[], None],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("runner.distributed.failures.peer_failure.PEERS_TIMEOUT_S", 1.0)
    statuses = train(tmp_path, mode, world_size, victim, where, die)
    killed = -signal.SIGKILL if die is kill else 1
    assert statuses == [killed if rank == victim else 1 for rank in range(world_size)]
    path, result = read_result(tmp_path)
    reported = "".join(capfd.readouterr())
    assert reported.count("Traceback") == (path / "log.txt").read_text().count("Traceback") == 1, reported
    if die is kill:
        assert f"no response from rank {victim} on" in result["error"]
    else:
        reason = " ran out of memory:" if die is run_out_of_memory else ":"
        assert result["error"].startswith(f"rank {victim} on {socket.gethostname()}{reason}")
        assert reported.count(MESSAGE) == 1


@pytest.mark.fault("a rank fails, dies or hangs after the last step", outcome="refused")
@pytest.mark.parametrize(
    ("mode", "victim", "die", "cause"),
    [
        ("ddp", 1, fail, MESSAGE),
        *(
            pytest.param("ddp", rank, sleep_too_long, "in on_end of the callbacks for", marks=pytest.mark.thorough)
            for rank in (0, 1)
        ),
        pytest.param("ps", 1, kill, "no response from rank 1 on", marks=pytest.mark.thorough),
    ],
)
def test_run_ends_when_all_ranks_have_ended_well(
    mode: str,
    victim: int,
    die: Callable[[], None],
    cause: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("runner.distributed.failures.peer_failure.PEERS_TIMEOUT_S", 1.0)
    statuses = train(tmp_path, mode, 3, victim, "on_end", die, HANG_TIMEOUT_S if die is sleep_too_long else TIMEOUT_S)
    assert statuses == [(1 if die is fail else -signal.SIGKILL) if rank == victim else 1 for rank in range(3)]
    path, result = read_result(tmp_path)
    assert cause in result["error"]
    reported = "".join(capfd.readouterr())
    assert reported.count(cause) == (path / "log.txt").read_text().count(cause) == 1, reported


HANGS = [("ddp", 3, 0, sleep_too_long), ("ddp", 3, 1, stop), ("pipeline", 2, 1, stop), ("ps", 3, 1, sleep_too_long)]
HANGS += [(mode, 2, 1, stop) for mode in MODES if mode not in ("none", "dp", "ddp", "pipeline", "ps")]


@pytest.mark.fault("a rank hangs", outcome="refused")
@pytest.mark.parametrize(
    ("mode", "world_size", "victim", "hang"),
    [pytest.param(*case, marks=tier(case == HANGS[0], case in HANGS[1:3])) for case in HANGS],
)
def test_hung_rank_is_named_with_its_stacks_and_killed(
    mode: str,
    world_size: int,
    victim: int,
    hang: Callable[[], None],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    statuses = train(tmp_path, mode, world_size, victim, "step", hang, HANG_TIMEOUT_S)
    assert statuses == [-signal.SIGKILL if rank == victim else 1 for rank in range(world_size)]
    path, result = read_result(tmp_path)
    kept = path / "logs" / f"rank_{victim}.stacks.txt"
    cause = result["error"].splitlines()[-1]
    assert cause.startswith(
        f"no response from rank {victim} on {socket.gethostname()} within backend.timeout_s=3: in step 9 for"
    )
    assert f"in {hang.__name__}; its stacks are in {kept}; it was killed" in cause
    assert (", stopped by a signal," in cause) == (hang is stop)
    main_thread = re.split("[Tt]hread 0x", kept.read_text())[1]
    assert f" in {hang.__name__}\n" in main_thread
    reported = "".join(capfd.readouterr())
    assert reported.count(cause) == (path / "log.txt").read_text().count(cause) == 1
    assert f"in {hang.__name__}\n" in reported
    (waiting,) = [line for line in result["error"].splitlines() if " waited for other ranks" in line][:1]
    assert " in step 1" in waiting or " in step 9" in waiting
    assert mode not in NORMALISED or ("PeerMissing: " in result["error"] and "batch_norm_over_ranks.py" in waiting)


def record_as_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let waits for gloo never time out, as those for NCCL, and read the recorder of gloo in place of NCCL's."""
    init = dist.init_process_group
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda *args, **options: init(*args, **options | {"timeout": timedelta(seconds=600)}),
    )
    monkeypatch.setattr(
        flight_recorder,
        "recorded",
        lambda: pickle.loads(torch._C._distributed_c10d._dump_fr_trace())["entries"],  # type: ignore[attr-defined]
    )


@pytest.mark.fault("a rank hangs while the others wait for their GPU", outcome="refused")
@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"), reason="this torch has no recorder of gloo"
)
def test_collective_that_a_gpu_waits_for_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record_as_for_nccl(monkeypatch)
    statuses = train(tmp_path, "fsdp", 3, 1, "step", sleep_too_long, HANG_TIMEOUT_S)
    assert statuses == [1, -signal.SIGKILL, 1]
    path, result = read_result(tmp_path)
    first, *lines = result["error"].splitlines()
    assert re.search(r"gloo:all_gather of \[\[\d+\]\] in the group \w+, called at /.+:\d+ in \w+, has not", first)
    waiting = "\n".join(line for line in lines if " waited for other ranks, in step " in line)
    assert re.search(r", at /.+:\d+ in \w+, in gloo:all_gather", waiting)
    assert f"no response from rank 1 on {socket.gethostname()}" in lines[-1]
    assert f"in sleep_too_long; its stacks are in {path / 'logs' / 'rank_1.stacks.txt'}" in lines[-1]
    assert " in sleep_too_long\n" in (path / "logs" / "rank_1.stacks.txt").read_text()
    reported = "".join(capfd.readouterr())
    assert reported.count(lines[-1]) == (path / "log.txt").read_text().count(lines[-1]) == 1, reported


@pytest.mark.fault("ranks wait for different collectives", outcome="refused")
def test_positions_are_reported_when_ranks_wait_in_different_collectives(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def wait_for_message() -> None:
        dist.recv(torch.zeros(1), src=0)

    assert train(tmp_path, "ddp", 2, 1, "step", wait_for_message, HANG_TIMEOUT_S) == [1, 1]
    error = read_result(tmp_path)[1]["error"]
    first, second = [line for line in error.splitlines() if " waited for other ranks, in step " in line]
    assert (
        first.startswith("rank 0 ")
        and second.startswith("rank 1 waited for other ranks, in step 9 for ")
        and second.endswith(" in wait_for_message")
    )
    assert "no response from" not in error
    assert "".join(capfd.readouterr()).count(second) == 1


def lose_connections_then_die() -> None:
    """Exit as a killed process does: the kernel closes its files before it has exited."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)
    time.sleep(1.0)
    kill()


@pytest.mark.fault("rank 0 and the ranks' store killed with -9 at once", outcome="refused")
def test_failure_is_reported_when_rank_0_and_the_store_die(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorldStore, "is_reachable", lambda self: False)
    assert train(tmp_path, "ddp", 3, 0, "step", lose_connections_then_die) == [-signal.SIGKILL, 1, 1]
    assert "the ranks' store" in read_result(tmp_path)[1]["error"]
    assert "".join(capfd.readouterr()).count("the ranks' store") == 1


@pytest.mark.fault("rank 0 killed with -9 while it reports a failure", outcome="refused")
def test_another_rank_reports_once_when_rank_0_dies_before_its_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Shutdown.report_failure

    def report_or_die(self: Shutdown, *args: Any) -> str:
        reported = report(self, *args)
        if self.is_reporter:
            kill()
        return reported

    monkeypatch.setattr(Shutdown, "report_failure", report_or_die)
    assert train(tmp_path, "ddp", 3, 2, "step", fail) == [-signal.SIGKILL, 1, 1]
    path, result = read_result(tmp_path)
    assert "".join(capfd.readouterr()).count(MESSAGE) == (path / "log.txt").read_text().count(MESSAGE) == 1
    assert MESSAGE in result["error"]


def test_signal_of_a_launcher_after_a_rank_died_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, request = configure("task=collectives", "threads=1", "backend.timeout_s=30", f"outputs={tmp_path}")

    def run(self: Collectives, config: Any, experiment: Any, world: World, *args: Any) -> dict[str, float]:
        if world.rank == 1:
            kill()
        while not world.local_ranks.exited():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(100)
        return {}

    def rank_of(rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(str(tmp_path / "store"), 2)
        try:
            run_job(request, World(RankInfo(rank, rank, 2, 2), store, as_backend(config.backend)))
        except JobFailed:
            raise SystemExit(1) from None

    monkeypatch.setattr(Collectives, "run", run)
    assert exit_statuses(rank_of, 2, range(2), 120) == [1, -signal.SIGKILL]
    error = read_result(tmp_path)[1]["error"]
    assert "ended by SIGTERM" in error and f"no response from rank 1 on {socket.gethostname()}" in error


@pytest.mark.parametrize("victim", [0, 1])
def test_rank_that_hangs_while_building_is_named_once(
    victim: int, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.distributed.store_consensus.REPORT_TIMEOUT_S", 1.0)
    config, request = configure(*TINY, "parallel=ddp", "backend.timeout_s=2", f"outputs={tmp_path}")
    healthy, build = {0, 1, 2} - {victim}, job.build

    def build_together(rank: int, *args: Any) -> Any:
        """One that is late by the time-out would be named, too."""
        built = build(*args)
        (tmp_path / f"built-{rank}").touch()
        wait_until(lambda: all((tmp_path / f"built-{each}").exists() for each in healthy))
        return built

    def rank_of(rank: int) -> None:
        # In this process alone.
        monkeypatch.setattr(
            job, "build", lambda *args: sleep_too_long() if rank == victim else build_together(rank, *args)
        )
        store = dist.FileStore(str(tmp_path / "store"), 3)
        world = World(RankInfo(rank, rank, 3, 3), store, as_backend(config.backend))
        try:
            run_job(request, world)
        except JobFailed as error:
            world.shutdown.report_before_exit(lambda: None)
            raise SystemExit(1 if "building its model and data" in str(error) else 2) from None

    assert exit_statuses(rank_of, 3, healthy, 120) == [1, 1]
    reported = capfd.readouterr().err
    line = f"rank {victim} of 3 did not finish building its model and data within backend.timeout_s=2 s"
    assert reported.splitlines().count(line) == 1 and "Traceback" not in reported
