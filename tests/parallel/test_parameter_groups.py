"""optimizer.groups: the same parameters get the same options in every mode, at every world size and after a resume."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parity import COMMON, assert_equal
from ways import SLICE, WAYS, Way, tier
from worlds import Run, configure, run

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.errors import InputError
from runner.training.build import build

CHAIN = ("model=linear", "model._target_=own_models.Chain", "data=toy", "data.num_train=350", "batch_size=90")
# The first stage alone has parameters of the first group, and the last of the second: a rank of a pipeline has groups
# without a parameter. The default group has what is left.
GROUPS = (
    "optimizer.groups=[{match: '^embed', lr: 0.03, momentum: 0.5},"
    "{match: '^head.*bias', lr: 0.001, weight_decay: 0.1, nesterov: true},"
    "{match: down.weight$, weight_decay: 0.01}]"
)
WORDS = (*CHAIN, *COMMON, "scheduler=cosine", "clip_grad_norm=1.0", GROUPS)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    @functools.cache
    def of(*options: str) -> Run:
        return run(tmp_path_factory.mktemp("none"), 1, *WORDS, *options)

    return of


@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=tier(way in SLICE, way.world_size > 1), id=str(way)) for way in WAYS]
)
def test_mode_equals_one_process(way: Way, reference: Callable[..., Run], tmp_path: Path) -> None:
    expected = reference(*way.reference)
    spread = run(tmp_path, way.world_size, *WORDS, *way.words)
    assert_equal(spread, expected)
    assert _rates(spread) == pytest.approx(_rates(expected), rel=1e-12)
    assert _groups(spread) == _groups(expected)


def test_groups_are_another_run_and_are_kept_by_name(reference: Callable[..., Run], tmp_path: Path) -> None:
    """What the matrix would miss if they did nothing."""
    plain = run(tmp_path, 1, *WORDS, "optimizer.groups=[]")
    assert plain.losses[3] != pytest.approx(reference().losses[3], rel=1e-6)
    (default, first, second, third) = reference().state["optimizer"]["param_groups"]
    assert (first["params"], first["momentum"], first["weight_decay"]) == (["embed.weight", "embed.bias"], 0.5, 0.0)
    assert (second["params"], second["weight_decay"], second["nesterov"]) == (["head.bias"], 0.1, True)
    assert third["params"] == [f"blocks.{index}.down.weight" for index in range(4)]
    assert len(default["params"]) == 4 * 5 + 1 and default["momentum"] == 0.9
    # The schedule multiplies each group's own rate; the one that is logged is that of the first.
    rates = [group["lr"] for group in (default, first, second)]
    assert rates == pytest.approx([rates[0], 3 * rates[0], 0.1 * rates[0]])
    assert _rates(reference())[10] == pytest.approx(rates[0])
    log = (reference().path / "log.txt").read_text()
    assert "groups   default 712, 0 (^embed) 88, 1 (^head.*bias) 5, 2 (down.weight$) 512 parameters" in log


@pytest.mark.thorough
def test_checkpoint_goes_from_mode_to_mode(tmp_path: Path) -> None:
    """With Adam's moments: pipeline on 4 ranks, zero on 2, tp on 2, fsdp on 4, none, and other groups at the end."""
    words = (*CHAIN, *COMMON, "clip_grad_norm=1.0", "optimizer=adamw", "micro_batches=4")
    groups = "optimizer.groups=[{match: '^embed', lr: 0.003},{match: '^head.*bias', weight_decay: 0.1}]"
    whole = run(tmp_path / "whole", 1, *words, groups, "max_steps=12")
    first = run(tmp_path / "part", 4, *words, groups, "max_steps=2", "parallel=pipeline", "micro_batches=1")
    resume = (f"resume='{first.path}'", "micro_batches=4")
    for steps, way in (
        (4, Way("zero", 2)),
        (6, Way("tp", 4, ("parallel.rest=fsdp",))),
        (8, Way("fsdp", 4, ("parallel.replicate=2",))),
        (9, Way("ps", 2)),
        (10, Way("local_sgd", 2)),
        (11, Way("pipeline", 2, ("micro_batches=1",))),
        (12, Way("none", 1)),
    ):
        last = run(tmp_path / str(steps), way.world_size, *resume, f"max_steps={steps}", *way.words)
    assert last.losses == pytest.approx(whole.losses, rel=1e-9)
    assert _groups(last) == _groups(whole)
    state, expected = last.state["optimizer"]["state"], whole.state["optimizer"]["state"]
    assert list(state) == list(expected)
    others = ("optimizer.groups=[{match: bias}]", "resume_force=true")
    other = run(tmp_path / "other", 2, *resume, "max_steps=14", *others, "parallel=zero")
    assert len(other.state["optimizer"]["param_groups"]) == 2


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("[{match: bais$}]", "0.match=bais$ matches no parameter's name; near it: embed.bias, blocks.0.norm.bias, "),
        ("[{match: '.'},{match: head}]", "1.match=head: all that it matches (head.weight, head.bias) is in an earlier"),
        ("[{match: bias, lr: -1}]", "0.lr=-1: Invalid learning rate: -1"),
        ("[{match: a, nesterov: true, momentum: 0}]", "0={match:a,nesterov:true,momentum:0}: Nesterov momentum"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(groups: str, message: str) -> None:
    config, request = configure(*CHAIN, f"optimizer.groups={groups}")
    with pytest.raises(InputError) as raised:
        build(config, request.choices, World(RankInfo(0, 0, 1, 1), None, Backend()))
    (line,) = raised.value.messages
    assert line.startswith(f"optimizer.groups.{message}")


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("[{match: bias, lrr: 1}]", ".0.lrr=1: SGD has no option lrr; did you mean lr?"),
        ("[{match: bias, lr: fast}]", ".0.lr=fast must be a number (float)"),
        ("[{match: bias, params: 1}]", ".0.params=1: the runner sets params itself"),
        ("[{match: 'b('}]", ".0.match=b( must be a regular expression, but: missing ), unterminated subpattern"),
        ("[{match: 3}]", ".0.match=3 must be a regular expression, as text"),
        ("[{lr: 1}]", ".0={lr:1} must have match"),
        ("[bias]", ".0=bias must be a mapping of match and options"),
        ("bias", "=bias must be a list of groups"),
    ],
)
def test_what_is_wrong_by_itself_is_refused(groups: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        configure(*CHAIN, f"optimizer.groups={groups}")
    (line,) = raised.value.messages
    assert line.startswith(f"optimizer.groups{message}")


def _rates(made: Run) -> dict[int, float]:
    return {line["step"]: line["train/learning_rate"] for line in made.lines if "train/learning_rate" in line}


def _groups(made: Run) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key in ("params", "momentum", "weight_decay", "nesterov")}
        | {"lr": pytest.approx(group["lr"])}
        for group in made.state["optimizer"]["param_groups"]
    ]
