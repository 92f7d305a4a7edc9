"""Weights of files and directories of Hugging Face, read tensor by tensor; code is never executed."""

import json
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.checkpoints.saved_state import without_extra_state
from runner.checkpoints.shard_file import SavedTensor, open_shards
from runner.errors import first_line

SAFETENSORS, PICKLED = (".safetensors",), (".pt", ".pth", ".bin", ".ckpt")
INDEX = ".safetensors.index.json"  # the end of the name of a file that lists the tensors of several files
# The weights in a directory that save_pretrained of Hugging Face has written; the first one that exists is read.
OF_DIRECTORY = ("model.safetensors", f"model{INDEX}", "pytorch_model.bin")
NESTED = ("model", "state_dict")  # the keys under which training programs save a state dict among other objects
FIX = "save only the state dict, with torch.save(model.state_dict(), FILE)"


def open_weights(path: Path) -> dict[str, SavedTensor]:
    """Open a file of weights, which may be the index of several files.

    Extra states of modules (`get_extra_state`) are left out. Raise ValueError if a file is missing, contains no
    weights, is truncated, or cannot be read without executing code.
    """
    if path.name.endswith(INDEX):
        tensors = _open_indexed(path)
    elif path.suffix in SAFETENSORS:
        tensors = open_shards([path])
    elif path.suffix in PICKLED:
        tensors = {name: SavedTensor.of(tensor) for name, tensor in _state_dict(_load(path)).items()}
    else:
        suffixes = ", ".join((*SAFETENSORS, *PICKLED, INDEX))
        raise ValueError(f"the suffix is not that of a weights file, one of {suffixes}")
    return without_extra_state(tensors)


def weights_in(directory: Path) -> Path | None:
    """Return the file of weights in a directory of Hugging Face, or None if the directory contains none."""
    return next((directory / name for name in OF_DIRECTORY if (directory / name).is_file()), None)


def _open_indexed(path: Path) -> dict[str, SavedTensor]:
    """Open the files that an index lists. Raise ValueError if one is missing, or lacks a tensor of the index."""
    try:
        located = json.loads(path.read_text())["weight_map"]
        files = {name: path.parent / Path(file).name for name, file in located.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as an index of weights ({error}); copy it again") from None
    opened: dict[Path, dict[str, SavedTensor]] = {}
    for name, file in files.items():
        if not file.is_file():
            raise ValueError(f"{path.name} lists {file.name}, which is missing; copy the whole directory again")
        if file not in opened:
            opened[file] = open_shards([file])
        if name not in opened[file]:
            raise ValueError(f"{path.name} lists {name} in {file.name}, which lacks it; copy the whole directory again")
    return {name: opened[file][name] for name, file in files.items()}


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


def write_safetensors(model: nn.Module, path: Path) -> dict[str, str]:
    """Write the tensors of the state dict. Of tied tensors, which share their memory, only the first is written.

    Return the names of the other tied tensors, each with the name of the first. Raise ValueError if an extra state is
    no tensor, or if the file that is read back differs.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    state, kept, tied = model.state_dict(), {}, {}
    if others := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise ValueError(
            f"export.format=safetensors: {others[0]}, which get_extra_state returns, is no tensor; try "
            "export.format=torch_export"
        )
    first: dict[Any, str] = {}
    for name, tensor in state.items():
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and memory in first:
            tied[name] = first[memory]
        else:
            first[memory] = name
            kept[name] = tensor.clone(memory_format=torch.contiguous_format)
    try:
        path.touch()
        mode = path.stat().st_mode
        save_file(kept, path, metadata={"format": "pt"})
        path.chmod(mode)  # safetensors creates files that other users cannot read
        read = load_file(path)
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"safetensors cannot store these weights: {first_line(error)}") from None
    for name, tensor in state.items():
        if not torch.equal(read[tied.get(name, name)].nan_to_num(), tensor.nan_to_num()):
            raise ValueError(f"{name} does not read back from the file as it was written")
    return tied
