"""Weights from a file or a checkpoint, read tensor by tensor: names and shapes first, and code is never executed."""

import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.checkpoints.saved_state import SavedState, without_extra_state
from runner.checkpoints.shard_file import SavedTensor, open_shards

SAFETENSORS, PICKLED = (".safetensors",), (".pt", ".pth", ".bin", ".ckpt")
NESTED = ("model", "state_dict")  # the keys under which training programs save a state dict among other objects
FIX = "save only the state dict, with torch.save(model.state_dict(), FILE)"


def open_weights(path: Path) -> dict[str, SavedTensor]:
    """Open a file of weights, or a verified checkpoint's directory, of which the evaluated weights are read.

    Extra states of modules (`get_extra_state`) are left out. Raise ValueError if the file contains no weights, is
    truncated, or cannot be read without executing code.
    """
    if path.is_dir():
        tensors = SavedState.open(path).evaluated().model()
    elif path.suffix in SAFETENSORS:
        tensors = open_shards([path])
    elif path.suffix in PICKLED:
        tensors = {name: SavedTensor.of(tensor) for name, tensor in _state_dict(_load(path)).items()}
    else:
        raise ValueError(f"the suffix is not that of a weights file, one of {', '.join((*SAFETENSORS, *PICKLED))}")
    return without_extra_state(tensors)


def _load(path: Path) -> Any:
    """Return the content of a file of torch.save, mapped into memory unless torch older than 1.6 has written it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about TorchScript programs and pickle protocols, which are then refused
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch's unpickler may raise anything for a file of another kind
        text = str(error)
    if found := re.search(r"GLOBAL (\S+)", text):
        raise ValueError(f"it contains {found[1]}, which is code and is not executed; {FIX}")
    reason = next((line for line in text.splitlines() if line.strip()), "it is empty")
    raise ValueError(f"it is not a file of torch.save, or it is truncated ({reason[:80]}); {FIX}")


def _state_dict(content: Any) -> dict[str, Tensor]:
    """Return the state dict at the top of the content or under one of NESTED, without extra states of modules.

    Raise ValueError if there is none.
    """
    found = content if isinstance(content, Mapping) else {}
    nested = [found[key] for key in NESTED if isinstance(found.get(key), Mapping)]
    state = nested[0] if nested else found
    if len(nested) > 1 or not state:
        raise ValueError(f"it must contain one state dict, at its top or under {' or '.join(NESTED)}; {FIX}")
    state = without_extra_state(state)
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise ValueError(f"it contains no state dict: {name} is a {type(tensor).__name__}; {FIX}")
    return state
