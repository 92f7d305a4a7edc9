"""What a classifier says of the validation data: a confusion matrix over all ranks, and the first samples' classes."""

from collections.abc import Sequence
from typing import Any

import torch

from runner.distributed.world import World
from runner.training.drawing import SAMPLE, drawing_from

MAX_CLASSES = 200  # a larger matrix can no longer be read
NUM_SAMPLES = 16


class Predictions:
    """Counted batch by batch on each rank, and then summed over all."""

    def __init__(self, dataset: Any, num_classes: int, device: torch.device, seed: int = 0):
        self.num_classes, self.num_samples = num_classes, min(NUM_SAMPLES, len(dataset))
        self._dataset, self._seed = dataset, seed
        # The matrix flat, then of each of the first samples its class + 1, then how many were counted.
        self._sums = torch.zeros(num_classes**2 + self.num_samples + 1, dtype=torch.int64, device=device)

    def add(self, outputs: torch.Tensor, targets: torch.Tensor, indices: Sequence[int]) -> None:
        """Count this rank's share of a batch; outputs (N, num_classes), targets (N,), indices into the data (N)."""
        predicted = outputs.argmax(-1)
        cells = self.num_classes**2
        known = (targets < self.num_classes) & (predicted < self.num_classes)  # a model may give more outputs
        counted = torch.bincount((targets * self.num_classes + predicted)[known], minlength=cells)
        self._sums[:cells] += counted
        self._sums[-1] += len(targets)
        for place, index in enumerate(indices):
            if index < self.num_samples:
                self._sums[cells + index] += predicted[place] + 1

    def gather(self, world: World) -> None:
        """Sum over the ranks; where several made the same prediction, it counts once. All ranks must call it."""
        self._sums = world.collectives.sum(self._sums).cpu()
        self._sums //= max(int(self._sums[-1]) // len(self._dataset), 1)

    @property
    def confusion(self) -> torch.Tensor:
        """How many samples of each class (row) were taken for each (column). (num_classes, num_classes)"""
        return self._sums[: self.num_classes**2].reshape(self.num_classes, -1)

    def samples(self) -> list[tuple[torch.Tensor, int, int]]:
        """The first samples of the data, each with its class and the predicted one."""
        predicted = (self._sums[self.num_classes**2 : -1] - 1).tolist()
        read = [self._read(index) for index in range(self.num_samples)]
        return [(sample, int(target), guess) for (sample, target), guess in zip(read, predicted, strict=True)]

    def _read(self, index: int) -> Any:
        with drawing_from(self._seed, 0, index, SAMPLE):  # as it was evaluated
            return self._dataset[index]
