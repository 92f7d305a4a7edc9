"""A dry run that finds the order of the samples in the tensors that random functions receive."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from runner.input.batch import MicroBatch
from runner.objectives.objective import Objective
from runner.training.components import Components
from runner.training.draws.following import Draws
from runner.training.model.deferred_init import probe
from runner.training.model.forward_state import restoring_state


def find_order(draws: Draws, components: Components) -> str:
    """Set `draws.repeats`. Return why a draw cannot follow the samples, or "".

    The batch is two copies of a sample and another sample. The copies have the same random numbers, so that their rows
    are equal in each tensor that a random function receives, also after normalization over the batch. If the rows are
    not equal when each sample has adjacent rows, as in (N * heads, L, L), they may be in another order.
    """
    if max((shape[draws.sample_dims[name, len(shape)]] for name, shape in draws.of_samples), default=1) < 2:
        return ""
    found: dict[tuple[str, int], set[int]] = {}

    def find(kind: tuple[str, int], width: int, dim: int, like: Tensor) -> int:
        rows = like.detach().movedim(dim, 0).reshape(3 * width, -1).double()
        tolerance = 1e-5 * float(rows.nan_to_num(0, 0, 0).abs().max()) if rows.numel() else 0.0

        def are_equal(repeats: int) -> bool:
            first, second, _ = rows.unflatten(0, (repeats, 3, -1)).unbind(1)
            return torch.allclose(first, second, rtol=0, atol=tolerance, equal_nan=True)

        repeats = next((n for n in range(1, width + 1) if width % n == 0 and are_equal(n)), 1)
        found.setdefault(kind, set()).add(0 if repeats == width else repeats)
        return repeats

    module, objective = components.module, components.objective
    trial = replace(draws, follows=True, find_repeats=find, _has_warned=True)
    with restoring_state(module, objective), torch.no_grad():
        probe(module, _measure, trial, objective, components.samples.batch([0, 0, 1]))
    for (name, dims), orders in found.items():
        if len(orders) > 1:
            return f"{name} draws tensors of {dims} dims with the samples in different orders"
        draws.repeats[name, dims] = orders.pop()
    return ""


def _measure(model: nn.Module, trial: Draws, objective: Objective, micro_batch: MicroBatch) -> None:
    for part, name in enumerate(objective.losses):
        with trial.following(micro_batch, part, key=0):
            objective.measure(model, name, micro_batch)
