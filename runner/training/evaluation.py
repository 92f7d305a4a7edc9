"""Evaluation: the losses and metrics of the validation data, with each sample counted once on any number of ranks."""

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping

import torch

from runner.distributed.world import World
from runner.objectives.objective import Objective, begin_passes
from runner.training.build import Experiment
from runner.training.metrics.confusion import Predictions
from runner.training.mode import ParallelModel


def evaluate(
    experiment: Experiment,
    parallel_model: ParallelModel,
    world: World,
    max_batches: int | None = None,
    predictions: Predictions | None = None,
    start_vote: Callable[[], Callable[[], object]] = lambda: lambda: None,
    checksums: list[float] | None = None,
) -> dict[str, float]:
    """Return val/loss and the metrics of the validation data, or of `max_batches`. All ranks must call it.

    `start_vote` is called before each batch; the function that it returns is called later, and may raise to cancel the
    evaluation. The list `checksums` gets those of the batches that the loader hashes.
    """
    objective = experiment.recipe.objective
    names = [] if objective.terms else list(objective.losses)
    logged_values = begin_passes(objective)
    losses = torch.zeros(len(names), 2, dtype=torch.float64, device=world.device)  # sum and weight of each
    metrics = experiment.metrics
    metrics.reset(world.device)
    counts = experiment.axes.counts(world.rank)
    # An objective that draws random numbers draws the same ones in every evaluation, also in task=evaluate.
    seed, data_rank = experiment.val_loader.sampler.seed, experiment.axes.data_rank(world.rank)
    experiment.recipe.draws.begin(seed, data_rank=data_rank)
    votes, read, reads_first = deque[Callable[[], object]](), list[float](), experiment.axes.reads_first(world.rank)
    for batch in itertools.islice(experiment.val_loader.steps(epoch=0), max_batches):
        votes.append(start_vote())
        if batch.checksum is not None:
            read.append(batch.checksum if reads_first else 0.0)
        for micro_batch in batch.micro_batches:
            prediction = parallel_model.predict(micro_batch)  # all ranks must call it the same number of times
            if prediction is None or not counts or micro_batch.num_samples == 0:
                continue
            for row, name in enumerate(names):
                losses[row, 0] += prediction.losses[name].sum
                losses[row, 1] += prediction.losses[name].weight
            metrics.add(prediction.outputs, prediction.targets, micro_batch.indices)
            if predictions:
                predictions.add(prediction.outputs, prediction.targets, micro_batch.indices)
        if len(votes) == experiment.axes.stage:  # how far a pipeline's first stage may be ahead of the last one
            votes.popleft()()
    for finish_vote in votes:
        finish_vote()
    if predictions:
        predictions.gather(world)
    local = [losses.flatten(), logged_values.sums(objective.value_names, world.device).flatten(), metrics.flat()]
    local.append(torch.tensor(read, dtype=torch.float64, device=world.device))
    flat = world.collectives.sum(torch.cat(local))
    summed, logged, flat, hashed = flat.split([each.numel() for each in local])
    if checksums is not None:
        checksums += hashed.tolist()
    summed = summed.reshape(losses.shape)
    means = dict(zip(names, (summed[:, 0] / summed[:, 1]).tolist(), strict=True))
    values = metrics.compute(flat, world)
    found = logged_means("val", objective, logged)
    if objective.terms:
        found = {"val/loss": sum(factor * found[f"val/{term}"] for term, factor in objective.terms.items())} | found
    else:
        found = with_total("val", means) | found
    return found | {f"val/{name}": value for name, value in values.items()}


def logged_means(split: str, objective: Objective, sums: torch.Tensor) -> dict[str, float]:
    """Return the means of the terms and of the logged values by full name.

    If the weight is 0, the mean of a term is 0, and that of a logged value is NaN.
    sums: the flattened result of `PassValues.sums`, summed over all ranks.
    """
    means = {}
    for name, (total, weight) in zip(objective.value_names, sums.reshape(-1, 2).tolist(), strict=True):
        means[f"{split}/{name}"] = total / weight if weight else 0.0 if name in objective.terms else math.nan
    return means


def with_total(split: str, losses: Mapping[str, float]) -> dict[str, float]:
    """Return the losses by their full names, and `loss`, the sum of several losses."""
    named = {f"{split}/{name}": value for name, value in losses.items()}
    return {f"{split}/loss": sum(losses.values())} | named
