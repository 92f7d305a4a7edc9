"""task=collectives: the check of values, the bandwidths as nccl-tests define them, and the files that it writes."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks
from worlds import run

from runner.distributed import collectives
from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.tasks.collectives import OPERATIONS, Collectives, bus_factor, check

SMALL = ("task=collectives", "task.sizes=[4,1000]", "task.repeats=2", "task.warmup=1")


def world_of(rank: int, world_size: int, folder: Path) -> World:
    """Return a rank's world over the process group of `run_ranks`."""
    store = dist.FileStore(str(folder / "store"), world_size)
    return World(RankInfo(rank, rank, world_size, world_size, source="test"), store, Backend())


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective_has_the_expected_values(world_size: int, tmp_path: Path) -> None:
    def on_rank(rank: int, world_size: int) -> dict[str, str | None]:
        world = world_of(rank, world_size, tmp_path)
        return {operation: check(operation, world) for operation in OPERATIONS}

    assert run_ranks(on_rank, world_size) == [dict.fromkeys(OPERATIONS)] * world_size


@pytest.mark.parametrize("operation", ["all_reduce", "gather"])
def test_a_wrong_value_on_one_rank_is_reported_on_all(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(dist, operation)

    def wrong(result: torch.Tensor, *args: object, **options: object) -> None:
        right(result, *args, **options)
        if dist.get_rank() == 1:
            filled = args[0][0] if operation == "gather" else result
            filled.view(-1)[-1] += 1

    monkeypatch.setattr(dist, operation, wrong)

    def on_rank(rank: int, world_size: int) -> str:
        with pytest.raises(RuntimeError) as raised:
            check(operation, world_of(rank, world_size, tmp_path))
        return str(raised.value)

    first, second = run_ranks(on_rank, 2)
    assert first == second and first.startswith(f"{operation} on rank 1: returned ") and " instead of " in first


def test_an_unsupported_collective_is_reported_with_the_error_of_the_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(*args: object, **options: object) -> None:
        raise RuntimeError("ProcessGroupGloo does not support reduce_scatter\nmore")

    monkeypatch.setattr(collectives, "reduce_scatter_single", lacks)
    made = run(tmp_path, 2, *SMALL, "task.operations=[reduce_scatter,broadcast]")
    assert {name.partition("/")[0] for name in made.result["metrics"]} == {"broadcast"}
    with (made.path / "collectives.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["operation"] for row in rows] == ["broadcast", "broadcast", "reduce_scatter"]
    assert rows[2]["unsupported"] == "ProcessGroupGloo does not support reduce_scatter" and rows[2]["seconds"] == ""
    assert "| ProcessGroupGloo does not support reduce_scatter |" in (made.path / "collectives.md").read_text()


def test_another_error_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> None:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(collectives, "all_gather_single", fails)
    with pytest.raises(RankError, match="Connection reset by peer"):
        run(tmp_path, 2, *SMALL)


def test_bandwidths() -> None:
    """https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, for 4 ranks."""
    assert {operation: bus_factor(operation, 4) for operation in OPERATIONS} == {
        "broadcast": 1,
        "reduce": 1,
        "all_reduce": 1.5,
        "scatter": 0.75,
        "gather": 0.75,
        "all_gather": 0.75,
        "reduce_scatter": 0.75,
        "all_to_all": 0.75,
        "send_recv": 1,
    }


def test_a_run_writes_a_table_and_a_plot(tmp_path: Path) -> None:
    made = run(tmp_path, 3, *SMALL)
    assert made.result["state"] == "finished" and made.result["task"] == "collectives"
    metrics = made.result["metrics"]
    sizes = (12, 996)  # 4 bytes are fewer than one number for each rank; 1000 bytes are 250 numbers
    names = {
        f"{o}/{what}/{size}" for o in OPERATIONS for what in ("bus_gb_s", "algorithm_gb_s", "seconds") for size in sizes
    }
    assert metrics.keys() == names and all(value > 0 for value in metrics.values())
    rate, seconds = (metrics[f"all_reduce/{name}/996"] for name in ("algorithm_gb_s", "seconds"))
    assert rate == pytest.approx(996 / seconds / 1e9)
    assert metrics["all_reduce/bus_gb_s/996"] == pytest.approx(4 / 3 * rate)
    with (made.path / "collectives.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["operation"], int(row["bytes"])) for row in rows] == [(o, size) for o in OPERATIONS for size in sizes]
    assert (made.path / "collectives.md").read_text().count("| all_reduce |") == 2
    assert (made.path / "collectives.png").read_bytes().startswith(b"\x89PNG")
    assert not (made.path / "checkpoints").exists()


def test_invalid_input_is_refused(here: Callable[..., int], capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert here("task=collectives", "name=alone") == 2
    alone = "task=collectives needs at least 2 ranks, and this world has 1; try launcher=spawn\n"
    assert capfd.readouterr().err == alone
    assert here("task=collectives", "task.operations=[all_redcue]") == 2
    refused = "task.operations=[all_redcue] must be one or several of broadcast,"
    assert capfd.readouterr().err.startswith(refused)
    assert list(tmp_path.iterdir()) == []
    for options in ({"sizes": []}, {"sizes": [1024, 3]}, {"repeats": 0}, {"warmup": -1}, {"operations": []}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}=.* "):
            Collectives(**options)  # type: ignore[arg-type]
