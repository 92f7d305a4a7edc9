"""The stages of a model on some of the positions of each sample, with attention to all positions."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from runner.input.batch import MicroBatch
from runner.input.sampler import split_range
from runner.objectives.supervised import call_model
from runner.tensor_values import has_values


def split_positions(total: int, num_ranks: int) -> list[range]:
    """Return the contiguous positions of each rank; their numbers differ by at most one.

    Raises ValueError if a rank would have fewer than two: models of transformers attend from one position to all keys.
    """
    least = 2 * num_ranks
    if total < least:
        raise ValueError(f"parallel.sequence={num_ranks} needs samples of at least {least} positions, not {total}")
    return [split_range(range(total), rank, num_ranks) for rank in range(num_ranks)]


def of_positions(micro_batch: MicroBatch, positions: range) -> MicroBatch:
    """Return the micro-batch with the targets of these positions only, and with all inputs."""
    inputs, targets = micro_batch.data
    return replace(micro_batch, data=(inputs, targets[:, positions.start : positions.stop]))


class LocalAttention(TorchFunctionMode):
    """Lets F.scaled_dot_product_attention attend from the local positions to all positions.

    Args:
        gather: Returns keys and values of all positions, (N, H, T, D), given those of the local positions.

    Attributes:
        positions: The local positions. If it is None, attention is not changed.
    """

    def __init__(self, gather: Callable[[Tensor], Tensor]):
        super().__init__()
        self._gather = gather
        self.positions: range | None = None
        self._mask: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:  # (N, H, L, D) each -> (N, H, L, D)
        local = self.positions
        if local is None:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        if not len(local) == query.size(-2) == key.size(-2):
            raise ValueError(
                f"parallel.sequence does not support attention of {query.size(-2)} queries to {key.size(-2)} keys in a "
                f"part of {len(local)} positions"
            )
        if attn_mask is not None:
            raise ValueError("parallel.sequence does not support a mask of attention, such as of padded positions")
        both = self._gather(torch.cat([key, value], -1))  # one collective
        if is_causal:
            both = both[..., : local.stop, :]
            attn_mask = self._causal_mask(query, local) if local.start else None
            is_causal = attn_mask is None
        key, value = both.split([key.size(-1), value.size(-1)], -1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)

    def _causal_mask(self, query: Tensor, local: range) -> Tensor | None:
        """Return the mask of the local positions, (L, stop); None if only shapes matter, as in the plan of a GPU."""
        shape = (len(local), local.stop)
        if query.is_cuda:  # its kernels need no mask in memory
            with _disable_current_modes():
                return causal_lower_right(*shape) if has_values(query) else None
        if self._mask is None or self._mask.shape != shape or self._mask.dtype != query.dtype:
            self._mask = query.new_full(shape, -math.inf).triu(local.start + 1)  # one for all layers
        return self._mask


def possible_pairs(outputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return outputs and targets with which a function that is no sum over the positions differs for their parts.

    The outputs are those of the model, whose positions may be almost equal before training, random ones, and for
    targets that are classes those of a model that is right except for the first position, with no target ignored. The
    fake tensors of a plan have no values.
    """
    if not has_values(outputs) or not outputs.is_floating_point():
        return [(outputs, targets)]
    generator = torch.Generator().manual_seed(0)
    are_probabilities = bool(((outputs >= 0) & (outputs <= 1)).all())
    draw = torch.rand if are_probabilities else torch.randn
    pairs = [(outputs, targets), (draw(outputs.shape, generator=generator, dtype=outputs.dtype), targets)]
    if outputs.dim() == targets.dim() + 1 and not targets.is_floating_point():
        num_classes = outputs.size(-1)
        classes = targets.clamp(0, num_classes - 1)
        predicted = classes.long()
        predicted[:, 0] = (predicted[:, 0] + 1) % num_classes
        pairs.append((F.one_hot(predicted, num_classes).to(outputs.dtype), classes))
    return pairs


def run_stages(stages: Sequence[nn.Module], inputs: Any, attention: LocalAttention, positions: range) -> Tensor:
    """Return the outputs of the positions, (N, L, ...). The first stage computes all positions.

    attention: the active mode. Its `positions` remain set, because backward may compute a stage again.
    """
    first, *others = stages
    attention.positions = None
    features: Tensor = call_model(first, inputs)[:, positions.start : positions.stop]  # (N, T, ...) -> (N, L, ...)
    attention.positions = positions
    for stage in others:
        options = {"first_position": positions.start} if _accepts_first_position(stage) else {}
        features = stage(features, **options)
    return features


def _accepts_first_position(stage: nn.Module) -> bool:
    """Return True if the stage's forward names this keyword; that of a subclass may pass all arguments on."""
    forwards = [vars(kind)["forward"] for kind in type(stage).__mro__ if "forward" in vars(kind)]
    return any("first_position" in inspect.signature(forward).parameters for forward in forwards)


def run_slices(stages: Sequence[nn.Module], inputs: Any, slices: Sequence[range], total: int) -> list[Tensor]:
    """Return the outputs of each slice of the positions, as ranks compute them, without a process group."""
    kept: list[Tensor] = []

    def keep(local: Tensor) -> Tensor:
        kept.append(local)
        return local

    with (recording := LocalAttention(keep)):
        run_stages(stages, inputs, recording, range(total))
    outputs = []
    for positions in slices:
        remaining = iter(kept)

        def recall(local: Tensor, positions: range = positions, remaining: Any = remaining) -> Tensor:
            whole: Tensor = next(remaining)
            return torch.cat([whole[..., : positions.start, :], local, whole[..., positions.stop :, :]], -2)

        with (attention := LocalAttention(recall)):
            outputs.append(run_stages(stages, inputs, attention, positions))
    return outputs
