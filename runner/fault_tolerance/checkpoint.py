"""Checkpoints: a folder `step_N` that is complete or absent, checked against its own hashes before it is read."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from runner.distributed.world import World
from runner.runs.train_state import BEST, LAST, PROGRESS, TrainState, available, named, read_train_state, step_of
from runner.training.strategy import Spread
from runner.training.weight_average import WeightAverage

log = logging.getLogger(__name__)

STATE, MANIFEST = "state.pt", "manifest.json"


def path_of(folder: Path, train_state: TrainState) -> Path:
    """Where the checkpoint of that point of a run is kept."""
    return folder / f"step_{train_state.step}"


def save(folder: Path, state: dict[str, Any], train_state: TrainState) -> Path:
    """Write folder/step_N, and let the link `last` name it. For one rank; the state is of the whole model.

    It is written beside its place, flushed to the disk and renamed, so that a crash leaves the older ones as they are.
    """
    final = path_of(folder, train_state)
    partial = final.with_name(final.name + ".tmp")
    for left in folder.glob("step_*.tmp"):  # of a crash, which need not have been at this step
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    torch.save(state, partial / STATE)
    (partial / PROGRESS).write_text(json.dumps(asdict(train_state)))
    hashes = {name: _sha256(partial / name) for name in (STATE, PROGRESS)}
    (partial / MANIFEST).write_text(json.dumps(hashes, indent=1))
    for path in (*partial.iterdir(), partial):
        _flush(path)
    if final.exists():  # a damaged one of the same step, which the run was not resumed from and no link names
        shutil.rmtree(final)
    partial.rename(final)
    point(folder, LAST, final)
    return final


def point(folder: Path, name: str, path: Path | None) -> None:
    """Let the link `name` beside the checkpoints name one of them, or remove it. It is never without its target."""
    link = folder / name
    if path is None:
        link.unlink(missing_ok=True)
    elif not link.is_symlink() or os.readlink(link) != path.name:
        new = folder / f"{name}.tmp"
        new.unlink(missing_ok=True)
        new.symlink_to(path.name)  # relative, so that a run's directory can be moved
        new.replace(link)
    _flush(folder)


def retain(folder: Path, keep: int, best: Sequence[int], newest: int) -> None:
    """Drop all checkpoints but the newest `keep` and those of the best steps; the link `best` names the first of these.

    best: the best first, each with a checkpoint. newest: the step of the newest sound one; a later one is damaged, as
    the run goes on from before it, and is left to be replaced.
    """
    there = [path for path in available(folder) if step_of(path) <= newest]
    kept = {path for path in there if step_of(path) in best} | {*there[-keep:]}
    point(folder, BEST, folder / f"step_{best[0]}" if best else None)
    for old in set(there) - kept:
        shutil.rmtree(old)


def load(path: Path) -> tuple[dict[str, Any], TrainState]:
    """Read a checkpoint, tensors on the CPU. Raises ValueError as `verify` does."""
    verify(path)
    state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    return state, read_train_state(path)


def verify(path: Path) -> None:
    """Raises ValueError that names the file when one is missing or is not what was written.

    Neither torch nor the file system notices a flipped bit.
    """
    try:
        hashes = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path / MANIFEST} cannot be read ({error}); the checkpoint is damaged") from None
    for name in (STATE, PROGRESS):
        if not (path / name).is_file() or _sha256(path / name) != hashes.get(name):
            raise ValueError(f"{path / name} is not what was saved; the checkpoint is damaged")


def evaluated_weights(state: dict[str, Any]) -> dict[str, Any]:
    """What the run evaluated: the model's state by full names, with the averages in the places of their parameters.

    state: of a checkpoint. Buffers are the model's own; without ema.decay so are all weights.
    """
    return state["model"] | state.get("average", {})


def weights_sha256(model_state: dict[str, Any]) -> str:
    """One hash over the bytes of a full state dict, names sorted."""
    digest = hashlib.sha256()
    for name in sorted(model_state):
        digest.update(name.encode())
        value = model_state[name].detach().cpu().contiguous()
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def restore(
    folder: Path, spread: Spread, world: World, name: str = LAST, average: WeightAverage | None = None
) -> TrainState:
    """Load a checkpoint, as `choose` does. All ranks must call it."""
    state, train_state = load(Path(world.agreement.share("checkpoint", lambda: str(choose(folder, name)))))
    spread.load_state(state)
    if average is not None:
        average.load_state(state)
    elif "average" in state:
        log.info("the checkpoint's average of the weights (ema) is dropped")
    return train_state


def restore_evaluated(folder: Path, spread: Spread, world: World, name: str = LAST, own: bool = False) -> TrainState:
    """Load the weights that the run evaluated, or the model's own where that is another; the checkpoint as in `choose`.

    Nothing else of it is taken over. All ranks must call it.
    """
    state, train_state = load(Path(world.agreement.share("checkpoint", lambda: str(choose(folder, name)))))
    spread.load_weights(state["model"] if own else evaluated_weights(state))
    if "average" in state:
        log.info("weights: %s", "the model's own, not averaged" if own else "averaged over the steps (ema)")
    return train_state


def choose(folder: Path, name: str = LAST) -> Path:
    """The checkpoint best or step_N, or else the newest one that is what was saved.

    A damaged newest one is named in a warning and the one before it is used. Raises ValueError where none is sound, for
    a run must not start afresh over one that went far, and where the one that is named is not.
    """
    if name != LAST:
        path = named(folder, name)
        verify(path)
        return path
    for path in reversed(available(folder)):
        try:
            verify(path)
        except ValueError as error:
            log.warning("%s; trying the one before it", error)
            continue
        return path
    raise ValueError(f"{folder} holds no sound checkpoint")
