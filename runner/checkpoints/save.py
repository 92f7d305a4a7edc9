"""Saving a checkpoint: each rank writes its own file, and rank 0 checks all files and completes the directory."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runner.checkpoints.layout import FACTS, LAST, MANIFEST, PROGRESS, FileRecord, TrainState, manifest_text, shard_name
from runner.checkpoints.retention import PARTIAL, flush, remove, remove_leftovers, set_link
from runner.checkpoints.save_coordination import SaveCoordinator, StoreLost
from runner.checkpoints.saved_state import LocalState, merge
from runner.checkpoints.shard_file import write_shard
from runner.errors import JobFailed
from runner.records.run_files import dumps, make_directory, without_links

VISIBLE_WITHIN_S = 10.0  # a client of a network file system may cache that a file does not exist
_PAUSE_S = 0.1


def path_of(directory: Path, train_state: TrainState) -> Path:
    """Return the path of the checkpoint at a position of a run."""
    return directory / f"step_{train_state.step}"


def partial_of(directory: Path, train_state: TrainState) -> Path:
    """Return the path at which that checkpoint is written before it is renamed."""
    return directory / f"step_{train_state.step}{PARTIAL}"


def save(
    directory: Path,
    local: LocalState,
    train_state: TrainState,
    coordinator: SaveCoordinator,
    check_lock: Callable[[], None] = lambda: None,
) -> Path:
    """Write directory/step_N, and set the link `last` to it. All ranks must call it; only rank 0 waits for the others.

    The files are written to a temporary directory, flushed to the disk and renamed, so that a crash leaves the older
    checkpoints unchanged. `check_lock` raises if another world has taken over the run; then its files are not changed.

    Raises:
        JobFailed: if this rank's disk failed; on rank 0 also if another rank failed, or replicas differ between ranks.
        StoreLost: if the checkpoint was given up because a rank could not report to rank 0.
    """
    final, partial = path_of(directory, train_state), partial_of(directory, train_state)
    if coordinator.rank > 0:
        _save_part(partial, local, train_state.step, coordinator)
        return final
    try:
        if coordinator.synchronous:
            check_lock()
            remove_leftovers(directory, keep=partial)
        make_directory(partial)  # another rank may have created it
        # A synchronous report is a collective, which every rank has to enter, even if this rank's disk is full.
        reports = coordinator.collect(train_state.step, lambda: None) if coordinator.synchronous else None
        files = _write_chunks(partial, local, 0)
        if reports is None:
            reports = coordinator.collect(train_state.step, lambda: file_sizes(partial))
        facts = local.facts
        for rank, report in enumerate(reports, start=1):
            if "error" in report:
                raise JobFailed(f"rank {rank}: {report['error']}", follows=True)
            files |= report["files"]
            facts = merge(facts, report["facts"])
        check_replicas([local.replica_hashes, *(report["replica_hashes"] for report in reports)])
        if coordinator.is_shared:
            check_visible(partial, files)
        files[FACTS] = _write_text(partial / FACTS, json.dumps({"world_size": coordinator.world_size, **facts}))
        files[PROGRESS] = _write_text(partial / PROGRESS, dumps(asdict(train_state)))
        _write_text(partial / MANIFEST, manifest_text(files))
        flush(partial)
        check_lock()
        if final.exists():  # a damaged checkpoint of the same step, from which the run was not resumed
            remove(final)
        partial.rename(final)
        flush(directory)
    except Exception as error:
        check_lock()  # the directory may belong to another world
        coordinator.announce(train_state.step, "dropped")
        shutil.rmtree(partial, ignore_errors=True)  # the disk may be full
        raise _explain(error, partial) from None
    finally:
        coordinator.announce(train_state.step, "ended")
    set_link(directory, LAST, final)
    return final


def _save_part(partial: Path, local: LocalState, step: int, coordinator: SaveCoordinator) -> None:
    """Write the file of a rank other than 0, and report it to rank 0."""
    failure: BaseException | None = None
    report: dict[str, Any]
    try:
        files = _write_chunks(partial, local, coordinator.rank)
        report = {"files": files, "facts": local.facts, "replica_hashes": local.replica_hashes}
    except BaseException as error:
        failure = _explain(error, partial)
        report = {"error": str(failure)}
    try:
        if coordinator.is_aborted(step):  # rank 0 removes the directory and reports the reason
            shutil.rmtree(partial, ignore_errors=True)
            return
        coordinator.report(step, report)
    except StoreLost:
        # Only this rank's file, because rank 0 may still write others. The next save removes the rest.
        (partial / shard_name(coordinator.rank)).unlink(missing_ok=True)
        raise
    if failure is not None:
        raise failure


def _write_chunks(partial: Path, local: LocalState, rank: int) -> dict[str, FileRecord]:
    """Write this rank's file, if it has any chunks. Return its record by name."""
    if not local.chunks:
        return {}
    make_directory(partial)
    return {shard_name(rank): write_shard(partial / shard_name(rank), local.chunks)}


def check_replicas(hashes: Sequence[Mapping[str, int]]) -> None:
    """Raise JobFailed if a replicated tensor differs between ranks. hashes: one mapping per rank, in order."""
    first: dict[str, tuple[int, int]] = {}
    for rank, of_rank in enumerate(hashes):
        for name, value in of_rank.items():
            other, expected = first.setdefault(name, (rank, value))
            if value != expected:
                raise JobFailed(
                    f"rank {rank} has other values of {name} than rank {other}: replicas that receive the same updates "
                    "have diverged\nno checkpoint is saved; if neither the model nor a callback changes parameters, "
                    "resume from the last one, and on other machines if it happens again"
                )


def check_visible(partial: Path, files: Mapping[str, FileRecord]) -> None:
    """Raise JobFailed if rank 0 does not see a file of another rank, and FileNotFoundError if `partial` was removed."""
    until = time.monotonic() + VISIBLE_WITHIN_S
    for name, record in files.items():
        while _size_on_server(partial / name) != record["size"]:
            if not partial.is_dir():  # rank 0 has created it
                raise FileNotFoundError
            if time.monotonic() > until:
                raise JobFailed(
                    f"outputs={partial.parents[2]}: rank 0 does not see {name}, which another rank has written to "
                    f"{partial}; use a directory that all machines share"
                )
            time.sleep(_PAUSE_S)


def file_sizes(directory: Path) -> dict[str, int]:
    """Return the sizes of the files in a directory, in bytes; other processes may rename it or its files meanwhile."""
    with suppress(OSError):
        return {entry.name: entry.stat().st_size for entry in os.scandir(directory)}
    return {}


def _size_on_server(path: Path) -> int | None:
    """Return the file's size. Opening the file makes a network file system's client renew its cache."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError:
        return None


def _write_text(path: Path, text: str) -> FileRecord:
    content = text.encode()
    with open(path, "wb", opener=without_links) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(sha256=hashlib.sha256(content).hexdigest(), size=len(content))


def _explain(error: BaseException, partial: Path) -> BaseException:
    """Return a JobFailed without traceback if the disk failed or a rank is late; return other errors unchanged."""
    if not isinstance(error, OSError):
        return error
    if isinstance(error, TimeoutError) and error.errno is None:  # the other rank's error names the cause
        return JobFailed(f"checkpoint {partial.with_suffix('')}: {error}", follows=True)
    if isinstance(error, FileNotFoundError):
        return JobFailed(f"{partial} was removed while the run wrote to it; do not remove directories of a running run")
    return JobFailed(
        f"checkpoint {partial.with_suffix('')} could not be written: {error.strerror or repr(error)}\n"
        "older checkpoints are unchanged; fix that (if the disk is full, lower checkpoint.keep), and resume"
    )
