"""The slowest rank and the waiting time of the other ranks are logged."""

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from worlds import run

from runner.input.source import Source
from runner.training.draws.following import Draws

SLOW, SLOW_S = 1, 0.1  # a rank, and how much longer its steps are
WORDS = ("model=mlp", "model.hidden=[8]", "data.sample_shape=[1,8,8]", "parallel=ddp", "logger=none", "eval_every=99")


def compute() -> None:
    if dist.is_initialized() and dist.get_rank() == SLOW:
        until = time.thread_time() + SLOW_S
        while time.thread_time() < until:
            pass


@pytest.mark.parametrize("slow", ["reads", pytest.param("computes", marks=pytest.mark.thorough)])
def test_the_slowest_rank_and_the_waiting_time_are_logged(
    slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, read = Draws.begin, Source.__getitems__

    def compute_and_seed(self: Draws, *key: int, data_rank: int | None) -> None:
        compute()
        begin(self, *key, data_rank=data_rank)

    def wait_and_read(self: Source, share: Any) -> Any:
        if dist.is_initialized() and dist.get_rank() == SLOW:
            time.sleep(SLOW_S)
        return read(self, share)

    if slow == "computes":
        monkeypatch.setattr(Draws, "begin", compute_and_seed)
    else:
        monkeypatch.setattr(Source, "__getitems__", wait_and_read)
        monkeypatch.setattr("runner.input.loader.MOST_AT_ONCE", 1)  # or it is slow in one step of 16
    lines = [line for line in run(tmp_path, 3, *WORDS, "max_steps=21", "log_every=3").lines if "train/loss" in line]
    assert len(lines) == 7
    assert statistics.mode(line["perf/slowest_rank"] for line in lines) == SLOW
    assert 0.2 < statistics.median(line["perf/straggler"] for line in lines) <= 1


@pytest.mark.parametrize(("world_size", "parallel"), [(1, "none"), (2, "ps")])
def test_a_single_training_rank_has_no_straggler(world_size: int, parallel: str, tmp_path: Path) -> None:
    done = run(tmp_path, world_size, *WORDS, f"parallel={parallel}", "max_steps=2")
    assert not {"perf/straggler", "perf/slowest_rank"} & {name for line in done.lines for name in line}
