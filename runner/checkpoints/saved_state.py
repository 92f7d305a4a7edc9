"""The two sides of a checkpoint: LocalState, which a rank writes, and SavedState, from which it fills its tensors."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from runner.checkpoints.layout import candidates, choose_checkpoint, read_facts, read_manifest, verify
from runner.checkpoints.shard_file import LocalChunk, SavedTensor, open_shards
from runner.distributed.world import World
from runner.errors import as_input_error

MODEL, AVERAGE = "model.", "average."  # prefixes of the names of weights, and of their averages
EXTRA_STATE = "_extra_state"  # the last part of the name of a module's extra state in a state dict
LISTED = 5  # names in a message about weights that do not fit


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def without_extra_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a state dict, without the extra states of modules (`get_extra_state`)."""
    return {name: value for name, value in state.items() if not str(name).endswith(EXTRA_STATE)}


@dataclass
class LocalState:
    """This rank's part of a checkpoint. No two ranks write the same chunk; the facts of all ranks are merged."""

    chunks: dict[str, LocalChunk] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # values that JSON can represent
    replica_hashes: dict[str, int] = field(default_factory=dict)  # of tensors that are equal on all ranks, by name

    def __or__(self, other: "LocalState") -> "LocalState":
        hashes = self.replica_hashes | other.replica_hashes
        return LocalState(self.chunks | other.chunks, merge(self.facts, other.facts), hashes)

    def under(self, prefix: str) -> "LocalState":
        """Return the same state with all names below a prefix, such as turns.critic."""
        facts = self.facts
        for key in reversed(prefix.split(".")):
            facts = {key: facts}
        chunks = {f"{prefix}.{name}": chunk for name, chunk in self.chunks.items()}
        return LocalState(chunks, facts, self.replica_hashes)


def tensor_hashes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the bitwise XOR of the elements of each tensor that is not sharded, which any single bit changes."""
    whole = {name: tensor.detach() for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    real = {name: torch.view_as_real(tensor) if tensor.is_complex() else tensor for name, tensor in whole.items()}
    return {name: int(torch.hash_tensor(tensor).view(torch.int64)) for name, tensor in real.items() if tensor.numel()}


def merge(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings; if both have a value, the first one wins."""
    both = {key: merge(one[key], other[key]) for key in one if isinstance(one[key], Mapping) and key in other}
    return {**other, **one, **both}


@dataclass(frozen=True)
class SavedState:
    """A checkpoint to read from. Each rank reads the tensors that it needs, without waiting for other ranks."""

    path: Path
    tensors: Mapping[str, SavedTensor]
    facts: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> "SavedState":
        """Open a verified checkpoint. Raise ValueError if it cannot be read."""
        try:
            return cls(path, open_shards([path / name for name in read_manifest(path)]), read_facts(path))
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error}); the checkpoint is damaged") from None

    def under(self, prefix: str) -> "SavedState":
        """Return the part that LocalState.under has written with this prefix."""
        facts: Any = self.facts
        for key in prefix.split("."):
            facts = facts.get(key, {})
        return replace(self, tensors=_strip(self.tensors, f"{prefix}."), facts=facts)

    def evaluated(self) -> "SavedState":
        """Return the state with the averages (ema.decay) in place of their weights: what the run evaluated."""
        averages = {MODEL + name: tensor for name, tensor in self.average().items()}
        return replace(self, tensors={**self.tensors, **averages})

    def model(self) -> dict[str, SavedTensor]:
        """Return the weights of the model by name."""
        return _strip(self.tensors, MODEL)

    def average(self) -> dict[str, SavedTensor]:
        """Return the averages of the weights by name; empty without ema.decay."""
        return _strip(self.tensors, AVERAGE)

    def read(self, targets: Mapping[str, Tensor], subject: str = "the current state") -> None:
        """Fill tensors, and convert dtypes. Raise ValueError if one is missing or has another shape."""
        self.refuse(subject, "lacks", [name for name in targets if name not in self.tensors])
        shapes = {name: (list(self.tensors[name].shape), list(target.shape)) for name, target in targets.items()}
        different = [f"{name} {there} there and {here} here" for name, (there, here) in shapes.items() if there != here]
        self.refuse(subject, "has other shapes:", different)
        for name, target in targets.items():
            self.tensors[name].fill(target)

    def refuse(self, subject: str, what: str, names: Sequence[str]) -> None:
        """Raise ValueError if there are names by which the checkpoint differs from the subject."""
        if names:
            listed = ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
            raise ValueError(
                f"{subject} does not match the checkpoint {self.path}, which {what} {listed}; use the code and "
                "options of the run"
            )


def open_checkpoint(path: Path) -> SavedState:
    """Verify and open a checkpoint. Raise ValueError, which names the file, if it is damaged."""
    verify(path)
    return SavedState.open(path)


def open_on_all_ranks(directory: Path, name: str, world: World) -> SavedState:
    """Open the checkpoint that `choose_checkpoint` selects; each rank hashes a part. All ranks must call it.

    Raise InputError if it is damaged.
    """

    def check(path: Path) -> None:
        messages: list[str] = []
        try:
            verify(path, part=world.rank, num_parts=world.world_size)
        except ValueError as error:
            messages.append(str(error))
        if messages := world.consensus.first_error(f"sound/{path.name}", messages):
            raise ValueError(messages[0])

    names = world.consensus.broadcast("checkpoints", lambda: [path.name for path in candidates(directory, name)])
    paths = [directory / each for each in names]
    with as_input_error():
        return SavedState.open(choose_checkpoint(directory, name, paths, check))


def read_weights(
    saved: SavedState,
    weights: Mapping[str, Tensor],
    all_names: Collection[str] | None = None,
    subject: str = "the model",
    ignored: tuple[str, ...] = (),
) -> None:
    """Fill a model's tensors, by full names. Raise ValueError, which names the subject, if the checkpoint has others.

    all_names: the names of the whole model, if `weights` is only a part of it. ignored: the first parts of the names
    that only the checkpoint may have.
    """
    model, expected = replace(saved, tensors=saved.model()), weights if all_names is None else all_names
    extra = [name for name in model.tensors if name not in expected and not name.startswith(ignored)]
    model.refuse(subject, "lacks", [name for name in expected if name not in model.tensors])
    model.refuse(subject, "also has", extra)
    model.read(weights, subject)


def weights_sha256(model_state: Mapping[str, Tensor | SavedTensor]) -> str:
    """Return one hash over the names, sorted, and the bytes of a full state dict. Tensors are read one at a time."""
    digest = hashlib.sha256()
    for name in sorted(model_state):
        digest.update(name.encode())
        found = model_state[name]
        value = (found.read() if isinstance(found, SavedTensor) else found.detach()).cpu().contiguous()
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _strip(tensors: Mapping[str, SavedTensor], prefix: str) -> dict[str, SavedTensor]:
    """Return the tensors whose names have a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
