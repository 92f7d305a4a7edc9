"""Ranks that compute with other code, packages or values than rank 0 are refused before anything is written."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from worlds import configure

from runner.config.schema import Config
from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.errors import InputError
from runner.jobs import equal_input
from runner.jobs.job import run_job

JOB = ("model=toy", "data=toy", "parallel=ddp", "epochs=1", "threads=1")


def refusals(folder: Path, patch: dict[str, Any], change: dict[str, Any]) -> list[str]:
    """Return the messages of two ranks. Rank 1 has other attributes of the module, and another configuration."""
    _, request = configure(*JOB, f"outputs={folder / 'outputs'}")

    def run(rank: int, world_size: int) -> str:
        own = request
        if rank == 1:
            own = replace(request, config=replace(request.config, **change))
            for name, value in patch.items():
                setattr(equal_input, name, value)
        socket.gethostname = lambda: f"host{rank}"
        store = dist.FileStore(str(folder / "store"), world_size)
        world = World(RankInfo(rank, 0, world_size, 1, source="test"), store, Backend())
        try:
            run_job(own, world)
        except InputError as error:
            return str(error)
        finally:
            world.shutdown.report_before_exit(lambda: None)
        return ""

    return run_ranks(run, 2, forms_group=False)


def optimizer(config: Config, lr: float) -> dict[str, Any]:
    return {"optimizer": {**config.optimizer, "lr": lr}}


CONFIG = configure(*JOB)[0]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "config": ({}, optimizer(CONFIG, 0.7), "optimizer.lr=0.7 on rank 1 on host1, but 0.05 on rank 0; start all ranks"),
    "mode": ({}, {"parallel": {"_target_": "runner.parallel.allreduce.AllReduce"}}, "parallel._target_="),
    "code": ({"shipped_hash": lambda: "other"}, {}, "rank 1 on host1 has other code than rank 0 (runner); copy"),
    "versions": ({"versions": lambda: {"torch": "2.0"}}, {}, "rank 1 on host1 has torch 2.0, and rank 0 has "),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_would_compute_something_else_are_refused_on_all_ranks(case: str, tmp_path: Path) -> None:
    patch, change, message = CASES[case]
    found = refusals(tmp_path, patch, change)
    assert found[0] == found[1] and found[0].startswith(message)
    assert not (tmp_path / "outputs").exists()


def test_machines_may_have_their_own_paths_and_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # OpenMP hangs in a forked rank with several threads if an earlier test has used them.
    monkeypatch.setattr("runner.jobs.job.set_threads", lambda world, threads: None)
    change = {"threads": 2, "launcher": {**CONFIG.launcher, "join_timeout_s": 7.0}}
    assert refusals(tmp_path, {}, change) == ["", ""]
