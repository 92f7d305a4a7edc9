"""Checkpoints: a folder `step_N` that is complete or absent, checked against its own hashes before it is read."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from runner.distributed.world import World
from runner.errors import JobFailed
from runner.fault_tolerance.copies import Copies
from runner.fault_tolerance.full_disk import check_space, explained
from runner.fault_tolerance.points import reached
from runner.fault_tolerance.seen import check_seen, sizes
from runner.fault_tolerance.shard_file import size_of, write_shard
from runner.fault_tolerance.writers import StoreGone, Writers
from runner.runs.manifest import FACTS, MANIFEST, Written, manifest_text, shard_name, verify
from runner.runs.strict_json import dumps
from runner.runs.train_state import BEST, LAST, PROGRESS, TrainState, available, named, read_train_state, step_of
from runner.training.saved_state import HeldState, SavedState, merged
from runner.training.strategy import Spread
from runner.training.weight_average import WeightAverage

log = logging.getLogger(__name__)

SMALL_FILES = 2**16  # bytes that a checkpoint needs beside the tensors
PARTIAL, DELETING = ".tmp", ".deleting"  # ends of the names of what is not yet, or no longer, a checkpoint


def path_of(folder: Path, train_state: TrainState) -> Path:
    """Where the checkpoint of that point of a run is kept."""
    return folder / f"step_{train_state.step}"


def partial_of(folder: Path, train_state: TrainState) -> Path:
    """Where it is written before."""
    return folder / f"step_{train_state.step}{PARTIAL}"


def save(
    folder: Path,
    held: HeldState,
    train_state: TrainState,
    writers: Writers,
    check_held: Callable[[], None] = lambda: None,
) -> Path:
    """Write folder/step_N, and let the link `last` name it. All ranks must call it; none but rank 0 waits for others.

    It is written beside its place, flushed to the disk and renamed, so that a crash leaves the older ones as they are.
    check_held: raises where the folder is another world's by now, and is left as it is.
    Raises JobFailed where this rank's disk did not take it; on rank 0 also with what that of another said, and where
    what the ranks have alike no longer is. Raises StoreGone where it was given up because nobody could tell rank 0.
    """
    final, partial = path_of(folder, train_state), partial_of(folder, train_state)
    if writers.rank > 0:
        _save_part(partial, held, train_state.step, writers)
        return final
    try:
        reached("save: begin")
        if writers.together:
            check_held()
            sweep(folder, but=partial)
        partial.mkdir(parents=True, exist_ok=True)  # another rank may have been faster
        # Together all have to meet, also where this rank's disk is full.
        heard = writers.hear(train_state.step, lambda: None) if writers.together else None
        files, facts, copies = _write_pieces(partial, held, 0), held.facts, Copies(held.alike)
        if heard is None:
            heard = writers.hear(train_state.step, lambda: sizes(partial))
        for rank, message in enumerate(heard, start=1):
            if "error" in message:
                raise JobFailed(f"rank {rank}: {message['error']}", follows=True)
            files |= message["files"]
            facts = merged(facts, message["facts"])
            copies.compare(rank, message["alike"])
        reached("save: shards written")
        check_seen(partial, files)
        texts = {FACTS: json.dumps({"world_size": writers.world_size, **facts}), PROGRESS: dumps(asdict(train_state))}
        for name, text in texts.items():
            files[name] = asdict(_write_text(partial / name, text))
        reached("save: facts written")
        _write_text(partial / MANIFEST, manifest_text({name: Written(**written) for name, written in files.items()}))
        reached("save: manifest written")
        _flush(partial)
        check_held()
        if final.exists():  # a damaged one of the same step, which the run was not resumed from and no link names
            remove(final)
        reached("save: before rename")
        partial.rename(final)
        reached("save: renamed")
        _flush(folder)
    except Exception as error:
        check_held()  # else it may be the other world's that is removed here
        with suppress(RuntimeError):  # the store may be gone
            writers.drop(train_state.step)
        shutil.rmtree(partial, ignore_errors=True)  # a full disk is one of the reasons
        raise explained(error, partial) from None
    finally:
        with suppress(RuntimeError):
            writers.end(train_state.step)
    point(folder, LAST, final)
    reached("save: end")
    return final


def _save_part(partial: Path, held: HeldState, step: int, writers: Writers) -> None:
    """This rank's part of `save`, another one than rank 0's."""
    failed: BaseException | None = None
    message: dict[str, Any]
    try:
        message = {"files": _write_pieces(partial, held, writers.rank), "facts": held.facts, "alike": held.alike}
    except BaseException as error:
        failed = explained(error, partial)
        message = {"error": str(failed)}
    try:
        if writers.is_dropped(step):  # rank 0 removes the folder, and tells why
            shutil.rmtree(partial, ignore_errors=True)
            return
        writers.tell(step, message)
    except StoreGone:
        # Its own file alone: rank 0 may be writing beside it, or just about to. What is left goes with the next one.
        (partial / shard_name(writers.rank)).unlink(missing_ok=True)
        raise
    if failed is not None:
        raise failed


def _write_pieces(partial: Path, held: HeldState, rank: int) -> dict[str, dict[str, Any]]:
    """This rank's file, where it has something to write, by name."""
    if not held.pieces:
        return {}
    partial.mkdir(parents=True, exist_ok=True)
    check_space(partial, size_of(held.pieces) + SMALL_FILES)
    return {shard_name(rank): asdict(write_shard(partial / shard_name(rank), held.pieces))}


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


def retain(
    folder: Path,
    keep: int,
    best: Sequence[int],
    newest: int,
    besides: Sequence[int] = (),
    damaged: Collection[int] = (),
) -> None:
    """Drop all checkpoints but the newest `keep` and those of the best steps; the link `best` names the first of these.

    best: the best first, each with a checkpoint. newest: the step of the newest sound one; a later one is damaged, as
    the run goes on from before it, and is left to be replaced. besides: steps that stay too. damaged: steps whose
    checkpoints do not count, and go once there is a newer one.
    """
    there = [path for path in available(folder) if step_of(path) <= newest]
    kept = {path for path in there if step_of(path) in (*best, *besides)} | {
        *[path for path in there if step_of(path) not in damaged][-keep:]
    }
    point(folder, BEST, folder / f"step_{best[0]}" if best else None)
    for old in sorted(set(there) - kept):
        remove(old)


def remove(path: Path) -> None:
    """Delete a checkpoint, which is whole or gone at any moment."""
    leaving = path.with_name(path.name + DELETING)
    shutil.rmtree(leaving, ignore_errors=True)
    reached("remove: begin")
    path.rename(leaving)
    reached("remove: renamed")
    _flush(path.parent)
    shutil.rmtree(leaving)
    reached("remove: end")


def sweep(folder: Path, but: Path | None = None) -> None:
    """Remove what dead writers have left. For one rank, while none writes anything but that one."""
    for end in (PARTIAL, DELETING):
        for left in {*folder.glob(f"step_*{end}")} - {but}:
            shutil.rmtree(left, ignore_errors=True)


def open_checkpoint(path: Path) -> SavedState:
    """A checkpoint that is what was saved. Raises ValueError that names the file which is not."""
    verify(path)
    return SavedState.open(path)


def weights_sha256(model_state: Mapping[str, torch.Tensor]) -> str:
    """One hash over the bytes of a full state dict, names sorted. Tensors are asked for one after the other."""
    digest = hashlib.sha256()
    for name in sorted(model_state):
        digest.update(name.encode())
        value = model_state[name].detach().cpu().contiguous()
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write_text(path: Path, text: str) -> Written:
    content = text.encode()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return Written(hashlib.sha256(content).hexdigest(), len(content))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def restore(
    folder: Path, spread: Spread, world: World, name: str = LAST, average: WeightAverage | None = None
) -> TrainState:
    """Load a checkpoint, as `choose` does: each rank its part. All ranks must call it."""
    saved = _agree_on(folder, name, world)
    spread.load_state(saved)
    if average is not None:
        average.load_state(saved)
    elif saved.average():
        log.info("the checkpoint's average of the weights (ema) is dropped")
    return read_train_state(saved.path)


def restore_evaluated(folder: Path, spread: Spread, world: World, name: str = LAST, own: bool = False) -> TrainState:
    """Load the weights that the run evaluated, or the model's own where that is another; the checkpoint as in `choose`.

    Nothing else of it is taken over. All ranks must call it.
    """
    saved = _agree_on(folder, name, world)
    spread.load_weights(saved if own else saved.evaluated())
    if saved.average():
        log.info("weights: %s", "the model's own, not averaged" if own else "averaged over the steps (ema)")
    return read_train_state(saved.path)


def _agree_on(folder: Path, name: str, world: World) -> SavedState:
    """The checkpoint, as `choose` does; each rank hashes a part of its files. All ranks must call it."""

    def sound(path: Path) -> None:
        messages: list[str] = []
        try:
            verify(path, part=world.rank, parts=world.world_size)
        except ValueError as error:
            messages.append(str(error))
        if messages := world.agreement.first_error(f"sound/{path.name}", messages):
            raise ValueError(messages[0])

    listed = world.agreement.share("checkpoints", lambda: json.dumps([str(p) for p in _candidates(folder, name)]))
    return SavedState.open(_choose([Path(path) for path in json.loads(listed)], folder, name, sound))


def choose(folder: Path, name: str = LAST) -> Path:
    """The checkpoint best or step_N, or else the newest one that is what was saved.

    A damaged newest one is named in a warning and the one before it is used. Raises ValueError where none is sound, for
    a run must not start afresh over one that went far, and where the one that is named is not.
    """
    return _choose(_candidates(folder, name), folder, name, verify)


def _candidates(folder: Path, name: str) -> list[Path]:
    return available(folder)[::-1] if name == LAST else [named(folder, name)]


def _choose(paths: Sequence[Path], folder: Path, name: str, sound: Callable[[Path], None]) -> Path:
    for path in paths:
        try:
            sound(path)
        except ValueError as error:
            if name != LAST:
                raise
            log.warning("%s; trying the one before it", error)
            continue
        return path
    raise ValueError(f"{folder} holds no sound checkpoint")
