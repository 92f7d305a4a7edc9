"""The outputs and targets of some samples as named arrays with one row per sample."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import MappingKey, SequenceKey, tree_flatten_with_path

from runner.errors import JobFailed
from runner.input.pytree import register_types
from runner.objectives.supervised import resolve_class_dim

Columns = dict[str, np.ndarray[Any, Any]]  # arrays of shape (num_samples, ...) by name

INDEX, TARGET, PREDICTION, PROBABILITY, OUTPUT = "index", "target", "prediction", "probability", "output"


def columns_of(outputs: Any, targets: Any, indices: Sequence[int]) -> Columns:
    """Return the columns index, target, prediction, probability and output, in this order.

    Mappings and sequences have a column for each tensor, such as output.size. If a target is a class (integers in the
    output's shape without its dim of classes), `prediction` is the class of the largest output and `probability` its
    softmax probability. Raises JobFailed if a tensor does not have one row per sample.
    """
    found, expected = _named(outputs, len(indices), "outputs"), _named(targets, len(indices), "targets")
    classes = {path: _classify(found[path], target) for path, target in expected.items() if path in found}
    predicted = {path: pair for path, pair in classes.items() if pair is not None}
    columns = {INDEX: torch.tensor(indices, dtype=torch.int64)}
    columns |= {TARGET + path: tensor for path, tensor in expected.items()}
    columns |= {PREDICTION + path: classes for path, (classes, _) in predicted.items()}
    columns |= {PROBABILITY + path: probability for path, (_, probability) in predicted.items()}
    columns |= {OUTPUT + path: tensor for path, tensor in found.items()}
    return {name: _as_array(tensor) for name, tensor in columns.items()}


def _named(tree: Any, num_samples: int, what: str) -> dict[str, Tensor]:
    """Return the tensors by their path in the tree: "" for a single tensor, `.size` for a value of a mapping."""
    leaves, _ = tree_flatten_with_path(register_types(tree))
    named = {"".join(map(_key_text, path)): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
    for path, tensor in named.items():
        if not tensor.dim() or len(tensor) != num_samples:
            where = f"{what}{path}"
            raise JobFailed(
                f"{where} must have one row per sample, and has the shape {list(tensor.shape)} for {num_samples} "
                "samples"
            )
    return named


def _key_text(key: Any) -> str:
    if isinstance(key, MappingKey):
        return f".{key.key}"
    return f".{key.idx}" if isinstance(key, SequenceKey) else f".{getattr(key, 'name', key)}"


def _classify(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the classes of the largest outputs and their probabilities, or None if targets are not classes."""
    if target.is_floating_point() or not output.is_floating_point() or output.dim() != target.dim() + 1:
        return None
    try:
        dim = resolve_class_dim(output, target)
    except ValueError:  # ambiguous without the loss's class_dim
        return None
    if output.movedim(dim, -1).shape[:-1] != target.shape or output.shape[dim] == 1:
        return None
    wide = output.double() if output.dtype == torch.float64 else output.float()
    probability, classes = wide.softmax(dim).max(dim)
    return classes, probability


def _as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().cpu()
    if tensor.dtype in (torch.bfloat16, torch.float16):  # autocast's types; numpy has no bfloat16
        tensor = tensor.float()
    return tensor.contiguous().numpy()
