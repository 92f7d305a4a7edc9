"""The metrics of the validation data, each sample once, at any number of ranks."""

from collections import deque
from collections.abc import Callable

import torch

from runner.distributed.world import World
from runner.training.build import Experiment
from runner.training.confusion import Predictions
from runner.training.losses import weighted_loss
from runner.training.strategy import Spread


def evaluate(
    experiment: Experiment,
    spread: Spread,
    world: World,
    seen: Predictions | None = None,
    ask_to_stop: Callable[[], Callable[[], None]] = lambda: lambda: None,
) -> dict[str, float]:
    """val/loss and, for classes, val/accuracy over the validation data, each sample once. All ranks must call it.

    ask_to_stop: called before each batch; what it returns is called afterwards, and raises to give the evaluation up.
    """
    loader = experiment.val_loader
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)  # of the losses, of the hits, of the samples
    asked: deque[Callable[[], None]] = deque()
    for batch in loader.steps(epoch=0):
        asked.append(ask_to_stop())
        for micro_batch in batch.micro_batches:
            outputs = spread.predict(micro_batch.inputs)  # (N, num_outputs), N = 0 where this rank's share is empty
            if outputs is None:
                continue
            loss = weighted_loss(experiment.recipe.loss, outputs, micro_batch.targets)
            sums[0] += loss.sum
            if experiment.classifies:
                sums[1] += (outputs.argmax(-1) == micro_batch.targets).sum()
            sums[2] += loss.weight
            if seen:
                seen.add(outputs, micro_batch.targets, micro_batch.indices)
        if len(asked) == experiment.axes.stage:  # the first stage is so many batches further on than the last one
            asked.popleft()()
    if seen:
        seen.gather(world)
    loss_sum, correct, count = world.collectives.sum(sums).tolist()
    metrics = {"val/loss": loss_sum / count}
    return metrics | {"val/accuracy": correct / count} if experiment.classifies else metrics
