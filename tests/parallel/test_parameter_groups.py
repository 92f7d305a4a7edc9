"""optimizer.groups: each parameter has the same options in every mode, at every world size and after a resume."""

from pathlib import Path

import pytest
from mode_cases import Case
from parity import COMMON
from worlds import build_experiment, run

from runner.errors import InputError

CHAIN = ("model=linear", "model._target_=custom_models.Chain", "data=toy", "data.num_train=350", "batch_size=90")
# Only the first stage has parameters of the first group, and only the last stage of the second, so that a rank of a
# pipeline has groups without a parameter. The default group has all other parameters.
GROUPS = (
    "optimizer.groups=[{match: '^embed', lr: 0.03, momentum: 0.5},"
    "{match: '^head.*bias', lr: 0.001, weight_decay: 0.1, nesterov: true},"
    "{match: down.weight$, weight_decay: 0.01}]"
)
OVERRIDES = (*CHAIN, *COMMON, "scheduler=cosine", "clip_grad_norm=1.0", GROUPS)


def test_groups_have_an_effect_and_are_saved_by_name(tmp_path: Path) -> None:
    """Without this test, the matrix would pass if groups had no effect at all."""
    made = run(tmp_path, 1, *OVERRIDES)
    plain = run(tmp_path, 1, *OVERRIDES, "optimizer.groups=[]")
    assert plain.losses[3] != pytest.approx(made.losses[3], rel=1e-6)
    (default, first, second, third) = made.state["optimizer"]["param_groups"]
    assert (first["params"], first["momentum"], first["weight_decay"]) == (["embed.weight", "embed.bias"], 0.5, 0.0)
    assert (second["params"], second["weight_decay"], second["nesterov"]) == (["head.bias"], 0.1, True)
    assert third["params"] == [f"blocks.{index}.down.weight" for index in range(4)]
    assert len(default["params"]) == 4 * 5 + 1 and default["momentum"] == 0.9
    # The schedule multiplies each group's own rate; the one that is logged is that of the first.
    rates = [group["lr"] for group in (default, first, second)]
    assert rates == pytest.approx([rates[0], 3 * rates[0], 0.1 * rates[0]])
    logged = [line["train/learning_rate"] for line in made.lines if "train/learning_rate" in line]
    assert logged[-1] == pytest.approx(rates[0])
    log = (made.path / "log.txt").read_text()
    assert "groups   default 712, 0: ^embed (lr=0.03, momentum=0.5) 88, 1: ^head.*bias (" in log
    assert ") 5, 2: down.weight$ (weight_decay=0.01) 512 parameters" in log


@pytest.mark.thorough
def test_checkpoint_moves_between_modes(tmp_path: Path) -> None:
    """With Adam's moments, and with other groups at the end."""
    overrides = (*CHAIN, *COMMON, "clip_grad_norm=1.0", "optimizer=adamw", "micro_batches=4")
    groups = "optimizer.groups=[{match: '^embed', lr: 0.003},{match: '^head.*bias', weight_decay: 0.1}]"
    whole = run(tmp_path / "whole", 1, *overrides, groups, "max_steps=12")
    first = run(tmp_path / "part", 2, *overrides, groups, "max_steps=2", "parallel=pipeline", "micro_batches=1")
    resume = (f"resume='{first.path}'", "micro_batches=4")
    for steps, case in (
        (4, Case("zero", 2)),
        (6, Case("tp", 2)),
        (8, Case("fsdp", 2)),
        (9, Case("ps", 2)),
        (10, Case("local_sgd", 2)),
        (12, Case("none", 1)),
    ):
        last = run(tmp_path / str(steps), case.world_size, *resume, f"max_steps={steps}", *case.overrides)
    assert last.losses == pytest.approx(whole.losses, rel=1e-9)
    state, expected = last.state["optimizer"], whole.state["optimizer"]
    assert [group["params"] for group in state["param_groups"]] == [g["params"] for g in expected["param_groups"]]
    assert list(state["state"]) == list(expected["state"])
    others = ("optimizer.groups=[{match: bias}]", "resume_force=true")
    other = run(tmp_path / "other", 2, *resume, "max_steps=14", *others, "parallel=zero")
    assert len(other.state["optimizer"]["param_groups"]) == 2


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("[{match: bais$}]", ".0.match=bais$ matches no parameter's name; near it: embed.bias, blocks.0.norm.bias, "),
        ("[{match: '.'},{match: head}]", ".1.match=head: all parameters that it matches are frozen or in"),
        ("[{match: bias, lr: -1}]", ".0.lr=-1: Invalid learning rate: -1"),
        ("[{match: a, nesterov: true, momentum: 0}]", ".0={match:a,nesterov:true,momentum:0}: Nesterov momentum"),
        ("[{match: bias, lrr: 1}]", ".0.lrr=1: SGD has no option lrr; did you mean lr?"),
        ("[{match: bias, params: 1}]", ".0.params=1: the runner sets params itself"),
        ("[{match: 'b('}]", ".0.match=b( must be a regular expression, but: missing ), unterminated subpattern"),
        ("[{lr: 1}]", ".0={lr:1} must be a mapping with match"),
        ("bias", "=bias must be a list of parameter groups"),
    ],
)
def test_invalid_groups_are_refused(groups: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        build_experiment(*CHAIN, f"optimizer.groups={groups}")
    (line,) = raised.value.messages
    assert line.startswith(f"optimizer.groups{message}")
