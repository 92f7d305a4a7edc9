"""task=compare: one command, one table."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import Commands
from ranks import run_ranks

from runner.distributed import collectives
from runner.distributed.traffic import CommunicationCounter

TINY = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=64", "precision=fp64")


def test_modes_are_measured_or_listed_with_a_reason(here: Callable[..., int], tmp_path: Path) -> None:
    modes, sizes = "compare.modes=[allreduce,none,ddp,ps,pipeline]", "compare.world_sizes=[2]"
    args = (modes, sizes, "parallel=ddp", "parallel.bucket_cap_mb=1")
    assert here("task=compare", *TINY, *args) == 0
    (path,) = (tmp_path / "outputs" / "run").iterdir()
    with (path / "compare.csv").open() as file:
        rows = {(row["mode"], row["world_size"]): row for row in csv.DictReader(file)}
    assert set(rows) == {("none", "1"), *((mode, "2") for mode in ("allreduce", "none", "ddp", "ps", "pipeline"))}
    num_bytes = (64 * 16 + 16 + 16 * 10 + 10) * 8  # one hidden layer of 16 on 64 inputs, 10 outputs, in float64
    for mode in ("allreduce", "ddp", "ps", "pipeline"):
        row = rows[mode, "2"]
        assert float(row["samples_per_second"]) > 0
        assert float(row["difference_to_none"]) < 1e-12
        assert float(row["memory_mib/rank_1"]) > 50
    flags = 4 * 8  # whether each parameter was used
    for mode, sent in (("allreduce", num_bytes + flags), ("ddp", num_bytes)):  # the step's loss besides
        assert float(rows[mode, "2"]["bytes_per_step/all_reduce"]) == pytest.approx(sent, abs=32)
    assert float(rows["ps", "2"]["bytes_per_step/rpc"]) == 2 * num_bytes + flags  # gradients there, weights back
    assert float(rows["pipeline", "2"]["bytes_per_step/send"]) == 64 * 16 * 8  # 64 samples after the first stage
    assert rows["pipeline", "2"]["remark"] == "compared with parallel=none and micro_batches=4"
    assert "parallel=none is for one process" in rows["none", "2"]["remark"]
    table, *notes = (path / "compare.md").read_text().split("\n\n")
    assert table.count("\n") == 7 and len(notes) == 2
    assert len(list(path.glob("events.out.tfevents.*"))) == 1
    result = json.loads((path / "result.json").read_text())
    assert result["state"] == "finished" and result["task"] == "compare"
    assert set(result["metrics"]) == {"none/1", "allreduce/2", "ddp/2", "ps/2", "pipeline/2"}


@pytest.mark.thorough
def test_inside_a_world_it_measures_that_size_and_prints_each_line_once(commands: Commands) -> None:
    first, second = commands.forked_world(2, "task=compare", *TINY, "compare.modes=[pipeline,none]")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert (first.stdout + second.stdout).count("pipeline rank 1: stages 1 of 2") == 1
    (path,) = (commands.folder / "outputs" / "run").iterdir()
    with (path / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["mode"], row["world_size"], row["difference_to_none"]) for row in rows] == [
        ("pipeline", "2", ""),
        ("none", "2", ""),
    ]


def test_wrong_input_is_refused(here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("task=compare", *TINY, "compare.modes=[dpp]") == 2
    assert "unknown mode dpp; did you mean d" in capsys.readouterr().err
    assert here("task=compare", *TINY, "compare.world_sizes=[0]") == 2
    assert "compare.world_sizes=[0] must list numbers of at least 1; try [1]" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_counter_counts_what_each_collective_moves() -> None:
    def of(rank: int, world_size: int) -> dict[str, int]:
        tensor = torch.ones(100)  # 400 bytes
        with CommunicationCounter() as counter:
            dist.all_reduce(tensor)
            dist.all_reduce(tensor)
            dist.broadcast(tensor, 0)
            collectives.all_gather_single(torch.empty(100 * world_size), tensor)
            collectives.reduce_scatter_single(torch.empty(100 // world_size), tensor)
            tensor + tensor
        return dict(counter.bytes)

    expected = {"all_reduce": 800, "broadcast": 400, "all_gather": 800, "reduce_scatter": 400}
    assert run_ranks(of, 2) == [expected, expected]
