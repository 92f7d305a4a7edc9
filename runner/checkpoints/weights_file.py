"""Weights from a file or a checkpoint, read tensor by tensor: names and shapes first, and code is never executed."""

import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.checkpoints.saved_state import SavedState

SAFETENSORS, PICKLED = (".safetensors",), (".pt", ".pth", ".bin", ".ckpt")
NESTED = ("model", "state_dict")  # the keys under which training programs save a state dict among other objects


@dataclass(frozen=True)
class Header:
    """The shape and kind of a tensor, which are known before it is read."""

    shape: tuple[int, ...]
    is_floating_point: bool

    def __str__(self) -> str:
        return f"{list(self.shape)}" + ("" if self.is_floating_point else " of integers")


@dataclass(frozen=True)
class WeightsFile:
    """An open file. `read` returns a tensor by name, as a view of the file if possible."""

    headers: Mapping[str, Header]
    read: Callable[[str], Tensor]


def open_weights(path: Path) -> WeightsFile:
    """Open a file of weights, or a verified checkpoint's directory, of which the evaluated weights are read.

    Raise ValueError if the file contains no weights, is truncated, or cannot be read without executing code.
    """
    if path.is_dir():
        saved = SavedState.open(path).evaluated().model()
        tensors = saved.tensors.items()
        headers = {name: Header(tensor.shape, tensor.dtype.is_floating_point) for name, tensor in tensors}
        return WeightsFile(headers, saved.__getitem__)
    if path.suffix in SAFETENSORS:
        return _open_safetensors(path)
    if path.suffix in PICKLED:
        state = _state_dict(_load(path))
        headers = {name: Header(tuple(t.shape), t.is_floating_point()) for name, t in state.items()}
        return WeightsFile(headers, state.__getitem__)
    raise ValueError(f"the suffix is not that of a weights file, one of {', '.join((*SAFETENSORS, *PICKLED))}")


def _open_safetensors(path: Path) -> WeightsFile:
    from safetensors import SafetensorError, safe_open  # 10 ms, which runs without such a file need not wait

    try:
        file: Any = safe_open(str(path), framework="pt", device="cpu")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (SafetensorError, OSError) as error:
        raise ValueError(f"it cannot be read as safetensors ({error}); save or download it again") from None
    headers = {
        name: Header(tuple(part.get_shape()), part.get_dtype().startswith(("F", "BF"))) for name, part in slices.items()
    }
    return WeightsFile(headers, file.get_tensor)


def _load(path: Path) -> Any:
    """Return the content of a file of torch.save, mapped into memory unless torch older than 1.6 has written it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about TorchScript programs and pickle protocols, which are then refused
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch's unpickler may raise anything for a file of another kind
        text = str(error)
    if found := re.search(r"GLOBAL (\S+)", text):
        raise ValueError(
            f"it contains {found[1]}, which is code and is not executed; save only the weights, with "
            "torch.save(model.state_dict(), FILE)"
        )
    if "TorchScript" in text:
        raise ValueError("it is a TorchScript program, which is not executed; save torch.jit.load(FILE).state_dict()")
    reason = next((line for line in text.splitlines() if line.strip()), "it is empty")
    raise ValueError(f"it is not a file of torch.save, or it is truncated ({reason[:80]})")


def _state_dict(content: Any) -> dict[str, Tensor]:
    """Return the state dict at the top of the content or under one of NESTED. Raise ValueError if there is none."""
    fix = "save only the state dict, with torch.save(model.state_dict(), FILE)"
    if not isinstance(content, Mapping):
        raise ValueError(f"it contains a {type(content).__name__} instead of a state dict; {fix}")
    keys = [key for key in NESTED if isinstance(content.get(key), Mapping)]
    if len(keys) > 1:
        raise ValueError(f"it contains state dicts under both {' and '.join(keys)}; {fix}")
    state = dict(content[keys[0]]) if keys else dict(content)
    place = f"under {keys[0]}" if keys else f"at its top or under {' or '.join(NESTED)}"
    if not state:
        raise ValueError(f"it contains nothing {place}; {fix}")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"it contains no state dict {place}: {name} is a {type(tensor).__name__}; {fix}")
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise ValueError(f"its {name} is a tensor without plain values ({tensor.layout}); save it as a dense one")
    return state
