"""Processes on this machine, started by the runner itself with torch.multiprocessing."""

import multiprocessing
import os
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from runner.backend import as_backend
from runner.config import Config, InputError
from runner.job import JobFailed, run_job
from runner.launchers.env import Place
from runner.run_dir import Request
from runner.signals import ASKING
from runner.train import Preempted
from runner.world import join

Outcome = dict[str, Any]
END_TIMEOUT_S = 15.0  # for the other ranks, once one has died


class Spawn:
    """launcher=spawn: nproc_per_node processes; the store is served by this one, on loopback, on a free port."""

    starts_processes = True

    def __init__(self, nproc_per_node: int = 2):
        if nproc_per_node < 1:
            raise ValueError(f"launcher.nproc_per_node={nproc_per_node} must be at least 1; try 2")
        self.nproc_per_node = nproc_per_node

    def launch(self, config: Config, request: Request, place: Place) -> dict[str, float]:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        # Given a listening socket, the store keeps to loopback; asked for a port, it listens on every interface.
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        places = [
            Place(
                rank=rank,
                local_rank=rank,
                world_size=self.nproc_per_node,
                local_world_size=self.nproc_per_node,
                found="spawn",
                master_addr="127.0.0.1",
                master_port=port,
            )
            for rank in range(self.nproc_per_node)
        ]
        # A fork server imports torch once for all ranks of all jobs, and unlike a plain fork it has used no GPU.
        multiprocessing.set_forkserver_preload(["torch._dynamo", "runner.launchers.spawn"])
        context = mp.get_context("forkserver")
        ours, theirs = context.Pipe(duplex=False)
        processes = [
            context.Process(target=_run_rank, args=(config, request, place, theirs if place.rank == 0 else None))
            for place in places
        ]
        for process in processes:
            process.start()
        theirs.close()
        outcome, died = _watch(processes, ours)
        del store  # it has served until here
        if died and "metrics" not in (outcome or {}):
            # A killed rank has said nothing, and rank 0 at most that it misses it.
            print(died, file=sys.stderr, flush=True)
        return _conclude(outcome, died)


def _run_rank(config: Config, request: Request, place: Place, parent: Connection | None) -> None:
    """One rank's process; rank 0 tells the parent how the job ended."""
    os.environ |= {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
    }
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    world = join(place, as_backend(config.backend))
    outcome: Outcome
    try:
        outcome = {"metrics": run_job(config, request, world)}
    except InputError as error:
        outcome = {"refused": error.messages}
    except Preempted as error:
        outcome = {"preempted": str(error)}
    except JobFailed as error:
        outcome = {"failed": str(error)}
    if parent is not None:
        parent.send(outcome)
    world.close()


def _watch(processes: list[Any], from_rank_0: Connection) -> tuple[Outcome | None, str | None]:
    """Wait until all have ended, passing signals on. Returns what rank 0 said, and which rank died of what."""

    def pass_on(number: int, frame: object) -> None:
        # A terminal's Ctrl-C has reached the ranks by itself; as a SIGTERM it is not counted as a second one.
        for process in processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGTERM if number == signal.SIGINT else number)

    before = {number: signal.signal(number, pass_on) for number in ASKING}
    outcome, died, deadline, speaks = None, None, float("inf"), [from_rank_0]
    try:
        while alive := [process for process in processes if process.is_alive()]:
            ready = wait(
                [*(process.sentinel for process in alive), *speaks],
                timeout=min(max(deadline - time.monotonic(), 0), 60.0),
            )
            if from_rank_0 in ready:
                outcome, speaks = _hear(from_rank_0), []
            dead = [rank for rank, process in enumerate(processes) if process.exitcode]
            if dead and died is None:
                code = processes[dead[0]].exitcode
                died = f"rank {dead[0]} died: " + (signal.Signals(-code).name if code < 0 else f"exit status {code}")
                deadline = time.monotonic() + END_TIMEOUT_S
            if time.monotonic() > deadline:
                for process in alive:
                    process.kill()
        for process in processes:
            process.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return outcome or (_hear(from_rank_0) if speaks and from_rank_0.poll() else None), died


def _hear(connection: Connection) -> Outcome | None:
    try:
        return connection.recv()
    except EOFError:  # the rank ended without a word
        return None


def _conclude(outcome: Outcome | None, died: str | None) -> dict[str, float]:
    if outcome is None:
        raise JobFailed(died or "rank 0 ended without a word")
    if "refused" in outcome:
        raise InputError(*outcome["refused"])
    if "preempted" in outcome:
        raise Preempted(outcome["preempted"])
    if "failed" in outcome:
        raise JobFailed(outcome["failed"])
    return outcome["metrics"]


def _loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
