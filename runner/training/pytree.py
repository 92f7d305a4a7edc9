"""Batches of any structure: tuples, lists, mappings and dataclasses, nested, with tensors at the ends."""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import (
    SUPPORTED_NODES,
    MappingKey,
    register_dataclass,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)
from torch.utils.data import default_collate


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors at the ends, in order."""
    return [leaf for leaf in tree_leaves(known(tree)) if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The same structure with each tensor replaced; what is no tensor stays."""
    if type(tree) is tuple and len(tree) == 2 and all(isinstance(part, torch.Tensor) for part in tree):
        return function(tree[0]), function(tree[1])  # the usual batch, in each step
    return tree_map_only(torch.Tensor, function, known(tree))


def num_bytes(tree: Any) -> int:
    """Of the tensors at the ends."""
    return sum(tensor.nbytes for tensor in tensors(tree))


def num_rows(tree: Any) -> int:
    """The first dimension of the first tensor: how many samples a batch holds. 0 where there is no tensor."""
    return next((len(tensor) for tensor in tensors(tree) if tensor.dim()), 0)


def collate(samples: Sequence[Any]) -> Any:
    """Samples of one structure as one batch of that structure; as torch's default_collate, which knows no dataclass."""
    first = samples[0]
    if _is_dataclass(first):
        fields = (field.name for field in dataclasses.fields(first))
        return type(first)(**{name: collate([getattr(sample, name) for sample in samples]) for name in fields})
    if isinstance(first, Mapping) and any(map(_is_structure, first.values())):
        return {name: collate([sample[name] for sample in samples]) for name in first}
    if type(first) in (tuple, list) and any(map(_is_structure, first)):
        return type(first)(collate(list(parts)) for parts in zip(*samples, strict=True))
    return default_collate(list(samples))


def join(batches: Sequence[Any]) -> Any:
    """Batches of one structure as one batch, their rows after each other. Raises ValueError where they cannot be."""
    flat = [tree_flatten(known(batch)) for batch in batches]
    if any(structure != flat[0][1] for _, structure in flat):
        raise ValueError("its batches differ in structure")
    joined = []
    for parts in zip(*(leaves for leaves, _ in flat), strict=True):
        if not all(isinstance(part, torch.Tensor) and part.dim() for part in parts):
            raise ValueError(f"its batches hold {describe(parts[0])}, and no row for each sample")
        try:
            joined.append(torch.cat(parts))
        except RuntimeError:
            raise ValueError(f"the rows differ in shape, as {describe(parts[0])} and {describe(parts[-1])}") from None
    return tree_unflatten(joined, flat[0][1])


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """One batch for each of the sizes, their rows after each other in the given one: what `join` undoes.

    Raises ValueError where the batch has something else than a row for each.
    """
    leaves, structure = tree_flatten(known(batch))
    if not all(isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == sum(sizes) for leaf in leaves):
        raise ValueError(
            f"with reads_ahead every end of a batch must be a tensor with a row for each of its {sum(sizes)} samples, "
            f"but it is {describe(batch)}; leave reads_ahead out"
        )
    parts = [map(_aligned, leaf.split(list(sizes))) for leaf in leaves]
    return [tree_unflatten(each, structure) for each in zip(*parts, strict=True)]


def describe(tree: Any) -> str:
    """The structure in words: (tensor [3, 8, 8], {a: tensor [5], b: int})."""
    if isinstance(tree, torch.Tensor):
        return f"tensor {list(tree.shape)}"
    if _is_dataclass(tree):
        inside = (f"{field.name}: {describe(getattr(tree, field.name))}" for field in dataclasses.fields(tree))
        return f"{type(tree).__name__}({', '.join(inside)})"
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{name}: {describe(value)}" for name, value in tree.items()) + "}"
    if isinstance(tree, (tuple, list)):
        start, end = "()" if isinstance(tree, tuple) else "[]"
        return start + ", ".join(map(describe, tree)) + end
    return f"{type(tree).__name__} {list(tree.shape)}" if hasattr(tree, "shape") else type(tree).__name__


def known(tree: Any) -> Any:
    """The same object, its dataclasses and kinds of dict made known to torch's pytree functions."""
    if _is_dataclass(tree):
        if type(tree) not in SUPPORTED_NODES:
            register_dataclass(type(tree))
        for field in dataclasses.fields(tree):
            known(getattr(tree, field.name))
    elif isinstance(tree, Mapping):
        if isinstance(tree, (dict, UserDict)) and type(tree) not in SUPPORTED_NODES:
            register_pytree_node(
                type(tree), _flatten_mapping, _unflatten_mapping, flatten_with_keys_fn=_flatten_with_names
            )
        for value in tree.values():
            known(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            known(value)
    return tree


@dataclasses.dataclass(frozen=True)
class _Mapping:
    """What a mapping is but for its values: two of the same names are of one structure."""

    names: tuple[Any, ...]
    original: Any = dataclasses.field(compare=False, repr=False)


def _flatten_mapping(mapping: Any) -> tuple[list[Any], _Mapping]:
    return [*mapping.values()], _Mapping(tuple(mapping), mapping)


def _flatten_with_names(mapping: Any) -> tuple[list[tuple[Any, Any]], _Mapping]:
    return [(MappingKey(name), value) for name, value in mapping.items()], _Mapping(tuple(mapping), mapping)


def _unflatten_mapping(values: Iterable[Any], mapping: _Mapping) -> Any:
    """A copy, with whatever else the original holds."""
    made = copy.copy(mapping.original)
    made.update(zip(mapping.names, values, strict=True))
    return made


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """As tensors of their own begin: the last bit of a matrix product depends on it."""
    return tensor if tensor.data_ptr() % 64 == 0 else tensor.clone()


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_structure(value: Any) -> bool:
    return _is_dataclass(value) or isinstance(value, (Mapping, tuple, list))
