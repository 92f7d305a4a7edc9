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
        positions: The local positions. If it is None, or if keys have another length, attention is not changed.
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
        if local is None or key.size(-2) != len(local):
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
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


def run_stages(stages: Sequence[nn.Module], inputs: Any, attention: LocalAttention, positions: range) -> Tensor:
    """Return the outputs of the positions, (N, L, ...). The first stage computes all positions.

    attention: the active mode. Its `positions` remain set, because backward may compute a stage again.
    """
    first, *others = stages
    attention.positions = None
    features: Tensor = call_model(first, inputs)[:, positions.start : positions.stop]  # (N, T, ...) -> (N, L, ...)
    attention.positions = positions
    for stage in others:
        has_positions = "first_position" in inspect.signature(stage.forward).parameters
        features = stage(features, **({"first_position": positions.start} if has_positions else {}))
    return features


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
