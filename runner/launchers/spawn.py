"""Processes on this machine, started by the runner itself with torch.multiprocessing."""

import json
import multiprocessing
import os
import signal
import socket
import time
from datetime import timedelta
from multiprocessing.connection import wait
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
        processes = [
            mp.get_context("forkserver").Process(target=_run_rank, args=(config, request, place)) for place in places
        ]
        for process in processes:
            process.start()
        died = _watch(processes)
        return _outcome(store, died)


def _run_rank(config: Config, request: Request, place: Place) -> None:
    """One rank's process; how the job ended goes to the parent by the store."""
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
    outcome: dict[str, Any]
    try:
        outcome = {"metrics": run_job(config, request, world)}
    except InputError as error:
        outcome = {"refused": error.messages}
    except Preempted as error:
        outcome = {"preempted": str(error)}
    except JobFailed as error:
        outcome = {"failed": str(error)}
    world.conclude(json.dumps(outcome))
    world.close()


def _watch(processes: list[Any]) -> str | None:
    """Wait until all have ended, passing signals on. Returns which one died of what, if one did."""

    def pass_on(number: int, frame: object) -> None:
        # A terminal's Ctrl-C has reached the ranks by itself; as a SIGTERM it is not counted as a second one.
        for process in processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGTERM if number == signal.SIGINT else number)

    before = {number: signal.signal(number, pass_on) for number in ASKING}
    died, deadline = None, float("inf")
    try:
        while alive := [process for process in processes if process.is_alive()]:
            wait([process.sentinel for process in alive], timeout=min(max(deadline - time.monotonic(), 0), 60.0))
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
    return died


def _outcome(store: dist.Store, died: str | None) -> dict[str, float]:
    try:
        store.wait(["outcome"], timedelta(milliseconds=100))
    except RuntimeError:
        raise JobFailed(died or "rank 0 ended without a word") from None
    outcome = json.loads(store.get("outcome"))
    if "refused" in outcome:
        raise InputError(*outcome["refused"])
    if "preempted" in outcome:
        raise Preempted(outcome["preempted"])
    if "failed" in outcome:
        raise JobFailed(outcome["failed"])
    return outcome["metrics"]


def _loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
