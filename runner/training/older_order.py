"""The order of samples of a run that was begun when an epoch's order was still drawn, and stored, as a whole.

It takes the time and the memory of all samples in every epoch. A run that was begun with it goes on with it: else it
would read some samples of an epoch twice and others not at all, and would not end where it would have.
"""

import numpy as np
import torch


def older_order(num_samples: int, weights: torch.Tensor | None, random: torch.Generator) -> torch.Tensor:
    """(num_samples,) indices. weights: as of `Sampler`; random: seeded by seed and epoch."""
    if weights is None:
        return torch.randperm(num_samples, generator=random)
    ends = torch.from_numpy(np.cumsum(weights.numpy()))
    places = torch.rand(num_samples, dtype=torch.float64, generator=random) * ends[-1]
    drawn = torch.searchsorted(ends, places, right=True)
    return drawn.clamp_(max=int(weights.nonzero()[-1]))
