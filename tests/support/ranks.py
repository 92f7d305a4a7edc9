"""Run a function on several ranks from inside one test: forked processes that share a gloo group."""

import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP and optimizers import it in about 1 s; importing it here saves that in each forked rank
import torch.distributed as dist
import torch.utils.tensorboard  # as above, in 0.1 s


class RankError(Exception):
    """A rank raised, died or hung. The message names every such rank and contains its traceback."""


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 300, forms_group: bool = True
) -> list[Any]:
    """Call `function(rank, world_size, *args)` on every rank and return the results by rank.

    Ranks are forked, so `function` may be a closure and sees what the test has patched. Each rank has one torch thread
    and the default group (gloo on loopback), unless forms_group is false. Raise RankError as soon as a rank fails, or
    after `timeout_s`; no rank is left then. If a process that sees a GPU has called backward, autograd refuses to run
    in its forks: call it only in the ranks.
    """
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        directory = Path(name)
        arguments = [
            (function, rank, world_size, args, directory, timeout_s, forms_group) for rank in range(world_size)
        ]
        ranks = [multiprocessing.get_context("fork").Process(target=_run_rank, args=each) for each in arguments]
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns that another thread may hold a lock at the fork. The others are torch's OpenMP
                # workers, idle between operators, and a rank computes in its one thread without them.
                warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
                for process in ranks:
                    process.start()
            while True:
                statuses = [process.exitcode for process in ranks]  # None: it is running
                running = [process.sentinel for process, status in zip(ranks, statuses, strict=True) if status is None]
                if not running or any(statuses):
                    break
                if not multiprocessing.connection.wait(running, timeout=max(0.0, deadline - time.monotonic())):
                    break
        finally:
            _end(ranks)
        if any(status != 0 for status in statuses):
            raise RankError(_explain(statuses, directory, timeout_s))
        # The ranks of this call wrote these files, so unpickling them is safe.
        return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def exit_statuses(
    rank_of: Callable[[int], None], world_size: int, awaited: Collection[int], timeout_s: float
) -> list[int | None]:
    """Run the ranks in forked processes. Return the statuses of those that are awaited; None if one still runs."""
    fork = multiprocessing.get_context("fork").Process
    ranks = [fork(target=rank_of, args=(rank,)) for rank in range(world_size)]
    try:
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + timeout_s
        for number in awaited:
            ranks[number].join(max(0.0, deadline - time.monotonic()))
        return [ranks[number].exitcode for number in awaited]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _run_rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    args: Any,
    path: Path,
    timeout_s: float,
    forms_group: bool,
) -> None:
    gc.freeze()  # excludes the test process's objects from the collection below, which saves 0.2 s
    report = (path / f"{rank}.txt").open("w")
    faulthandler.enable(report)  # writes the stacks if the rank crashes, or hangs and is ended by SIGABRT
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        if forms_group:
            store = dist.FileStore(str(path / "store"), world_size)  # needs no port that another test could use first
            timeout = timedelta(seconds=timeout_s)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
            dist.barrier()  # init may return before other ranks are connected; a rank that exits then would fail them
        result = function(rank, world_size, *args)
        gc.collect()  # a DDP object in a cycle would keep the group alive, and the process could abort at its exit
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.save(result, path / f"{rank}.pt")
    except BaseException:
        traceback.print_exc(file=report)
        report.flush()
        os._exit(1)  # skips the exit handlers that the tests' process has registered


def _end(ranks: Sequence[BaseProcess]) -> None:
    for number in (signal.SIGABRT, signal.SIGKILL):
        alive = [process for process in ranks if process.is_alive()]
        for process in alive:
            assert process.pid is not None
            os.kill(process.pid, number)
        for process in alive:
            process.join(timeout=60)
    for process in ranks:
        process.close()


def _explain(statuses: list[int | None], path: Path, timeout_s: float) -> str:
    failed = {rank: f"failed with status {status}" for rank, status in enumerate(statuses) if status}
    hung = {rank: f"still ran after {timeout_s} s" for rank, status in enumerate(statuses) if status is None}
    # If ranks failed, the ranks that still ran only waited for them.
    return "\n".join(f"rank {r} {what}:\n{(path / f'{r}.txt').read_text()}" for r, what in (failed or hung).items())
