"""A classifier's predictions for the validation data: the confusion matrix, and the classes of the first samples."""

from collections.abc import Sequence
from typing import Any

import torch

from runner.distributed.world import World
from runner.input.batch import widen_integers
from runner.input.pytree import map_tensors
from runner.input.source import Source
from runner.objectives.objective import Prediction

MAX_CLASSES = 200  # a larger matrix is unreadable
NUM_SAMPLES = 16


class Predictions:
    """Counts that each rank adds up batch by batch, and that are then summed over all ranks."""

    def __init__(self, dataset: Source, num_classes: int, device: torch.device, seed: int = 0):
        self.num_classes, self.num_samples = num_classes, min(NUM_SAMPLES, len(dataset))
        self._dataset, self._seed = dataset, seed
        # The matrix in row-major order, then of each of the first samples the predicted class + 1, which is 0 if it is
        # not evaluated, then their classes.
        self._sums = torch.zeros(num_classes**2 + 2 * self.num_samples, dtype=torch.int64, device=device)

    def add(self, outputs: torch.Tensor, targets: torch.Tensor, indices: Sequence[int]) -> None:
        """Count the local samples of a batch: outputs (N, num_classes), targets (N,), positions in the split (N)."""
        predicted, targets = outputs.argmax(-1), widen_integers(targets)
        cells = self.num_classes**2
        # Ignored targets may be negative, and a model may have more outputs than there are classes.
        known = (targets >= 0) & (targets < self.num_classes) & (predicted < self.num_classes)
        self._sums[:cells] += torch.bincount((targets * self.num_classes + predicted)[known], minlength=cells)
        for row, index in enumerate(indices if len(indices) == len(predicted) else ()):  # not the nodes of graphs
            if index < self.num_samples:
                self._sums[cells + index] += predicted[row] + 1
                self._sums[cells + self.num_samples + index] += targets[row]

    def gather(self, world: World) -> None:
        """Sum the counts over the ranks. All ranks must call it."""
        self._sums = world.collectives.sum(self._sums).cpu()

    @property
    def confusion(self) -> torch.Tensor:
        """Number of samples of each class (row) by predicted class (column), (num_classes, num_classes)."""
        return self._sums[: self.num_classes**2].reshape(self.num_classes, -1)

    def samples(self) -> list[tuple[Any, int, int]]:
        """Return those of the first samples that were evaluated: inputs, class and predicted class.

        A sample that is no pair (inputs, targets) stands for its inputs.
        """
        found = []
        predicted, targets = self._sums[self.num_classes**2 :].reshape(2, -1).tolist()
        for index, (number, target) in enumerate(zip(predicted, targets, strict=True)):
            if number > 0:  # eval_batches may end the evaluation before this sample
                # With the same random numbers as in the evaluation.
                batch = self._dataset.read([index], seed=self._seed)
                inputs = batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch
                sample = map_tensors(lambda tensor: (tensor[0] if tensor.dim() else tensor).cpu(), inputs)
                found.append((sample, target, number - 1))
        return found


def num_classes(prediction: Prediction) -> int | None:
    """Return the number of classes if whole samples are classified and a confusion matrix is readable; else None."""
    outputs, targets = prediction.outputs, prediction.targets
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return None
    is_class = not targets.is_floating_point() and targets.dim() == 1 and outputs.dim() == 2
    return outputs.size(1) if is_class and 1 < outputs.size(1) <= MAX_CLASSES else None
