"""Optimizers that the runner refuses, and several optimizers in one run."""

from pathlib import Path

import pytest
import torch
from mode_cases import Case
from parity import COMMON, assert_equal
from worlds import build_experiment, run

from runner.errors import InputError

CHAIN = ("model=linear", "model._target_=custom_models.Chain", "data=toy", "data.num_train=350", "batch_size=90")
OF = "optimizer._target_=torch.optim."
NO_SGD = ("~optimizer.momentum", "~optimizer.weight_decay", "~optimizer.nesterov")
MUON = (f"{OF}Muon", "optimizer.groups=[{match: bias$|norm, _target_: torch.optim.AdamW, lr: 0.003}]")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((f"{OF}LBFGS", *NO_SGD), f"{OF}LBFGS computes the loss several times per step, but a step of the runner"),
        (
            (f"{OF}Muon",),
            "optimizer=sgd: Muon only supports 2D parameters whereas we found a parameter with size: torch.Size([8]) "
            "(embed.bias, blocks.0.norm.weight, blocks.0.norm.bias, blocks.0.up.bias and 14 more); choose another",
        ),
        ((*MUON, "parallel=fsdp"), f"{OF}Muon needs whole matrices, but parallel=fsdp shards them; try parallel=ddp"),
        ((f"{OF}Adafactor", *NO_SGD, "parallel=tp"), f"{OF}Adafactor needs whole matrices, but parallel=tp shards"),
        (
            ("model._target_=custom_models.Rotary", "optimizer=adam"),
            "optimizer.fused=true: a fused update cannot change complex parameters, such as scale; try opt",
        ),
        (("optimizer.groups=[{match: bias, _target_: torch.optim.Muon}]",), "optimizer.groups.0=: Muon only supports"),
        (
            ("optimizer.groups=[{match: bias, _target_: torch.optim.AdamW, momentum: 0.5}]",),
            "optimizer.groups.0.momentum=0.5: AdamW has no option momentum",
        ),
    ],
)
def test_unsuitable_optimizers_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as raised:
        build_experiment(*CHAIN, *words)
    (line,) = raised.value.messages
    assert line.startswith(message)


@pytest.mark.parametrize(
    "case", [Case("zero", 2), pytest.param(Case("pipeline", 2), marks=pytest.mark.thorough)], ids=str
)
def test_a_group_has_an_optimizer_of_its_own_in_every_mode_and_after_a_resume(case: Case, tmp_path: Path) -> None:
    words = (*CHAIN, *COMMON, *MUON, "clip_grad_norm=1.0")
    whole = run(tmp_path / "whole", 1, *words, *case.reference)
    first = run(tmp_path / "part", case.world_size, *words, *case.overrides, "max_steps=4")
    made = run(tmp_path / "part", case.world_size, f"resume={first.path}", "max_steps=10")
    assert_equal(made, whole)
    state = made.state["optimizer"]["state"]
    assert set(state["embed.weight"]) == {"momentum_buffer"}
    assert set(state["embed.bias"]) == {"step", "exp_avg", "exp_avg_sq"}
    uninterrupted = run(tmp_path / "again", case.world_size, *words, *case.overrides)
    assert all(torch.equal(tensor, uninterrupted.weights[name]) for name, tensor in made.weights.items())
