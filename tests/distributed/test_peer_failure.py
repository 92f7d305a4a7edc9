"""A rank that dies in any mode: the others end too, in time, and what came first is told once."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import MODES, configure

from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.errors import JobFailed
from runner.launchers.job import run_job
from runner.training.trainer import Trainer

TINY = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=200", "logger=none", "threads=1")
TIMEOUT_S = 3


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise RuntimeError("what the rank itself says")


def train(
    folder: Path, mode: str, world_size: int, victim: int, where: str, die: Callable[[], None]
) -> list[int | None]:
    """Each rank's status, where one dies in the run's second epoch; None is one that still ran after all its time."""
    config, request = configure(*TINY, f"parallel={mode}", f"backend.timeout_s={TIMEOUT_S}", f"outputs={folder}")
    method = getattr(Trainer, where)

    def rank_of(rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)

        def act_or_die(self: Trainer, *args: Any) -> dict[str, float]:
            if rank == victim and self.state.step > 8:
                die()
            return method(self, *args)

        setattr(Trainer, where, act_or_die)  # in this process alone
        rank_info = RankInfo(rank, rank, world_size, world_size)
        world = World(rank_info, dist.FileStore(str(folder / "store"), world_size), as_backend(config.backend))
        try:
            run_job(config, request, world)
        except JobFailed:
            raise SystemExit(1) from None

    ranks = [multiprocessing.get_context("fork").Process(target=rank_of, args=(rank,)) for rank in range(world_size)]
    try:
        for rank in ranks:
            rank.start()
        ranks[victim].join(300)
        deadline = time.monotonic() + TIMEOUT_S + 120
        for rank in ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        return [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


WAYS = [(4, 2, "step", kill), (2, 1, "step", fail)]
CASES = [(mode, *way) for mode in MODES if mode not in ("none", "dp", "ps") for way in WAYS]  # ps: test_ps.py
# Evaluation has exchanges of its own under pipeline and fsdp alone.
CASES += [("pipeline", 2, 1, "_evaluate", kill), ("fsdp", 2, 1, "_evaluate", kill)]
SLICE = [("ddp", *WAYS[0]), ("fsdp", *WAYS[1]), ("pipeline", 2, 1, "_evaluate", kill)]  # of the default run


@pytest.mark.parametrize(
    ("mode", "world_size", "victim", "where", "die"),
    [pytest.param(*case, marks=() if case in SLICE else pytest.mark.thorough) for case in CASES],
)
def test_all_ranks_end_when_one_dies(
    mode: str,
    world_size: int,
    victim: int,
    where: str,
    die: Callable[[], None],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("runner.distributed.peer_failure.LAST_WORD_S", 1.0)
    statuses = train(tmp_path, mode, world_size, victim, where, die)
    killed = -signal.SIGKILL if die is kill else 1
    assert statuses == [killed if rank == victim else 1 for rank in range(world_size)]
    (path,) = (tmp_path / "run").iterdir()
    result = json.loads((path / "result.json").read_text())
    assert result["state"] == "failed"
    told = "".join(capfd.readouterr())
    assert told.count("Traceback") == (path / "log.txt").read_text().count("Traceback") == 1
    if die is kill:
        assert f"no word from rank {victim} on" in result["error"]
    else:
        assert result["error"].startswith(f"rank {victim} on")
        assert told.count("RuntimeError: what the rank itself says") == 1
