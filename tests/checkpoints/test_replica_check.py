"""A replica whose weights differ from those of the other ranks is named at the next checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_rig import OVERRIDES, assert_same, cut
from worlds import build_experiment, run, unconnected

from runner.checkpoints.layout import list_checkpoints
from runner.checkpoints.saved_state import tensor_hashes
from runner.training.trainer import Trainer

SHORT = (*OVERRIDES, "max_steps=16")


def test_any_flipped_bit_changes_the_hash() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64):
        tensor = torch.arange(60.0).reshape(3, 4, 5).to(dtype).transpose(0, 2)
        other = tensor.contiguous()
        other.view(torch.uint8).view(-1)[17] ^= 1
        assert tensor_hashes({"w": tensor}) == tensor_hashes({"w": tensor.contiguous()}) != tensor_hashes({"w": other})
    assert tensor_hashes({"empty": torch.zeros(0), "flag": torch.tensor(True)}) == tensor_hashes(
        {"flag": torch.tensor(1)}
    )


@pytest.mark.fault("replicas of the weights diverge, in every mode that has them", outcome="refused")
@pytest.mark.parametrize(
    ("ranks", "mode"),
    [
        (2, ("parallel=ddp",)),
        pytest.param(4, ("parallel=pipeline", "parallel.stages=2"), marks=pytest.mark.thorough),
        pytest.param(2, ("parallel=allreduce",), marks=pytest.mark.soak),
        pytest.param(2, ("parallel=local_sgd", "parallel.warmup_steps=16"), marks=pytest.mark.soak),
    ],
)
def test_a_replica_that_diverges_is_named(ranks: int, mode: tuple[str, ...], tmp_path: Path) -> None:
    def flip(trainer: Trainer, batch: Any) -> None:
        """Flip a bit of one element, once, like a memory error. Updates would round the last bits away."""
        if trainer.state.step == 9 and dist.get_rank() == ranks - 1:
            tensor = next(iter(trainer.parallel_model.local_parameters().values()))
            tensor.view(torch.int32).view(-1)[0] ^= 1 << 12

    cut_short = cut(tmp_path, ranks, (*SHORT, *mode), flip)
    (name,) = [part for part in cut_short.result["error"].split() if part.endswith((".weight", ".bias"))]
    assert f"rank {ranks - 1} has other values of {name} than rank {ranks // 2 - 1}" in cut_short.result["error"]
    assert cut_short.result["state"] == "failed" and "Traceback" not in cut_short.result["error"]
    assert [path.name for path in list_checkpoints(cut_short.path / "checkpoints")] == ["step_7"]
    resumed = run(tmp_path, ranks, f"resume={cut_short.path}")
    assert_same(resumed, run(tmp_path / "whole", ranks, *SHORT, *mode))


def test_the_replicas_of_an_objective_with_several_losses_are_compared() -> None:
    own = f"--config-dir={Path(__file__).parents[1] / 'parallel' / 'own'}"
    experiment = build_experiment(own, "model=codes", "data=figures", "objective=adversarial", "logger=none")
    model = experiment.parallel.prepare(experiment.recipe, unconnected())
    assert model.state().replica_hashes.keys() == model.local_parameters().keys()
