"""The two ends of a checkpoint: what a rank holds and writes of it, and what it reads into tensors that it has."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, load
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor
from torch.futures import Future

from runner.training.checkpoint_tensors import SavedTensor, Weights, open_tensors

MODEL, AVERAGE = "model.", "average."
NAMED = 5  # of the weights that do not fit


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, which this rank writes: all of it, or its part of one that is cut over ranks."""

    tensor: Tensor  # this rank's memory, not a copy
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Piece":
        """What this rank has of a tensor."""
        if not isinstance(tensor, DTensor):
            return cls(tensor.detach(), (0,) * tensor.dim())
        (chunk,) = tensor.__create_chunk_list__()
        return cls(tensor.to_local().detach(), tuple(chunk.offsets))


@dataclass
class HeldState:
    """What this rank writes of a checkpoint. No two ranks have the same piece; the facts of all ranks are merged."""

    pieces: dict[str, Piece] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # as JSON has them
    alike: dict[str, int] = field(default_factory=dict)  # fingerprints of what each rank that has it has alike, by name

    def __or__(self, other: "HeldState") -> "HeldState":
        return HeldState(self.pieces | other.pieces, merged(self.facts, other.facts), self.alike | other.alike)

    def under(self, prefix: str) -> "HeldState":
        """The same below a name: turns.critic, say."""
        facts = self.facts
        for key in reversed(prefix.split(".")):
            facts = {key: facts}
        return HeldState({f"{prefix}.{name}": piece for name, piece in self.pieces.items()}, facts, self.alike)


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Of each the exclusive or of its elements' bits, in one pass where it is: a bit that is another shows.

    Of those that are cut over ranks there is none.
    """
    whole = {name: tensor.detach() for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    real = {name: torch.view_as_real(tensor) if tensor.is_complex() else tensor for name, tensor in whole.items()}
    return {name: int(torch.hash_tensor(tensor).view(torch.int64)) for name, tensor in real.items() if tensor.numel()}


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings key by key; of what both have, the first one's."""
    both = {key: merged(one[key], other[key]) for key in one if isinstance(one[key], Mapping) and key in other}
    return {**other, **one, **both}


@dataclass(frozen=True)
class SavedState:
    """A checkpoint that is read: what each rank takes of it is of its own choice, and no rank waits for another."""

    path: Path
    tensors: Mapping[str, SavedTensor]
    facts: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> "SavedState":
        """Raises ValueError where it cannot be read; verified it must be before."""
        return cls(path, *open_tensors(path))

    def under(self, prefix: str) -> "SavedState":
        """As what was written by HeldState.under."""
        facts: Any = self.facts
        for key in prefix.split("."):
            facts = facts.get(key, {})
        return replace(self, tensors=_without(self.tensors, f"{prefix}."), facts=facts)

    def evaluated(self) -> "SavedState":
        """With the averages in the places of their parameters: what the run evaluated. Without ema.decay the same."""
        averages = {MODEL + name: tensor for name, tensor in _without(self.tensors, AVERAGE).items()}
        return replace(self, tensors={**self.tensors, **averages})

    def model(self) -> Weights:
        """The model's state dict, each tensor whole and on the CPU when it is asked for."""
        return Weights(_without(self.tensors, MODEL))

    def average(self) -> Weights:
        return Weights(_without(self.tensors, AVERAGE))

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors of the same names and shapes: of one that is cut over ranks, this rank's part.

        Types are converted. Raises ValueError where one is not there or of another shape.
        """
        if not targets:
            return
        check_fits(self, {name: tuple(target.shape) for name, target in targets.items()}, "what is here")
        with warnings.catch_warnings():  # that it reads in one process
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(
                {name: target.detach() for name, target in targets.items()},
                storage_reader=_Reader(self.tensors),
                no_dist=True,
            )


def read_weights(saved: SavedState, weights: Mapping[str, Tensor], all_names: Mapping[str, Any] | None = None) -> None:
    """Fill a model's tensors, by full names. Raises ValueError where they are not those of the checkpoint.

    all_names: of the whole model, where `weights` is a part of it.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    check_fits(saved, shapes, "the model", MODEL, (all_names or weights).keys())
    saved.read({MODEL + name: tensor for name, tensor in weights.items()})


def check_fits(
    saved: SavedState,
    shapes: Mapping[str, tuple[int, ...]],
    named: str,
    prefix: str = "",
    own: Any = None,
    ignored: tuple[str, ...] = (),
) -> None:
    """Raises ValueError with the first names where tensors of these shapes are not in the checkpoint.

    own: with it, all names there are; those that the checkpoint has besides are told too, but for prefixes `ignored`.
    """
    there = _without(saved.tensors, prefix)
    extra = [name for name in there if own is not None and name not in own and not name.startswith(ignored)]
    missing = [name for name in (shapes if own is None else own) if name not in there]
    other = [
        f"{name} {list(there[name].shape)} there and {list(shape)} here"
        for name, shape in shapes.items()
        if name in there and there[name].shape != shape
    ]
    for what, names in (("has no", missing), ("has besides", extra), ("has other shapes:", other)):
        if names:
            listed = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
            raise ValueError(
                f"{named} is not what {saved.path} was taken of, which {what} {listed}; use the code and options of "
                "the run"
            )


def _without(tensors: Mapping[str, SavedTensor], prefix: str) -> dict[str, SavedTensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class _Reader(StorageReader):
    """Lets torch.distributed.checkpoint read the tensors of a checkpoint, whatever its files are."""

    def __init__(self, tensors: Mapping[str, SavedTensor]):
        self._tensors = tensors

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=saved.dtype),
                    torch.Size(saved.shape),
                    [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.shape)) for c in saved.chunks],
                )
                for name, saved in self._tensors.items()
            }
        )

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            chunks = self._tensors[item.storage_index.fqn].chunks
            chunk = next(chunk for chunk in chunks if chunk.offsets == tuple(item.storage_index.offset or ()))
            box = [slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True)]
            target = planner.resolve_tensor(item).detach()
            target.copy_(chunk.read(tuple(box)))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def reset(self, checkpoint_id: Any = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
