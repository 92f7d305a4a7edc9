"""Activation checkpointing: what a block computes in forward is not kept for backward, but computed again there."""

import functools
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from runner.errors import InputError
from runner.training.parts import stages_or_children, what_forward_calls

Extent = str | int  # none, full, or n: every nth block


def checkpoint_activations(model: nn.Module, extent: Extent) -> None:
    """Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. Names, parameters and hooks stay as they are.

    The numbers are those of the run without: dropout draws the same masks again, and the running statistics of
    BatchNorm move once. Raises InputError where the model has no such block, or fewer than every nth asks for.
    """
    for block in blocks_to_checkpoint(model, extent):
        # The class and not `forward` of the object, which DataParallel would copy with the object that it belongs to.
        kind: Any = type(block)
        block.__class__ = _checkpointed(kind)


def blocks_to_checkpoint(model: nn.Module, extent: Extent) -> list[nn.Module]:
    """Modules that forward calls: those of the model's stages, or its children, which are made of modules themselves.

    To compute a single layer again would free nothing, since what it keeps is its input.
    """
    if extent == "none":
        return []
    blocks = [
        module
        for part in stages_or_children(model)
        for module in what_forward_calls(model, part)
        if any(True for _ in module.children()) and any(True for _ in module.parameters())
    ]
    every = 1 if extent == "full" else int(extent)
    if not blocks:
        raise InputError(
            f"activation_checkpointing={extent}: the model has no block of several modules to compute again; "
            "try activation_checkpointing=none"
        )
    if every > len(blocks):
        raise InputError(
            f"activation_checkpointing={extent} must be at most the {len(blocks)} blocks of the model; try full"
        )
    return list(dict.fromkeys(blocks))[every - 1 :: every]


@functools.cache
def _checkpointed(kind: Any) -> type[nn.Module]:
    class Checkpointed(kind):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return super().forward(*args, **kwargs)
            contexts = functools.partial(_contexts, self)
            return checkpoint(super().forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    Checkpointed.__name__, Checkpointed.__qualname__ = kind.__name__, kind.__qualname__
    Checkpointed.__module__ = kind.__module__
    return Checkpointed


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Of the forward in its turn, and of the one in backward."""
    return nullcontext(), _Recomputing(block)


class _Recomputing(AbstractContextManager[None]):
    """Under what changed torch's functions in forward, which torch.utils.checkpoint brings back for autocast alone.

    Lets BatchNorm normalise as it did, but not count the batch a second time. Entered once for each recomputation: a
    schedule that takes the gradients of inputs and of weights apart has two.
    """

    def __init__(self, block: nn.Module):
        self._block = block
        self._modes = _get_current_function_mode_stack()
        self._layers = [part for part in block.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]

    def __enter__(self) -> None:
        self._momenta = [layer.momentum for layer in self._layers]
        counts = [layer.num_batches_tracked for layer in self._layers]
        self._counts = [(count, count.clone()) for count in counts if count is not None]
        own = {id(buffer) for layer in self._layers for buffer in layer.buffers()}
        self._others = [(name, b, b._version) for name, b in self._block.named_buffers() if id(b) not in own]
        for layer in self._layers:
            layer.momentum = 0.0  # and not without statistics: what autograd keeps must be the same
        self._entered = ExitStack()
        active = _get_current_function_mode_stack()
        for mode in self._modes:
            if mode not in active:
                self._entered.enter_context(mode)

    def __exit__(self, *raised: Any) -> None:
        """By an exception too: recomputing is cut short when backward has what it needs."""
        self._entered.close()
        for layer, momentum in zip(self._layers, self._momenta, strict=True):
            layer.momentum = momentum
        for count, before in self._counts:
            count.copy_(before)
        if moved := [name for name, buffer, version in self._others if buffer._version != version]:
            raise ValueError(
                f"activation_checkpointing: {type(self._block).__name__} changes its buffer {moved[0]} in forward, "
                "which would happen twice; try activation_checkpointing=none"
            )
