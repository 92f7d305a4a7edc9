"""Gradients that are computed twice: a flipped bit is detected on its rank, and the run is otherwise unchanged."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mode_cases import tier
from ranks import RankError, run_ranks
from worlds import MODES, Run, configure, run

from runner.checkpoints.layout import list_checkpoints
from runner.checkpoints.saved_state import local_part
from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.errors import InputError, JobFailed
from runner.input.batch import StepBatch
from runner.parallel.replica import Replica
from runner.training.build import build
from runner.training.replay import Replay

SMALL = ("data=toy", "model=mlp", "model.hidden=[8,8]", "batch_size=32", "max_steps=4", "logger=none")
THOROUGH = pytest.mark.thorough
NORMED = (*SMALL, "model.dropout=0.3", "model.batch_norm=true", "micro_batches=2", "checkpoint.every_steps=1")


class Flipped:
    """A stepper: in one of its computations, the gradient of one parameter has a flipped bit."""

    def __init__(self, replica: Replica, name: str, element: float, bit: int, computation: int):
        self.replica, self.name, self.element, self.bit, self.until = replica, name, element, bit, computation

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        parameter = dict(self.replica.module.named_parameters())[self.name]
        hook = parameter.register_hook(self.flip) if self.until == 0 else None
        self.until -= 1
        loss = self.replica.forward_backward(batch)
        if hook:
            hook.remove()
        return loss

    def flip(self, gradient: torch.Tensor) -> torch.Tensor:
        flipped = gradient.contiguous().clone()
        of_bytes = flipped.view(-1).view(torch.uint8)
        of_bytes[4 * int(self.element * flipped.numel()) + self.bit // 8] ^= 1 << self.bit % 8
        return flipped

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replica, name)


@pytest.mark.fault("one bit of a gradient flipped on one rank", outcome="refused")
@pytest.mark.parametrize(("mode", "ranks"), [("none", 1), ("ddp", 2)])
def test_every_flipped_bit_is_detected_and_its_rank_and_parameter_are_named(
    mode: str, ranks: int, record_property: Callable[[str, object], None]
) -> None:
    config, request = configure(*SMALL, f"parallel={mode}", "replay_every_steps=1")

    def detect(rank: int, world_size: int) -> None:
        world = World(RankInfo(rank, rank, world_size, world_size), None, Backend())
        experiment = build(config, request.command.choices, world)
        replica = experiment.parallel.prepare(experiment.recipe, world)
        assert isinstance(replica, Replica)
        replay, names = Replay(config.replay_every_steps, experiment.recipe, world), sorted(replica.local_parameters())
        batch = next(iter(experiment.train_loader.steps(0)))
        for seed in range(10):
            drawn = random.Random(seed)
            on_rank, name = drawn.randrange(world_size), drawn.choice(names)
            where = drawn.random(), drawn.randrange(32), drawn.randrange(2)
            stepper = Flipped(replica, name, *where) if rank == on_rank else replica
            with pytest.raises(JobFailed) as caught:
                replay.forward_backward(stepper, batch, step=3)
            assert caught.value.follows == (rank != on_rank)
            if rank == on_rank:
                assert f"rank {rank}, step 3: the gradient of {name} differs by" in str(caught.value)
            replica.skip()
        replay.forward_backward(replica, batch, step=3)

    record_property("injected", 10)
    run_ranks(detect, ranks)


@pytest.mark.fault("one bit of a gradient flipped on one rank", outcome="refused")
@pytest.mark.parametrize(("mode", "when"), [("ddp", ""), pytest.param("fsdp", ", after the exchange,", marks=THOROUGH)])
def test_a_flipped_bit_stops_all_ranks_before_the_update(
    mode: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, calls = Replica.forward_backward, []

    def flipped_once(self: Replica, batch: StepBatch) -> torch.Tensor:
        calls.append(batch)
        if torch.distributed.get_rank() == 0 or len(calls) != 3:  # the second computation of step 2
            return compute(self, batch)
        parameter = next(parameter for name, parameter in self.module.named_parameters() if name == "head.bias")
        if mode == "fsdp":
            loss = compute(self, batch)
            local_part(parameter.grad).view(torch.int32)[0] ^= 1
            return loss
        hook = parameter.register_hook(lambda gradient: gradient.view(torch.int32).bitwise_xor(1).view(torch.float32))
        loss = compute(self, batch)
        hook.remove()
        return loss

    monkeypatch.setattr(Replica, "forward_backward", flipped_once)
    with pytest.raises(RankError, match=rf"rank 1, step 2: the gradient of head\.bias{when} differs by \d\S+ between"):
        run(tmp_path, 2, *NORMED, f"parallel={mode}", "replay_every_steps=2")
    (path,) = (tmp_path / "run").iterdir()
    assert [each.name for each in list_checkpoints(path / "checkpoints")] == ["step_1"]
    assert "replay   every 2 steps, costs about 50% of a step's gradients" in (path / "log.txt").read_text()
    result = Run(path).result
    assert result["state"] == "failed" and "Traceback" not in result["error"]


@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=tier(mode == "ddp", mode in ("fsdp", "pipeline", "ps")))
        for mode in MODES
        if mode != "local_sgd"
    ],
)
def test_a_replayed_run_has_the_same_weights_and_metrics(mode: str, tmp_path: Path) -> None:
    ranks = {"none": 1, "dp": 1, "ps": 3}.get(mode, 2)
    measured = () if mode in ("dp", "pipeline") else ("metrics=mae", "train_metrics=true")
    words = (*NORMED, f"parallel={mode}", *measured)
    once, twice = (run(tmp_path / n, ranks, *words, f"replay_every_steps={n}") for n in ("9", "2"))
    assert twice.result["weights_sha256"] == once.result["weights_sha256"]
    for name in ("train/loss", "train/grad_norm", "train/mae"):
        assert twice.values(name) == once.values(name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("replay_every_steps=0",), "replay_every_steps=0 must be at least 1"),
        (("parallel=local_sgd",), "replay_every_steps=2: under parallel=local_sgd the ranks do not communicate"),
        (("parallel=ps", "parallel.updates=async"), "replay_every_steps=2 needs updates=sync"),
        (("parallel=ddp", "parallel.static_graph=true"), r"replay_every_steps=2 needs parallel\.static_graph=false"),
    ],
)
def test_invalid_combinations_are_refused(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises((InputError, RankError), match=message):
        run(tmp_path, 2, *SMALL, "replay_every_steps=2", *words)
    assert not list(tmp_path.glob("run/*"))
