"""The outputs and targets of some samples as named arrays, a row for each sample."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import MappingKey, SequenceKey, tree_flatten_with_path

from runner.training.pytree import known
from runner.training.supervised import settle_class_dim

Columns = dict[str, np.ndarray[Any, Any]]  # by name: (number of samples, ...) each

INDEX, TARGET, PREDICTION, PROBABILITY, OUTPUT = "index", "target", "prediction", "probability", "output"


def columns_of(outputs: Any, targets: Any, indices: Sequence[int]) -> Columns:
    """Index, target, prediction, probability and output, in this order.

    What is a mapping or a sequence has a column for each tensor in it, as output.size. Where a target is a class (whole
    numbers in a shape that the output has besides its classes), `prediction` is the class of the largest output, and
    `probability` what softmax gives it. Raises ValueError for a tensor that has not a row for each sample.
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
    """The tensors by where they are in the tree: "" for a tensor alone, `.size` in a mapping."""
    leaves, _ = tree_flatten_with_path(known(tree))
    named = {"".join(map(_word, path)): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
    for path, tensor in named.items():
        if not tensor.dim() or len(tensor) != num_samples:
            where = f"{what}{path}"
            raise ValueError(
                f"{where} is of shape {list(tensor.shape)} for {num_samples} samples, and must have a row for each"
            )
    return named


def _word(key: Any) -> str:
    if isinstance(key, MappingKey):
        return f".{key.key}"
    return f".{key.idx}" if isinstance(key, SequenceKey) else f".{getattr(key, 'name', key)}"


def _classify(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor] | None:
    """The classes that the outputs are largest for, and their probabilities, both of the target's shape."""
    if target.is_floating_point() or not output.is_floating_point() or output.dim() != target.dim() + 1:
        return None
    try:
        dim = settle_class_dim(output, target)
    except ValueError:  # it may be either dim, and the loss was told which
        return None
    if output.movedim(dim, -1).shape[:-1] != target.shape or output.shape[dim] == 1:
        return None
    wide = output.double() if output.dtype == torch.float64 else output.float()
    probability, classes = wide.softmax(dim).max(dim)
    return classes, probability


def _as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().cpu()
    if tensor.dtype in (torch.bfloat16, torch.float16):  # of autocast; there is no bfloat16 in numpy
        tensor = tensor.float()
    return tensor.contiguous().numpy()
