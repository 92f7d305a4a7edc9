"""Activation checkpointing: the activations of a block are not kept for backward, but recomputed there."""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from runner.distributed.module_class import subclass_of
from runner.errors import InputError
from runner.training.model.forward_state import ForwardState
from runner.training.model.submodules import stages_or_blocks, whole_modules

Extent = str | int  # none, full, or n: every nth block


def checkpoint_activations(model: nn.Module, extent: Extent) -> None:
    """Recompute the model's blocks (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).

    Names, parameters and hooks stay the same, and so do all numbers: dropout draws the same masks again, and buffers
    change once. Raises InputError if `extent` is larger than the number of blocks.
    """
    for block in blocks_to_checkpoint(model, extent):
        # Changes the class instead of the object's `forward`, because DataParallel copies the object, and the copy
        # would call the `forward` of the original.
        kind: Any = type(block)
        block.__class__ = subclass_of(kind, _Checkpointed)


def blocks_to_checkpoint(model: nn.Module, extent: Extent) -> list[nn.Module]:
    """Return the modules that forward calls in the model's stages or children, and that have submodules and parameters.

    Recomputing a single layer would free nothing, because it keeps its input.
    """
    if extent == "none":
        return []
    blocks = [
        module
        for stage in stages_or_blocks(model)
        for module in whole_modules(model, stage)
        if any(True for _ in module.children()) and any(True for _ in module.parameters())
    ]
    every = 1 if extent == "full" else int(extent)
    if every > len(blocks):
        raise InputError(
            f"activation_checkpointing={extent}: the model has only {len(blocks)} blocks of several modules to "
            "recompute; try activation_checkpointing=none"
        )
    return list(dict.fromkeys(blocks))[every - 1 :: every]


class _Checkpointed(nn.Module):
    """A block whose activations are recomputed; it is combined with the class of the block."""

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


class _Recomputing(AbstractContextManager[None]):
    """Restores the buffers and the torch function modes of the forward, which torch.utils.checkpoint does not restore.

    Afterwards the block has its current state again, so that BatchNorm counts a batch once.
    """

    def __init__(self, block: nn.Module):
        self._modes = _get_current_function_mode_stack()
        self._block, self._before = block, ForwardState(block)

    def __enter__(self) -> None:
        self._entered = ExitStack()
        self._entered.callback(ForwardState(self._block).restore)
        self._before.restore()
        active = _get_current_function_mode_stack()
        for mode in self._modes:
            if mode not in active:
                self._entered.enter_context(mode)

    def __exit__(self, *raised: Any) -> None:
        self._entered.close()
