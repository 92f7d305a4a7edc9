"""Some of the samples of a data set, as a data set that reads like the whole."""

from collections.abc import Sequence
from typing import Any

import torch


class Part:
    """The rows of a data set at `rows`, (N,) int64; whatever else the data set offers is reached through it.

    One that cuts whole batches (`__getitems__`) still does, one that knows epochs (`in_epoch`) is a part in each, and
    the weights of its samples (`sample_weights`) are those of the part.
    """

    def __init__(self, dataset: Any, rows: torch.Tensor):
        self.dataset, self.rows = dataset, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.rows[index])]

    def __getattr__(self, name: str) -> Any:
        """Only asked for what the part has not: `__getitems__` too is there if the data set has it, or is not."""
        if name == "dataset" or (name.startswith("__") and name != "__getitems__"):  # while it is being unpickled, say
            raise AttributeError(name)
        found = getattr(self.dataset, name)
        if name == "__getitems__":
            return lambda indices: found(self._of_whole(indices))
        if name == "packed":
            return lambda index: found(int(self.rows[index]))
        if name == "in_epoch":
            return lambda epoch: Part(found(epoch), self.rows)
        if name == "sample_weights":
            return torch.as_tensor(found)[self.rows]
        return found

    def _of_whole(self, indices: Sequence[int]) -> list[int]:
        rows: list[int] = self.rows[torch.as_tensor(indices, dtype=torch.int64)].tolist()
        return rows
