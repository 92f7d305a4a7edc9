"""A classifier's predictions for the validation data: the confusion matrix, and the classes of the first samples."""

from collections.abc import Sequence
from typing import Any

import torch

from runner.distributed.world import World
from runner.input.batch import widen_integers
from runner.input.pytree import map_tensors
from runner.input.source import Source

MAX_CLASSES = 200  # a larger matrix is unreadable
NUM_SAMPLES = 16


class Predictions:
    """Counts that each rank adds up batch by batch, and that are then summed over all ranks."""

    def __init__(self, dataset: Source, num_classes: int, device: torch.device, seed: int = 0):
        self.num_classes, self.num_samples = num_classes, min(NUM_SAMPLES, len(dataset))
        self._dataset, self._seed = dataset, seed
        # The matrix in row-major order, then the predicted class + 1 of each of the first samples; 0 if not evaluated.
        self._sums = torch.zeros(num_classes**2 + self.num_samples, dtype=torch.int64, device=device)

    def add(self, outputs: torch.Tensor, targets: torch.Tensor, indices: Sequence[int]) -> None:
        """Count the local samples of a batch: outputs (N, num_classes), targets (N,), positions in the split (N)."""
        predicted, targets = outputs.argmax(-1), widen_integers(targets)
        cells = self.num_classes**2
        # Ignored targets may be negative, and a model may have more outputs than there are classes.
        known = (targets >= 0) & (targets < self.num_classes) & (predicted < self.num_classes)
        self._sums[:cells] += torch.bincount((targets * self.num_classes + predicted)[known], minlength=cells)
        for row, index in enumerate(indices):
            if index < self.num_samples:
                self._sums[cells + index] += predicted[row] + 1

    def gather(self, world: World) -> None:
        """Sum the counts over the ranks. All ranks must call it."""
        self._sums = world.collectives.sum(self._sums).cpu()

    @property
    def confusion(self) -> torch.Tensor:
        """Number of samples of each class (row) by predicted class (column), (num_classes, num_classes)."""
        return self._sums[: self.num_classes**2].reshape(self.num_classes, -1)

    def samples(self) -> list[tuple[Any, int, int]]:
        """Return those of the first samples that were evaluated, each with its class and its predicted class."""
        found = []
        for index, predicted in enumerate((self._sums[self.num_classes**2 :] - 1).tolist()):
            if predicted >= 0:  # eval_batches may end the evaluation before this sample
                # With the same random numbers as in the evaluation.
                sample, target = self._dataset.read([index], seed=self._seed)
                found.append((map_tensors(lambda tensor: tensor[0], sample), int(target), predicted))
        return found
