"""Passes of a dry run that find the order of the samples in draws, and compare samples together and apart."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from runner.distributed.sync_batch_norm import has_batch_norm
from runner.input.batch import MicroBatch
from runner.objectives.losses import Loss
from runner.objectives.objective import Objective
from runner.training.draws.following import Draws
from runner.training.model.deferred_init import probe
from runner.training.model.forward_state import restoring_state

CPU = torch.device("cpu")
Read = Callable[[Sequence[int]], Any]  # returns the data of the samples with these indices


def find_order(draws: Draws, module: nn.Module, objective: Objective, read: Read) -> str:
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

    trial = replace(draws, device=CPU, follows=True, find_repeats=find, _has_warned=True)
    with restoring_state(module, objective), torch.no_grad():
        probe(module, _measure, trial, objective, MicroBatch(read([0, 0, 1]), [0, 0, 1]))
    for (name, dims), orders in found.items():
        if len(orders) > 1:
            return f"{name} draws tensors of {dims} dims with the samples in different orders"
        draws.repeats[name, dims] = orders.pop()
    return ""


def compare_apart(draws: Draws, module: nn.Module, objective: Objective, read: Read, pair: Sequence[int]) -> str:
    """Return a problem if the training losses of two samples differ from those of each sample with the same draws.

    BatchNorm and objectives that gather samples combine the samples, so they are not compared.
    """
    if has_batch_norm(module) or objective.gathers:
        return ""
    trial = replace(draws, device=CPU, follows=True, _has_warned=True)

    def measure(*places: int) -> Tensor:
        micro_batch = MicroBatch(read([pair[place] for place in places]), places)
        with restoring_state(module, objective), torch.no_grad():
            losses = probe(module, _measure, trial, objective, micro_batch)
        weights = [torch.as_tensor(loss.weight, dtype=torch.float64) for loss in losses]
        rows = [torch.stack([loss.sum, weight]).reshape(2, -1) for loss, weight in zip(losses, weights, strict=True)]
        return torch.cat(rows, dim=1)

    both, apart = measure(0, 1), measure(0) + measure(1)
    if torch.allclose(both, apart, rtol=1e-3, atol=1e-6, equal_nan=True):
        return ""
    together, separate = (float((totals[0] / totals[1]).sum()) for totals in (both, apart))
    return (
        f"the training loss of two samples is {together:.4g}, but the mean of their separate losses is {separate:.4g}: "
        "a draw does not follow the samples, or the model or the objective combines samples"
    )


def _measure(model: nn.Module, trial: Draws, objective: Objective, micro_batch: MicroBatch) -> list[Loss]:
    losses = []
    for part, name in enumerate(objective.losses):
        with trial.following(micro_batch, part, key=0):
            losses.append(objective.measure(model, name, micro_batch))
    return losses
