"""`freeze`: parameters that are not trained, and normalisation layers that keep their statistics with them."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from runner.errors import InputError
from runner.training.names import counted, names_of, near

_LISTED = 8


@dataclass(frozen=True)
class Frozen:
    """What a model's patterns have frozen."""

    names: list[str]  # of parameters, one each
    num_parameters: int  # of the model
    num_layers: int  # that keep their statistics

    def describe(self) -> list[str]:
        """Lines of a run's header."""
        if not self.names:
            return []
        layers = f" and the statistics of {self.num_layers} normalisation layers" if self.num_layers else ""
        total = f"{len(self.names):,} of {self.num_parameters:,} parameters{layers}"
        return [f"frozen   {total}: {counted(self.names, _LISTED)}"]


def freeze(patterns: Sequence[str], module: nn.Module) -> Frozen:
    """Freeze the parameters whose full name a pattern matches anywhere; of a tied one, any of its names.

    A normalisation layer with running statistics whose parameters are all among them (or one without parameters, all
    of whose buffers match) stays in evaluation mode: it neither updates its statistics nor uses those of a batch.
    Raises InputError for a pattern that matches nothing, and where nothing would be left to train.
    """
    names = names_of(list(module.named_parameters(remove_duplicate=False)))
    known = [name for aliases in names.values() for name in aliases]
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, _NormBase)}
    plain = [name for name, layer in layers.items() if not list(layer.parameters()) and list(layer.buffers())]
    buffers = {name: [f"{name}.{key}" for key, _ in layers[name].named_buffers()] for name in plain}
    for index, pattern in enumerate(patterns):
        if not _matches([pattern], [*known, *(key for held in buffers.values() for key in held)]):
            raise InputError(f"freeze.{index}={pattern} matches no parameter's name; {near(pattern, known)}")
    frozen = {parameter: aliases for parameter, aliases in names.items() if _matches(patterns, aliases)}
    if patterns and not any(p.requires_grad and p not in frozen for p in names):
        raise InputError(f"freeze={list(patterns)} leaves no parameter to train; let one be matched by no pattern")
    for parameter in frozen:
        parameter.requires_grad_(False)
    still = [
        layer
        for name, layer in layers.items()
        if list(layer.buffers())
        and (
            all(_matches(patterns, [key]) for key in buffers[name])
            if name in buffers
            else all(parameter in frozen for parameter in layer.parameters())
        )
    ]
    for layer in still:
        # Of the object, so that it outlives a change of its class, as by fully_shard and SyncBatchNorm; and a partial
        # of it, so that a copy of the layer has one of its own.
        layer.train = functools.partial(_stay, layer)  # type: ignore[method-assign, assignment]
        layer.train()
    return Frozen([aliases[0] for aliases in frozen.values()], len(names), len(still))


def moving_batch_norm(module: nn.Module) -> bool:
    """Whether a layer of BatchNorm normalises by batches while the module trains."""
    return any(isinstance(layer, _BatchNorm) and layer.training for layer in module.modules())


def _matches(patterns: Sequence[str], names: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns for name in names)


def _stay(layer: nn.Module, mode: bool = True) -> nn.Module:
    """What train() does to a layer whose statistics stay: nothing of what it is asked."""
    return nn.Module.train(layer, False)
