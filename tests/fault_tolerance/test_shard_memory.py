"""What saving and resuming cost in memory: of a model that is cut over ranks, no rank ever has the whole."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.fault_tolerance import checkpoint
from runner.fault_tolerance.background import Background, Snapshot
from runner.fault_tolerance.writers import Writers
from runner.launchers.freed_memory import keep_freed_memory
from runner.parallel.fsdp import FSDP
from runner.runs.train_state import TrainState
from runner.training.batch import MicroBatch, StepBatch
from runner.training.precision import Precision
from runner.training.saved_state import SavedState
from runner.training.strategy import Recipe, Spread
from runner.training.supervised import Supervised

WIDTH, DEPTH = 2048, 4  # 64 MiB of parameters, and twice that of AdamW's state
ALLOWED = 1.3  # of a rank's own part


def peak_of(status: str = "VmHWM") -> float:
    """MiB of this process, at most since `forget_peak` or (VmRSS) now."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{status}:"))
    return int(line.split()[1]) / 1024


def forget_peak() -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return peak_of("VmRSS")


def spread_over(world: World) -> Spread:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    make = functools.partial(torch.optim.AdamW, lr=0.01)
    objective = Supervised(nn.MSELoss())
    recipe = Recipe(module, objective, make, Precision("fp32", world.device), None, world.device, torch.zeros(1, WIDTH))
    return FSDP(meta_init=False).prepare(recipe, world)


@pytest.mark.thorough
def test_a_rank_needs_little_more_than_its_part(tmp_path: Path) -> None:
    def act(rank: int, world_size: int) -> list[float]:
        keep_freed_memory()  # as the ranks of a command do
        world = World(RankInfo(rank, rank, world_size, world_size), None, Backend())
        spread = spread_over(world)
        ones = torch.ones(2, WIDTH)
        for _ in range(2):
            spread.forward_backward(StepBatch([MicroBatch((ones, ones), range(2))], 2 * world_size, 0.0))  # type: ignore[attr-defined]
            spread.step(1.0, want_norm=False)  # type: ignore[attr-defined]
        held = spread.state()
        own = sum(piece.tensor.nbytes for piece in held.pieces.values()) / 2**20
        assert own == pytest.approx(3 * 64 / world_size, rel=0.01)
        training = forget_peak()
        store = dist.FileStore(str(tmp_path / "store"), world_size)
        writers = Writers(rank, world_size, store)
        path = checkpoint.save(tmp_path, held, TrainState(2, 0, 2, 8), writers)
        saving = peak_of() - training
        dist.barrier()

        training = forget_peak()
        background, copy = Background(), Snapshot().of(held)
        background.do(functools.partial(checkpoint.save, tmp_path, copy, TrainState(3, 0, 3, 8), writers))
        assert background.wait(timeout_s=300)
        beside = peak_of() - training
        dist.barrier()

        resumed = spread_over(world)
        before = forget_peak()
        resumed.load_state(SavedState.open(path))
        resuming = peak_of() - before - 2 / 3 * own  # the optimizer's state has come
        again = resumed.state().pieces
        assert all(torch.equal(piece.tensor, again[name].tensor) for name, piece in held.pieces.items())
        assert all(isinstance(parameter, DTensor) for parameter in resumed.held().values())
        return [saving / own, beside / own, resuming / own]

    for peaks in run_ranks(act, 4):
        assert max(peaks) <= ALLOWED, peaks
        saving, beside, resuming = peaks
        print(
            f"beyond training, of a rank's own part: saving {saving:.2f}, saving beside training {beside:.2f}, "
            f"resuming {resuming:.2f}"
        )
