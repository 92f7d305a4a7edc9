"""The tensors of a checkpoint as they lie in its files: names and shapes first, values when they are asked for."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.runs.manifest import STATE, read_facts, read_manifest

SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # as torch.distributed.checkpoint's HuggingFaceStorageReader
OPTIMIZER = "optimizer."  # what an optimizer keeps for a parameter is optimizer.PARAMETER.KEY
_SHARD = ".safetensors"

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, which one file has."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    read: Callable[[Slices], Tensor]  # within the box; a view of the file where it can be

    @property
    def whole(self) -> Slices:
        return tuple(slice(0, size) for size in self.shape)


@dataclass
class SavedTensor:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole: the boxes leave no hole."""
        ends = [[o + n for o, n in zip(chunk.offsets, chunk.shape, strict=True)] for chunk in self.chunks]
        return tuple(max(sizes) for sizes in zip(*ends, strict=True))

    def read(self) -> Tensor:
        """The whole tensor on the CPU; of one that one file has, a view of it."""
        if len(self.chunks) == 1:
            return self.chunks[0].read(self.chunks[0].whole)
        whole = torch.empty(self.shape, dtype=self.dtype)
        for chunk in self.chunks:
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.shape, strict=True))
            whole[box] = chunk.read(chunk.whole)
        return whole


class Weights(Mapping[str, Tensor]):
    """Some tensors of a checkpoint, by names of their own; each is read when it is asked for, and not kept."""

    def __init__(self, tensors: Mapping[str, SavedTensor]):
        self.tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def open_tensors(path: Path) -> tuple[dict[str, SavedTensor], dict[str, Any]]:
    """The tensors of a folder step_N by full names, and what else it holds. Nothing is in memory before it is read.

    Raises ValueError where it cannot be read. It is not verified here: see runner.runs.manifest.
    """
    try:
        return _of_state_file(path / STATE) if (path / STATE).exists() else (_of_shards(path), read_facts(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}); the checkpoint is damaged") from None


def _of_shards(path: Path) -> dict[str, SavedTensor]:
    """Of the files that the manifest lists: another one is of no rank that has taken part."""
    from safetensors import SafetensorError, safe_open  # 10 ms, which not every command has to wait for
    from safetensors.torch import _getdtype

    tensors: dict[str, SavedTensor] = {}
    for file in sorted(path / name for name in read_manifest(path) if name.endswith(_SHARD)):
        try:
            opened: Any = safe_open(str(file), framework="pt", device="cpu")
            offsets = json.loads(opened.metadata()[SHARDING])
            for name in opened.keys():  # noqa: SIM118  # no mapping
                part = opened.get_slice(name)
                saved = tensors.setdefault(name, SavedTensor(_getdtype(part.get_dtype())))
                shape, start = tuple(part.get_shape()), tuple(offsets[name][OFFSETS])
                if start not in [chunk.offsets for chunk in saved.chunks]:  # several ranks may have the same
                    saved.chunks.append(Chunk(start, shape, _reading(opened, name)))
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} cannot be read ({error}); the checkpoint is damaged") from None
    return tensors


def _reading(opened: Any, name: str) -> Callable[[Slices], Tensor]:
    def read(slices: Slices) -> Tensor:
        tensor: Tensor = opened.get_slice(name)[slices] if slices else opened.get_tensor(name)
        return tensor

    return read


def _of_state_file(file: Path) -> tuple[dict[str, SavedTensor], dict[str, Any]]:
    """Of before format 2: nested dicts of one torch.save, mapped into memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what is refused then
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch's unpickler raises anything
            reason = next(iter(str(error).splitlines()), "")
            raise ValueError(f"{file} cannot be read ({type(error).__name__}: {reason})") from None
    tensors: dict[str, Tensor] = {}
    for part in ("model", "average"):
        tensors |= {f"{part}.{name}": tensor for name, tensor in state.get(part, {}).items()}
    facts = {key: state[key] for key in ("scaler", "averaged_steps") if key in state}
    optimizer = state.get("optimizer", {})
    for turn, of_turn in optimizer.get("turns", {"": optimizer}).items():
        prefix = f"turns.{turn}." if turn else ""
        kept, told = flatten_optimizer(of_turn.get("state", {}), of_turn.get("param_groups", []))
        tensors |= {prefix + name: tensor for name, tensor in kept.items()}
        facts |= {"turns": facts.get("turns", {}) | {turn: told}} if turn else told
    if (local := state.get("local_sgd")) is not None:
        tensors |= {f"local_sgd.anchor.{number}": tensor for number, tensor in enumerate(local["anchor"])}
        tensors |= {
            f"local_sgd.outer.{number}.{key}": tensor
            for number, kept in local["outer"].items()
            for key, tensor in kept.items()
            if tensor is not None
        }
        counted: dict[str, Any] = {}
        for rank, own in enumerate(local["ranks"]):
            prefix = f"local_sgd.rank_{rank}."
            kept, told = flatten_optimizer(own["optimizer"]["state"], own["optimizer"]["param_groups"])
            tensors |= {prefix + name: tensor for name, tensor in kept.items()}
            tensors |= {f"{prefix}model.{name}": tensor for name, tensor in own.get("model", {}).items()}
            counted[f"rank_{rank}"] = told | {"scaler": own["scaler"], "round_samples": own["round_samples"]}
        facts["local_sgd"] = {"steps": local["steps"], "round_steps": local["round_steps"], **counted}
        facts["local_sgd"]["num_ranks"] = len(local["ranks"])
    return {name: _whole(tensor) for name, tensor in tensors.items()}, facts


def _whole(tensor: Tensor) -> SavedTensor:
    shape = tuple(tensor.shape)
    return SavedTensor(tensor.dtype, [Chunk((0,) * len(shape), shape, lambda slices: tensor[slices])])


def flatten_optimizer(
    state: Mapping[str, Mapping[str, Any]], groups: list[dict[str, Any]]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What an optimizer keeps, by names of parameters: its tensors by full names, and what else there is, as JSON.

    A parameter that has other than a tensor under each key has a skeleton there, see `fill_skeleton`.
    """
    tensors: dict[str, Tensor] = {}
    skeletons: dict[str, Any] = {}

    def strip(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            tensors[name] = value
            return {"tensor": name}
        if isinstance(value, Mapping):
            return {"mapping": {str(key): strip(inner, f"{name}.{key}") for key, inner in value.items()}}
        if isinstance(value, (list, tuple)):
            return {"list": [strip(inner, f"{name}.{number}") for number, inner in enumerate(value)]}
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"value": value}
        raise ValueError(
            f"the optimizer keeps a {type(value).__name__} as {name}, which no checkpoint can hold; keep tensors and "
            "numbers in it"
        )

    for parameter, kept in state.items():
        skeleton = {key: strip(value, f"{OPTIMIZER}{parameter}.{key}") for key, value in kept.items()}
        if not all(isinstance(value, Tensor) for value in kept.values()):
            skeletons[parameter] = skeleton
    plain = [{key: _plain(value) for key, value in group.items()} for group in groups]
    return tensors, {"optimizer": {"param_groups": plain, "state": skeletons}}


def fill_skeleton(skeleton: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """What flatten_optimizer was given. tensors: by their full names; tuples have become lists."""
    ((kind, held),) = skeleton.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "mapping":
        return {key: fill_skeleton(inner, tensors) for key, inner in held.items()}
    if kind == "list":
        return [fill_skeleton(inner, tensors) for inner in held]
    return held


def _plain(value: Any) -> Any:
    """An option of a parameter group as JSON has it: told, and never read back."""
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)
