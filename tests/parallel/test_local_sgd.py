"""parallel=local_sgd against a simulation of its replicas in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankError, run_ranks
from worlds import build_experiment, configure, run

from runner.parallel.local_sgd import LocalSGD

TOY = ("model=toy", "data=toy", "data.num_train=100", "batch_size=33", "precision=fp64", "epochs=9", "logger=none")
CONVNET = ("model=convnet", "model.channels=[4,8]", "data.sample_shape=[1,8,8]", "batch_size=350", "precision=fp64")

OUTER = ("parallel.outer_lr=0.7", "parallel.outer_momentum=0.9")


def simulate(overrides: tuple[str, ...], num_ranks: int, num_steps: int) -> tuple[dict[str, Any], dict[int, float]]:
    """Return the averaged model after this number of steps, and the loss of each step, by the definition."""
    overrides = (*overrides, "parallel=local_sgd")
    mode = configure(*overrides)[0].parallel
    experiments = [build_experiment(*overrides, rank=rank, world_size=num_ranks) for rank in range(num_ranks)]
    modules = [experiment.recipe.module for experiment in experiments]
    optimizers = [e.recipe.make_optimizer(e.recipe.module.parameters()) for e in experiments]
    anchor = [p.detach().clone() for p in modules[0].parameters()]
    velocity = [torch.zeros_like(p) for p in anchor]
    samples, losses, step, epoch = [0] * num_ranks, {}, 0, 0

    def average() -> dict[str, Any]:
        states = [module.state_dict() for module in modules]
        return {
            name: sum(state[name] * (n / sum(samples)) for state, n in zip(states, samples, strict=True))
            if tensor.is_floating_point()
            else torch.stack([state[name] for state in states]).max()
            for name, tensor in states[0].items()
        }

    while True:
        for batches in zip(*(experiment.train_loader.steps(epoch) for experiment in experiments), strict=True):
            warms_up, step, loss = step < mode["warmup_steps"], step + 1, 0.0
            counts = [sum(m.num_samples for m in batch.micro_batches) for batch in batches]
            for module, batch, count, experiment in zip(modules, batches, counts, experiments, strict=True):
                for m in (m for m in batch.micro_batches if m.num_samples):
                    mean = experiment.recipe.objective.function(module(m.inputs), m.targets)
                    (mean * len(m.inputs) / (batch.num_samples if warms_up else count)).backward()
                    loss += mean.item() * len(m.inputs) / batch.num_samples
            losses[step] = loss
            if warms_up:
                for same in zip(*(module.parameters() for module in modules), strict=True):
                    total = sum(p.grad for p in same if p.grad is not None)
                    for parameter in same:
                        parameter.grad = total.clone()
            for rank, (optimizer, count) in enumerate(zip(optimizers, counts, strict=True)):
                if warms_up or count:
                    optimizer.step()
                optimizer.zero_grad()
                samples[rank] += count
            local_steps = step - mode["warmup_steps"]
            if warms_up or local_steps % mode["every"] == 0:
                state = average()
                if not warms_up:
                    for number, (name, _) in enumerate(modules[0].named_parameters()):
                        gradient = anchor[number] - state[name]
                        velocity[number] = mode["outer_momentum"] * velocity[number] + gradient
                        move = gradient + mode["outer_momentum"] * velocity[number]
                        state[name] = anchor[number] - mode["outer_lr"] * (
                            move if mode["nesterov"] else velocity[number]
                        )
                for module in modules:
                    module.load_state_dict(state)
                anchor = [p.detach().clone() for p in modules[0].parameters()]
                samples = [0] * num_ranks
            if step == num_steps:
                return average() if sum(samples) else modules[0].state_dict(), losses
        epoch += 1


@pytest.mark.parametrize(
    ("num_ranks", "overrides"),
    [
        # The last batch of an epoch has one sample: two of three ranks have none. Ten steps end in mid-round.
        (3, (*TOY, "parallel.every=3", "parallel.warmup_steps=2", "micro_batches=2", *OUTER)),
        pytest.param(
            2,
            (*CONVNET, "epochs=9", "logger=none", "parallel.warmup_steps=1", *OUTER, "parallel.nesterov=true"),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["uneven", "batch_norm"],
)
def test_numbers_equal_the_definition(num_ranks: int, overrides: tuple[str, ...], tmp_path: Path) -> None:
    """Checkpoints and evaluations in mid-round, at the end of an epoch, change nothing."""
    # In a fork: threads that compute in this process would be missing in the forks of later ranks.
    ((expected, losses),) = run_ranks(lambda rank, world_size: simulate(overrides, num_ranks, num_steps=10), 1)
    done = run(tmp_path, num_ranks, *overrides, "max_steps=10", "parallel=local_sgd")
    assert done.losses == pytest.approx(losses, rel=1e-9)
    assert done.weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(done.weights[name], tensor, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.thorough
def test_resuming_in_mid_round_is_exact_on_the_same_number_of_ranks_and_refused_on_others(tmp_path: Path) -> None:
    overrides = (*TOY, "optimizer=adamw", "parallel=local_sgd", "parallel.every=4", "parallel.outer_momentum=0.5")
    whole = run(tmp_path / "whole", 2, *overrides, "max_steps=11")
    part = run(tmp_path / "part", 2, *overrides, "max_steps=6")
    loss = part.result["metrics"]["val/loss"]
    # The model of a checkpoint is the average, whatever reads it.
    evaluated = run(tmp_path / "none", 1, "task=evaluate", f"run={part.path}", "parallel=none")
    assert evaluated.result["metrics"]["val/loss"] == pytest.approx(loss, rel=1e-12)
    with pytest.raises(RankError, match="2 steps after an averaging; resume on 2 ranks"):
        run(tmp_path / "refused", 1, f"resume={part.path}", "max_steps=11")
    run(tmp_path / "resumed", 2, f"resume={part.path}", "max_steps=11")
    assert part.result["weights_sha256"] == whole.result["weights_sha256"]
    assert part.losses == whole.losses


@pytest.mark.thorough
def test_averaging_each_step_of_plain_sgd_is_synchronous_training_on_any_number_of_ranks(tmp_path: Path) -> None:
    overrides = (*TOY, "optimizer.momentum=0", "parallel=local_sgd", "parallel.every=1")
    whole = run(tmp_path / "whole", 1, *TOY, "optimizer.momentum=0", "max_steps=8")
    part = run(tmp_path / "part", 2, *overrides, "max_steps=5")
    run(tmp_path / "part", 3, f"resume={part.path}", "max_steps=8")
    assert part.losses == pytest.approx(whole.losses, rel=1e-9)


def test_invalid_options_are_refused() -> None:
    for options, message in [
        ({"every": 0}, "every=0 must be at least 1"),
        ({"outer_lr": 0.0}, "outer_lr=0.0 must be above 0"),
        ({"outer_momentum": 1.0}, r"outer_momentum=1.0 must be at least 0 and below 1"),
        ({"nesterov": True}, "nesterov=true has no effect"),
    ]:
        with pytest.raises(ValueError, match=message):
            LocalSGD(**options)
