"""The extra state of modules (`get_extra_state`) in a checkpoint: JSON and tensors, which are read without code."""

import base64
import copy
import zlib
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.checkpoints.saved_state import EXTRA_STATE, LocalState, SavedState, tensor_hashes
from runner.checkpoints.shard_file import LocalChunk, SavedTensor

EXTRA_TENSORS = "extra_state."  # the prefix of the names of tensors
EXTRA_FACT = "extra_state"  # the key of everything else
_SEQUENCES = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque)}
_MAPPINGS = {kind.__name__: kind for kind in (dict, OrderedDict)}


def with_extra_state(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that define `get_extra_state`, by the names that their state has in a state dict."""
    return {
        f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE: part
        for name, part in module.named_modules(remove_duplicate=False)
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }


def extra_state(modules: Mapping[str, nn.Module]) -> LocalState:
    """Return the state of these modules as a part of a checkpoint. Raise ValueError if it cannot be stored."""
    found: dict[str, Tensor] = {}
    facts = {name: _encode(part.get_extra_state(), name, found) for name, part in modules.items()}
    chunks = {EXTRA_TENSORS + name: LocalChunk.of(tensor) for name, tensor in found.items()}
    return LocalState(chunks, {EXTRA_FACT: facts} if facts else {})


def copy_extra_state(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return copies of the state of these modules, as `nn.Module.load_state_dict` expects it."""
    return {name: copy.deepcopy(part.get_extra_state()) for name, part in modules.items()}


def extra_state_hash(part: nn.Module) -> int:
    """Return a number that differs between ranks if the extra states of the module do."""
    state = extra_state({"": part})
    tensors = {name: chunk.tensor for name, chunk in state.chunks.items()}
    return zlib.crc32(repr((state.facts, tensor_hashes(tensors))).encode())


def load_extra_state(
    saved: SavedState, modules: Mapping[str, nn.Module], subject: str = "the model", ignored: tuple[str, ...] = ()
) -> None:
    """Call `set_extra_state` of these modules. Raise ValueError if the checkpoint has the state of other modules.

    ignored: the first parts of the names that only the checkpoint may have.
    """
    found = saved.facts.get(EXTRA_FACT, {})
    saved.refuse(subject, "lacks", [name for name in modules if name not in found])
    others = [name for name in found if name not in modules and not name.startswith(ignored)]
    saved.refuse(subject, "also has", others)
    for name, part in modules.items():
        part.set_extra_state(_decode(found[name], saved.tensors))


def _encode(value: Any, name: str, found: dict[str, Tensor]) -> Any:
    """Return what JSON can represent, and add tensors to those found. Everything but plain values becomes {kind: …}."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        found[_unused(name, found)] = torch.from_numpy(np.ascontiguousarray(value).copy())
        return {"array": next(reversed(found))}
    if isinstance(value, Tensor) and value.layout == torch.strided and not isinstance(value, DTensor):
        found[_unused(name, found)] = value.detach()
        return {"tensor": next(reversed(found))}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(value).decode()}
    kind = type(value).__name__
    if _SEQUENCES.get(kind) is type(value):
        return {kind: [_encode(each, f"{name}.{number}", found) for number, each in enumerate(value)]}
    if _MAPPINGS.get(kind) is type(value):
        pairs = [[_encode(key, name, found), _encode(each, f"{name}.{key}", found)] for key, each in value.items()]
        return {kind: pairs}
    raise ValueError(
        f"{name} of get_extra_state is a {kind}, which a checkpoint cannot store; return tensors, arrays, numbers, "
        "texts, and lists, tuples, sets or dicts of them"
    )


def _unused(name: str, found: Mapping[str, Tensor]) -> str:
    return _unused(f"{name}_", found) if name in found else name


def _decode(node: Any, found: Mapping[str, SavedTensor]) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind in ("tensor", "array"):
        tensor = found[EXTRA_TENSORS + content].read().clone()
        return tensor if kind == "tensor" else tensor.numpy()
    if kind == "bytes":
        return base64.b64decode(content)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]((_decode(key, found), _decode(each, found)) for key, each in content)
    return _SEQUENCES[kind](_decode(each, found) for each in content)
