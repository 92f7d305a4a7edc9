"""Regular expressions of the full names of parameters: their matches, messages about them, and `freeze`."""

import functools
import re
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from runner.distributed.sync_batch_norm import is_batch_norm
from runner.errors import InputError, nearest

T = TypeVar("T", bound=Tensor)


def names_of(tensors: Iterable[tuple[str, T]]) -> dict[T, list[str]]:
    """Return all names of each parameter or buffer: several if modules share it."""
    names: dict[T, list[str]] = {}
    for name, tensor in tensors:
        names.setdefault(tensor, []).append(name)
    return names


def first_match(patterns: Sequence[str], names: Sequence[str]) -> int | None:
    """Return the index of the first pattern that matches one of a parameter's names, or None."""
    matching = (n for n, pattern in enumerate(patterns) if any(re.search(pattern, name) for name in names))
    return next(matching, None)


def near(pattern: str, known: Sequence[str]) -> str:
    """Return the end of a message: the names that are similar to the pattern, or else the first names."""
    pieces = dict.fromkeys(piece for name in known for piece in (name, *name.split(".")))
    like = nearest(re.sub(r"[\^$\\*+?()]", "", pattern), list(pieces))
    similar = [name for name in known if like is not None and like in (name, *name.split("."))]
    return f"near it: {counted(similar)}" if similar else f"the names are {counted(known)}"


def counted(names: Sequence[str], most: int = 4, between: str = ", ") -> str:
    """Return the first names, and the number of the others."""
    return between.join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def freeze(patterns: Sequence[str], module: nn.Module) -> list[str]:
    """Freeze the parameters whose full name matches a pattern (re.search), and return a log line.

    A tied parameter has several names. A normalization layer with running statistics stays in evaluation mode if all
    its parameters are frozen, or if it has no parameters and all its buffers match. Raises InputError for a pattern
    that matches nothing, and if no parameter remains to be trained.
    """
    names = names_of(list(module.named_parameters(remove_duplicate=False)))
    known = [name for aliases in names.values() for name in aliases]
    # The names by which the statistics of a normalization layer are frozen: its parameters, or else its buffers.
    keys_of = {
        layer: [f"{name}.{key}" for key, _ in [*layer.named_parameters()] or layer.named_buffers()]
        for name, layer in module.named_modules()
        if (isinstance(layer, _NormBase) or is_batch_norm(layer)) and [*layer.buffers()]
    }
    for index, pattern in enumerate(patterns):
        if first_match([pattern], [*known, *chain.from_iterable(keys_of.values())]) is None:
            raise InputError(f"freeze.{index}={pattern} matches no parameter's name; {near(pattern, known)}")
    frozen = {parameter: aliases for parameter, aliases in names.items() if first_match(patterns, aliases) is not None}
    if patterns and not any(p.requires_grad and p not in frozen for p in names):
        raise InputError(f"freeze={list(patterns)} leaves no parameter to train; leave at least one unmatched")
    for parameter in frozen:
        parameter.requires_grad_(False)
    frozen_layers = [
        layer for layer, keys in keys_of.items() if all(first_match(patterns, [key]) is not None for key in keys)
    ]
    for layer in frozen_layers:
        keep_in_evaluation_mode(layer)
    if not frozen:
        return []
    statistics = f" and the statistics of {len(frozen_layers)} normalization layers" if frozen_layers else ""
    listed = counted([aliases[0] for aliases in frozen.values()], 8)
    return [f"frozen   {len(frozen):,} of {len(names):,} parameters{statistics}: {listed}"]


def keep_in_evaluation_mode(module: nn.Module) -> None:
    """Switch the module to evaluation mode, and let it ignore `train()` from now on."""
    # An attribute of the instance survives a change of its class, as by fully_shard and SyncBatchNorm. A partial is
    # copied with its module, unlike a closure.
    module.train = functools.partial(_stay_in_evaluation_mode, module)  # type: ignore[method-assign, assignment]
    module.train()


def _stay_in_evaluation_mode(layer: nn.Module, mode: bool = True) -> nn.Module:
    """Ignore `train()`: the layer stays in evaluation mode."""
    return nn.Module.train(layer, False)
