"""Activation checkpointing: the activations of a block are not kept for backward, but recomputed there."""

import functools
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from runner.errors import InputError
from runner.training.model.submodules import called_modules, stages_or_children

Extent = str | int  # none, full, or n: every nth block


def checkpoint_activations(model: nn.Module, extent: Extent) -> None:
    """Recompute the model's blocks (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).

    Names, parameters and hooks stay the same, and so do all numbers: dropout draws the same masks again, and BatchNorm
    updates its running statistics once. Raises InputError if the model has no such block, or fewer than n.
    """
    for block in blocks_to_checkpoint(model, extent):
        # Changes the class instead of the object's `forward`, because a copy of the object, as DataParallel makes one,
        # would call the `forward` of the original.
        kind: Any = type(block)
        block.__class__ = _checkpointed(kind)


def blocks_to_checkpoint(model: nn.Module, extent: Extent) -> list[nn.Module]:
    """Return modules that forward calls, in the model's stages or among its children, and that contain modules.

    Recomputing a single layer would free nothing, because it keeps its input.
    """
    if extent == "none":
        return []
    blocks = [
        module
        for stage in stages_or_children(model)
        for module in called_modules(model, stage)
        if any(True for _ in module.children()) and any(True for _ in module.parameters())
    ]
    every = 1 if extent == "full" else int(extent)
    if every > len(blocks):
        raise InputError(
            f"activation_checkpointing={extent}: the model has only {len(blocks)} blocks of several modules to "
            "recompute; try activation_checkpointing=none"
        )
    return list(dict.fromkeys(blocks))[every - 1 :: every]


@functools.cache
def _checkpointed(kind: Any) -> type[nn.Module]:
    class Checkpointed(kind):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return super().forward(*args, **kwargs)
            # The contexts of the forward, and of the recomputation in backward.
            return checkpoint(
                super().forward,
                *args,
                use_reentrant=False,
                context_fn=lambda: (nullcontext(), _Recomputing(self)),
                **kwargs,
            )

    Checkpointed.__name__, Checkpointed.__qualname__ = kind.__name__, kind.__qualname__
    Checkpointed.__module__ = kind.__module__
    return Checkpointed


class _Recomputing(AbstractContextManager[None]):
    """Restores the torch function modes of the forward, of which torch.utils.checkpoint restores only autocast.

    It also lets BatchNorm normalize as in the forward without counting the batch again. A schedule that computes the
    gradients of inputs and of weights separately recomputes twice, and enters it each time.
    """

    def __init__(self, block: nn.Module):
        self._block = block
        self._modes = _get_current_function_mode_stack()

    def __enter__(self) -> None:
        layers = [layer for layer in self._block.modules() if isinstance(layer, _BatchNorm)]
        self._statistics = [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers()]
        statistics = {id(buffer) for buffer, _ in self._statistics}
        self._others = [(name, b, b._version) for name, b in self._block.named_buffers() if id(b) not in statistics]
        self._entered = ExitStack()
        active = _get_current_function_mode_stack()
        for mode in self._modes:
            if mode not in active:
                self._entered.enter_context(mode)

    def __exit__(self, *raised: Any) -> None:
        """Restore BatchNorm's state, also after the exception that ends a recomputation early."""
        self._entered.close()
        for buffer, before in self._statistics:
            buffer.data.copy_(before)  # without a change of the version, because autograd has saved the buffer
        if changed := [name for name, buffer, version in self._others if buffer._version != version]:
            raise ValueError(
                f"activation_checkpointing: {type(self._block).__name__} changes its buffer {changed[0]} in forward, "
                "which would happen twice; try activation_checkpointing=none"
            )
