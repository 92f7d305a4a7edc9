"""Random functions that draw the smallest or the largest numbers, so that a forward skips all that it can skip."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.training.draws.functions import DrawMode
from runner.training.draws.generator import Rows

MAX_DRAWS = 10_000


class Extremes(DrawMode):
    """Draws only the smallest or the largest numbers, or raises RuntimeError if a forward draws until others occur."""

    def __init__(self, are_largest: bool, device: torch.device):
        super().__init__()
        self._keys = torch.zeros(1, 2, dtype=torch.int64, device=device)
        self._are_largest, self._num_draws = are_largest, 0

    def rows(
        self, function: Any, shape: Sequence[int], kwargs: Any, like: Tensor | None, in_order: bool
    ) -> Rows | None:
        self._num_draws += 1
        if self._num_draws > MAX_DRAWS:
            raise RuntimeError("the forward draws until other numbers occur")
        return None if in_order else _Constant(self._keys, torch.Size(shape), 0, are_largest=self._are_largest)


@dataclass(frozen=True, kw_only=True)
class _Constant(Rows):
    are_largest: bool

    def _words(self, size: int) -> Tensor:
        bits = -1 if self.are_largest else 0
        return torch.full(self.shape, bits, dtype=torch.int64 if size == 64 else torch.int32, device=self.keys.device)

    def bernoulli(self, probability: float) -> Tensor:
        return self.uniform(torch.float32) < probability
