"""The metrics of the validation data, each sample once, at any number of ranks."""

import itertools
from collections import deque
from collections.abc import Callable, Mapping

import torch

from runner.distributed.world import World
from runner.training.build import Experiment
from runner.training.confusion import Predictions
from runner.training.drawing import seed_step
from runner.training.sampler import mix
from runner.training.strategy import Spread


def evaluate(
    experiment: Experiment,
    spread: Spread,
    world: World,
    max_batches: int | None = None,
    seen: Predictions | None = None,
    ask_to_stop: Callable[[], Callable[[], object]] = lambda: lambda: None,
) -> dict[str, float]:
    """val/loss and the metrics over the validation data, each sample once. All ranks must call it.

    max_batches: stop after so many. ask_to_stop: called before each batch; what it returns is called afterwards, and
    raises to give the evaluation up.
    """
    names = list(experiment.objective.losses)
    losses = torch.zeros(len(names), 2, dtype=torch.float64, device=world.device)  # the sum and the weight of each
    measured = experiment.metrics
    measured.reset(world.device)
    counts = experiment.axes.counts(world.rank)
    # An objective that draws measures by the same numbers in every evaluation, one of its own task too.
    key = mix(experiment.val_loader.sampler.seed, experiment.axes.data_rank(world.rank) or 0)
    seed_step(key, world.device)
    asked: deque[Callable[[], object]] = deque()
    for batch in itertools.islice(experiment.val_loader.steps(epoch=0), max_batches):
        asked.append(ask_to_stop())
        for micro_batch in batch.micro_batches:
            prediction = spread.predict(micro_batch)  # all ranks must call it equally often
            if prediction is None or not counts or micro_batch.num_samples == 0:
                continue
            for place, name in enumerate(names):
                losses[place, 0] += prediction.losses[name].sum
                losses[place, 1] += prediction.losses[name].weight
            measured.add(prediction.outputs, prediction.targets, micro_batch.indices)
            if seen:
                seen.add(prediction.outputs, prediction.targets, micro_batch.indices)
        if len(asked) == experiment.axes.stage:  # the first stage is so many batches further on than the last one
            asked.popleft()()
    for answer in asked:
        answer()
    if seen:
        seen.gather(world)
    flat = world.collectives.sum(torch.cat([losses.flatten(), measured.flat()]))
    summed, flat = flat[: losses.numel()].reshape(losses.shape), flat[losses.numel() :]
    means = dict(zip(names, (summed[:, 0] / summed[:, 1]).tolist(), strict=True))
    numbers = measured.compute(flat, world)
    return with_total("val", means) | {f"val/{name}": number for name, number in numbers.items()}


def with_total(split: str, losses: Mapping[str, float]) -> dict[str, float]:
    """The losses by their full names; several also as their sum, which is `loss`."""
    named = {f"{split}/{name}": value for name, value in losses.items()}
    return {f"{split}/loss": sum(losses.values())} | named
