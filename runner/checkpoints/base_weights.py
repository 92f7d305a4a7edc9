"""Frozen weights that a run's checkpoints leave out, because the file of `init_from` contains them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from runner.checkpoints.layout import BASE, MANIFEST
from runner.checkpoints.saved_state import MODEL, LocalState, SavedState, without_extra_state
from runner.checkpoints.shard_file import SavedTensor
from runner.checkpoints.weights_file import open_weights, weights_in
from runner.distributed.world import World


@dataclass(frozen=True)
class BaseWeights:
    """The frozen weights that checkpoints leave out.

    Attributes:
        path: The absolute path of the file, which may be the index of several files.
        sha256: The hash of the file, or of the hashes of these files; before `share`, empty on ranks other than 0.
        names: The names in the file, by the names in the model.
    """

    path: str
    sha256: str
    names: Mapping[str, str]

    @classmethod
    def of(cls, path: Path, names: Mapping[str, str], rank: int) -> "BaseWeights | None":
        """Return the weights of a file; None for a checkpoint, which its own run may remove, and without names."""
        if not names or (path / MANIFEST).is_file():
            return None
        return cls(str(path), _hash(path) if rank == 0 else "", dict(names))

    def share(self, world: World) -> "BaseWeights":
        """Return these weights with the hash that rank 0 has computed. All ranks must call it."""
        return replace(self, sha256=world.consensus.broadcast("base", lambda: self.sha256))

    @classmethod
    def of_checkpoint(cls, saved: SavedState) -> "BaseWeights | None":
        """Return what a checkpoint leaves out; None if it is complete."""
        return cls(**fact) if (fact := saved.facts.get(BASE)) else None

    def remove_from(self, state: LocalState) -> LocalState:
        """Return the state of a run without these weights, also those of the replicas of parallel=local_sgd."""
        left_out = {MODEL + name for name in self.names}
        chunks = {key: chunk for key, chunk in state.chunks.items() if key[max(key.find(MODEL), 0) :] not in left_out}
        return replace(state, chunks=chunks)

    def fact(self) -> dict[str, Any]:
        """Return what a checkpoint records instead of these weights."""
        return {BASE: asdict(self)}

    def find(self, copy: str | None) -> str:
        """Return the path of the file, or of its copy if the file no longer exists.

        Raise ValueError unless the content is the one with which the run has started.
        """
        path, problem = Path(self.path), ""
        if copy is not None and not path.exists() and Path(copy).exists():
            path = (weights_in(Path(copy)) or Path(copy)).absolute()
        try:
            if _hash(path) != self.sha256:
                problem = "is not the file with which the run has started"
        except FileNotFoundError as error:
            problem = "no longer exists" if error.filename == str(path) else f"lists {error.filename}, which is missing"
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            problem = f"cannot be read ({error})"
        if problem:
            or_copy = (
                "" if copy is None or path.exists() else ", or add init_from.path=COPY (init_from=COPY in open_run)"
            )
            raise ValueError(
                f"init_from.path={path} {problem}, but the frozen weights are read from this file; restore it{or_copy}"
            )
        return str(path)

    def add_to(self, saved: SavedState) -> SavedState:
        """Return the state with these weights, and with the path of their file, which is not checked."""
        file = open_weights(Path(self.path))
        weights = {MODEL + name: file[source] for name, source in self.names.items()}
        facts = {**saved.facts, **self.fact()}
        return replace(saved, tensors={**saved.tensors, **weights}, facts=facts)


def complete(saved: SavedState, copy: str | None = None, world: World | None = None) -> SavedState:
    """Return a checkpoint with the weights that it leaves out. Raise ValueError if their file is another one now.

    copy: a path as of `init_from.path`, which is read if the file no longer exists. With a world, only rank 0 checks
    the file, and all ranks must call it.
    """
    base = BaseWeights.of_checkpoint(saved)
    if base is None:
        return saved
    if world is None:
        path = base.find(copy)
    else:
        path = world.consensus.broadcast(f"base/{saved.path.name}", lambda: base.find(copy))
    return replace(base, path=path).add_to(saved)


def open_evaluated(path: Path) -> dict[str, SavedTensor]:
    """Open a verified checkpoint, and return the weights that its run evaluated, also those that it leaves out.

    The file of the latter is not checked. Raise ValueError if one of them cannot be read.
    """
    saved = SavedState.open(path)
    base = BaseWeights.of_checkpoint(saved)
    return without_extra_state((base.add_to(saved) if base else saved).evaluated().model())


def _hash(path: Path) -> str:
    """Return the hash of a file, or for an index of several files that of all their hashes."""
    if path.suffix != ".json":
        return _hash_of_file(path)
    listed = sorted(set(json.loads(path.read_text())["weight_map"].values()))
    hashes = [_hash_of_file(path.parent / name) for name in (path.name, *listed)]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _hash_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
