"""Batches of any structure: nested tuples, lists, mappings and dataclasses, with tensors as leaves."""

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
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)
from torch.utils.data import default_collate

from runner.tensor_values import has_values


def leaves(tree: Any) -> list[Any]:
    """Return the leaves, in order."""
    found: list[Any] = tree_leaves(register_types(tree))
    return found


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors among the leaves, in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def named_tensors(tree: Any) -> dict[str, torch.Tensor]:
    """Return the tensors by their path: "" for a single tensor, `.size` in a mapping, `.0` in a sequence."""
    leaves: list[tuple[Any, Any]] = tree_flatten_with_path(register_types(tree))[0]
    names = ("".join(f".{dataclasses.astuple(key)[0]}" for key in path) for path, _ in leaves)
    return {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True) if isinstance(leaf, torch.Tensor)}


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Return the same structure with each tensor replaced; other leaves are unchanged."""
    return tree_map_only(torch.Tensor, function, register_types(tree))


def num_rows(tree: Any) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor; 0 without a tensor."""
    return next((len(tensor) for tensor in tensors(tree) if tensor.dim()), 0)


def collate(samples: Sequence[Any]) -> Any:
    """Combine samples into a batch of the same structure, like torch's default_collate, but also for dataclasses."""
    first = samples[0]
    if _is_dataclass(first):
        fields = (field.name for field in dataclasses.fields(first))
        return type(first)(**{name: collate([getattr(sample, name) for sample in samples]) for name in fields})
    if isinstance(first, Mapping) and any(map(_is_structure, first.values())):
        return {name: collate([sample[name] for sample in samples]) for name in first}
    if type(first) in (tuple, list) and any(map(_is_structure, first)):
        return type(first)(collate(list(parts)) for parts in zip(*samples, strict=True))
    return default_collate(list(samples))


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Split a batch into consecutive batches of the given sizes. Raise ValueError if a leaf lacks a row per sample."""
    leaves, structure = tree_flatten(register_types(batch))
    if not all(isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == sum(sizes) for leaf in leaves):
        raise ValueError(
            f"with reads_ahead every leaf of a batch must be a tensor with a row for each of its {sum(sizes)} samples, "
            f"but it is {describe(batch)}; leave reads_ahead out"
        )
    parts = [map(_align, leaf.split(list(sizes))) for leaf in leaves]
    return [tree_unflatten(each, structure) for each in zip(*parts, strict=True)]


def describe(tree: Any) -> str:
    """Describe the structure, for example (tensor [3, 8, 8], {a: tensor [5], b: int})."""
    if isinstance(tree, torch.Tensor):
        return f"tensor {list(tree.shape)}"
    if _is_dataclass(tree):
        inside = (f"{field.name}: {describe(getattr(tree, field.name))}" for field in dataclasses.fields(tree))
        return f"{type(tree).__name__}({', '.join(inside)})"
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{name}: {describe(value)}" for name, value in tree.items()) + "}"
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        inside = (f"{name}: {describe(value)}" for name, value in zip(tree._fields, tree, strict=True))
        return f"{type(tree).__name__}({', '.join(inside)})"
    if isinstance(tree, (tuple, list)):
        start, end = "()" if isinstance(tree, tuple) else "[]"
        return start + ", ".join(map(describe, tree)) + end
    return f"{type(tree).__name__} {list(tree.shape)}" if hasattr(tree, "shape") else type(tree).__name__


def register_types(tree: Any) -> Any:
    """Register the dataclasses and dict classes of a tree with torch's pytree functions. Return the same tree."""
    if _is_dataclass(tree):
        if type(tree) not in SUPPORTED_NODES:
            register_dataclass(type(tree))
        for field in dataclasses.fields(tree):
            register_types(getattr(tree, field.name))
    elif isinstance(tree, Mapping):
        if isinstance(tree, (dict, UserDict)) and type(tree) not in SUPPORTED_NODES:
            register_pytree_node(
                type(tree),
                lambda mapping: ([*mapping.values()], _Mapping(tuple(mapping), mapping)),
                _unflatten_mapping,
                flatten_with_keys_fn=lambda mapping: (
                    [(MappingKey(name), value) for name, value in mapping.items()],
                    _Mapping(tuple(mapping), mapping),
                ),
            )
        for value in tree.values():
            register_types(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            register_types(value)
    return tree


@dataclasses.dataclass(frozen=True)
class _Mapping:
    """A mapping without its values. Two mappings with the same names have the same structure."""

    names: tuple[Any, ...]
    original: Any = dataclasses.field(compare=False, repr=False)


def _unflatten_mapping(values: Iterable[Any], mapping: _Mapping) -> Any:
    """Return a copy with new values, and with all other attributes of the original."""
    changed = copy.copy(mapping.original)
    changed.update(zip(mapping.names, values, strict=True))
    return changed


def _align(tensor: torch.Tensor) -> torch.Tensor:
    """Align the data like that of a new tensor: the last bit of a matrix product depends on the alignment."""
    return tensor if not has_values(tensor) or tensor.data_ptr() % 64 == 0 else tensor.clone()


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_structure(value: Any) -> bool:
    return _is_dataclass(value) or isinstance(value, (Mapping, tuple, list))
