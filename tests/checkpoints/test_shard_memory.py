"""Memory needed to save and resume a sharded model: no rank ever holds the whole model."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from worlds import unconnected

from runner.checkpoints.layout import TrainState
from runner.checkpoints.save import save
from runner.checkpoints.save_coordination import SaveCoordinator
from runner.checkpoints.saved_state import SavedState
from runner.checkpoints.snapshot import Snapshot
from runner.distributed.world import World
from runner.input.batch import MicroBatch, StepBatch
from runner.jobs.process_tuning import keep_freed_memory
from runner.objectives.supervised import Supervised
from runner.optimization.precision import Precision
from runner.parallel.fsdp import FSDP
from runner.records.background import BackgroundThread
from runner.training.mode import ParallelModel, Recipe

WIDTH, DEPTH = 2048, 4  # 64 MiB of parameters, and twice that of AdamW's state
ALLOWED = 1.3  # times a rank's own shards


def peak_of(status: str = "VmHWM") -> float:
    """Return the largest memory of this process since `forget_peak`, or with VmRSS the present one, in MiB."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{status}:"))
    return int(line.split()[1]) / 1024


def forget_peak() -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return peak_of("VmRSS")


def spread_over(world: World) -> ParallelModel:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    make = functools.partial(torch.optim.AdamW, lr=0.01)
    objective = Supervised(nn.MSELoss())
    recipe = Recipe(module, objective, make, Precision("fp32", world.device), None, world.device, torch.zeros(1, WIDTH))
    return FSDP(meta_init=False).at(world.world_size).prepare(recipe, world)


@pytest.mark.thorough
def test_a_rank_needs_little_more_memory_than_its_shards(tmp_path: Path) -> None:
    def act(rank: int, world_size: int) -> list[float]:
        keep_freed_memory()  # as the ranks of a command do
        world = unconnected(rank, world_size)
        parallel_model = spread_over(world)
        ones = torch.ones(2, WIDTH)
        for _ in range(2):
            parallel_model.forward_backward(StepBatch([MicroBatch((ones, ones), range(2))], 2 * world_size, 0.0))  # type: ignore[attr-defined]
            parallel_model.step(1.0, want_norm=False)  # type: ignore[attr-defined]
        local = parallel_model.state()
        own = sum(chunk.tensor.nbytes for chunk in local.chunks.values()) / 2**20
        assert own == pytest.approx(3 * 64 / world_size, rel=0.01)
        training = forget_peak()
        store = dist.FileStore(str(tmp_path / "store"), world_size)
        writers = SaveCoordinator(rank, world_size, store)
        path = save(tmp_path, local, TrainState(2, 0, 2, 8), writers)
        saving_peak = peak_of() - training
        dist.barrier()

        training = forget_peak()
        background, copy = BackgroundThread("checkpoint"), Snapshot().of(local)
        background.submit(functools.partial(save, tmp_path, copy, TrainState(3, 0, 3, 8), writers))
        assert background.wait(timeout_s=300)
        beside = peak_of() - training
        dist.barrier()

        resumed = spread_over(world)
        before = forget_peak()
        resumed.load_state(SavedState.open(path))
        resuming = peak_of() - before - 2 / 3 * own  # without the optimizer's state, which is new
        again = resumed.state().chunks
        assert all(torch.equal(chunk.tensor, again[name].tensor) for name, chunk in local.chunks.items())
        assert all(isinstance(parameter, DTensor) for parameter in resumed.local_parameters().values())
        return [saving_peak / own, beside / own, resuming / own]

    for peaks in run_ranks(act, 4):
        assert max(peaks) <= ALLOWED, peaks
