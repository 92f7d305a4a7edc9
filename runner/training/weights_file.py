"""Weights from a file or a checkpoint, read tensor by tensor: names and shapes first, and never code."""

import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from runner.training.saved_state import SavedState

SAFETENSORS, PICKLED = (".safetensors",), (".pt", ".pth", ".bin", ".ckpt")
NESTED = ("model", "state_dict")  # under which a training program keeps a state dict beside other things
AVERAGE = "average"  # of the weights, in a checkpoint of a run: what is evaluated, where there is one


@dataclass(frozen=True)
class Header:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    is_floating_point: bool

    def __str__(self) -> str:
        return f"{list(self.shape)}" + ("" if self.is_floating_point else " of integers")


class WeightsFile(Protocol):
    """An open file. `read` gives a view of the file where it can: nothing is in memory before it is copied."""

    @property
    def headers(self) -> Mapping[str, Header]: ...

    def read(self, name: str) -> Tensor: ...


def open_weights(path: Path) -> WeightsFile:
    """path: a file, or the folder of a verified checkpoint.

    Raises ValueError where it is no file of weights, cannot be read without running code, or is cut short.
    """
    if path.is_dir():
        return _Checkpoint(path)
    if path.suffix in SAFETENSORS:
        return _Safetensors(path)
    if path.suffix in PICKLED:
        return _StateDict(path)
    raise ValueError(f"no file of weights by its name; they end in {', '.join((*SAFETENSORS, *PICKLED))}")


class _Checkpoint:
    """Of a run; of its weights those that it evaluated."""

    def __init__(self, path: Path):
        self._tensors = SavedState.open(path).evaluated().model()
        self.headers = {
            name: Header(tensor.shape, tensor.dtype.is_floating_point) for name, tensor in self._tensors.tensors.items()
        }

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


class _Safetensors:
    def __init__(self, path: Path):
        from safetensors import SafetensorError, safe_open  # 10 ms, which runs without such a file need not wait

        try:
            self._file: Any = safe_open(str(path), framework="pt", device="cpu")
            slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118  # no mapping
        except (SafetensorError, OSError) as error:
            raise ValueError(f"it cannot be read as safetensors ({error}); save it again, or fetch it again") from None
        self.headers: dict[str, Header] = {
            name: Header(tuple(held.get_shape()), held.get_dtype().startswith(("F", "BF")))
            for name, held in slices.items()
        }

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor


class _StateDict:
    """Of torch.save; mapped into memory, and not read, unless it is in the form of before torch 1.6."""

    def __init__(self, path: Path):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about programs and protocols that are refused then
                found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except Exception as error:  # of a file that is something else, torch's unpickler raises anything
            raise ValueError(_refusal(error)) from None
        self._tensors = _state_dict(found)
        self.headers = {name: Header(tuple(t.shape), t.is_floating_point()) for name, t in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def _refusal(error: Exception) -> str:
    text = str(error)
    if held := re.search(r"GLOBAL (\S+)", text):
        return (
            f"it holds {held[1]}, which is code and is not run; save the weights alone, by "
            "torch.save(model.state_dict(), FILE)"
        )
    if "TorchScript" in text:
        return "it is a TorchScript program, whose code is not run; save torch.jit.load(FILE).state_dict()"
    reason = next((line for line in text.splitlines() if line.strip()), "")
    return f"it is no file of torch.save ({type(error).__name__}{f': {reason[:80]}' if reason else ''}), or cut short"


def _state_dict(found: Any) -> dict[str, Tensor]:
    """The names and tensors at the top of the file, or under one of NESTED. Raises ValueError where there are none."""
    form = "save the state dict alone, by torch.save(model.state_dict(), FILE)"
    if not isinstance(found, Mapping):
        raise ValueError(f"it holds a {type(found).__name__} and no state dict; {form}")
    keys = [key for key in NESTED if isinstance(found.get(key), Mapping)]
    if len(keys) > 1:
        raise ValueError(f"it holds state dicts under both {' and '.join(keys)}; {form}")
    held = dict(found[keys[0]]) if keys else dict(found)
    average = found.get(AVERAGE) if keys else None
    if isinstance(average, Mapping) and average.keys() <= held.keys():
        held |= average
    where = f"under {keys[0]}" if keys else f"at its top or under {' or '.join(NESTED)}"
    if not held:
        raise ValueError(f"it holds nothing {where}; {form}")
    for name, tensor in held.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            there = f"{name} is a {type(tensor).__name__}"
            raise ValueError(f"it holds no state dict {where}, names with a tensor each: {there}; {form}")
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise ValueError(f"its {name} is a tensor without plain values ({tensor.layout}); save it dense")
    return held
