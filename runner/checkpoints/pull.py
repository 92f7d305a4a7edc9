"""Local copies of runs at an address: `pull` starts `python -m runner.checkpoints.pull`, which downloads them.

A process of its own uses the store, because a rank forks the workers of its loaders later: see runner.remote.store.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from runner.checkpoints.layout import (
    BEST,
    LAST,
    MANIFEST,
    STEP,
    FileRecord,
    best_steps,
    is_complete,
    is_saved,
    list_checkpoints,
    read_manifest,
    step_of,
    verify,
)
from runner.checkpoints.part_mirror import WANTED
from runner.errors import InputError
from runner.records.attempts import ATTEMPTS
from runner.records.ledger import LEDGER
from runner.records.run_directory import CHECKPOINTS
from runner.records.run_files import METRICS
from runner.records.run_lock import living_owner
from runner.records.settings import OVERRIDES
from runner.remote.address import Address
from runner.remote.object_lock import LOCK
from runner.remote.store import ObjectFacts, ObjectStore, StoreError, secret_options

ALL = "all"  # all checkpoints
LISTED = (".yaml", ".json", ".jsonl")  # the files that lists of runs read
REPLACED = ".replaced"  # the directory in a run of the local files that newer remote ones have replaced
_ATTEMPTS = 2  # downloads of a checkpoint that is damaged
_COMMAND = (sys.executable, "-m", "runner.checkpoints.pull")


def pull(
    address: str,
    key: str,
    checkpoints: Sequence[str] | None = (LAST, BEST),
    options: Mapping[str, Any] | None = None,
    local_dir: str | None = None,
    directory: Path | None = None,
    is_optional: bool = False,
    is_locked: bool = False,
) -> Path:
    """Download what the local copy of an address lacks, and return the directory of the copy.

    A local run that has come further than the remote one, because it was killed before all was uploaded, is kept. Raise
    InputError, which names `key`, if the address contains no run, or if the store cannot be used.

    Args:
        address: a run, a sweep, or a directory of them.
        key: the key or command that names the address.
        checkpoints: the names of the checkpoints to download, or `ALL`; None downloads only what lists of runs read.
        options, local_dir: the values of remote.options and remote.local_dir.
        directory: the directory of the copy; None selects the one in `local_dir`.
        is_optional: do not raise InputError if the address contains no run.
        is_locked: the address is that of a run that the caller has locked: download only checkpoints.
    """
    parsed = Address.parse(address, key)
    copy = directory or parsed.local_directory(local_dir)
    if secrets := secret_options(options or {}, parsed.scheme):
        raise InputError(*secrets)
    order = {"address": address, "key": key, "checkpoints": checkpoints, "options": dict(options or {})}
    text = json.dumps(order | {"directory": str(copy), "is_optional": is_optional, "is_locked": is_locked})
    done = subprocess.run(_COMMAND, input=text, stdout=subprocess.PIPE, text=True, check=False)
    if messages := json.loads(done.stdout or f'["{key}={address}: its download has ended unexpectedly"]'):
        raise InputError(*messages)
    return copy


def _pull(order: Mapping[str, Any]) -> None:
    directory, named = Path(order["directory"]), f"{order['key']}={order['address']}"
    store = ObjectStore(Address.parse(order["address"], order["key"]), order["options"], order["key"])
    objects = store.list()
    # The longest path first, so that an object belongs to the innermost run.
    runs = {each.path.rpartition("/")[0] for each in objects if each.path.rpartition("/")[2] in (OVERRIDES, LEDGER)}
    if order["is_locked"]:
        runs = {""}
    if not runs and not order["is_optional"]:
        raise InputError(f"{named} contains no run or sweep; name one, or a directory that contains some")
    belonging: dict[str, list[ObjectFacts]] = {run: [] for run in sorted(runs, key=len, reverse=True)}
    for each in objects:
        for run in belonging:
            if each.path.startswith(f"{run}/" if run else ""):
                belonging[run].append(each)
                break
    for run, found in belonging.items():
        copy = _Copy(store, run, directory / run)
        copy.path.mkdir(parents=True, exist_ok=True)
        with _locked(copy.path / ".pulling"):  # the ranks of a machine compose the same command
            if order["is_locked"] or living_owner(copy.path) is None:
                copy.update(found, order["checkpoints"], named, with_records=not order["is_locked"])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclude the other processes of this machine from contexts of the same file, which is removed at the end."""
    while True:
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink == 0:  # its last owner has removed it
                continue
            try:
                yield
            finally:
                path.unlink()
            return


class _Copy:
    """The local copy of one run or sweep."""

    def __init__(self, store: ObjectStore, prefix: str, path: Path):
        self._store, self._prefix, self.path = store, f"{prefix}/" if prefix else "", path

    def update(
        self, objects: Iterable[ObjectFacts], checkpoints: Sequence[str] | None, named: str, with_records: bool
    ) -> None:
        """Download the records that are missing or older than the remote ones, and the named checkpoints."""
        found = {each.path.removeprefix(self._prefix): each for each in objects}
        records = {name: each for name, each in found.items() if _is_record(name)}
        complete = [name.split("/")[1] for name in found if _is_checkpoint(name) and name.endswith(f"/{MANIFEST}")]
        complete = sorted(filter(STEP.fullmatch, complete), key=lambda name: step_of(Path(name)), reverse=True)
        attempts = (self._store.get(f"{self._prefix}{ATTEMPTS}") or b"").splitlines(keepends=True)
        is_newer = self._is_newer(records, complete, attempts)
        if with_records:
            self._update_records(records, attempts, is_newer, only_listed=checkpoints is None)
        # A checkpoint is downloaded after the records, which name the best one.
        self._download_checkpoints(complete, checkpoints or (), is_newer, named)

    def _update_records(
        self, records: Mapping[str, ObjectFacts], attempts: Sequence[bytes], is_newer: bool, only_listed: bool
    ) -> None:
        if only_listed:
            records = {name: each for name, each in records.items() if name.endswith(LISTED)}
        wanted = [name for name, each in records.items() if self._is_wanted(name, each, is_newer)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self._replace, wanted))
        self._merge_attempts(attempts)

    def _is_newer(self, records: Mapping[str, ObjectFacts], complete: Sequence[str], attempts: list[bytes]) -> bool:
        """Return True if the remote run has come further than the local one."""
        local = [path for path in list_checkpoints(self.path / CHECKPOINTS) if is_complete(path)]
        lines = (self.path / ATTEMPTS).read_bytes().splitlines() if (self.path / ATTEMPTS).exists() else []
        size = (self.path / METRICS).stat().st_size if (self.path / METRICS).exists() else 0
        here = (step_of(local[-1]) if local else -1, len(lines), size)
        remote_size = records[METRICS].size if METRICS in records else 0
        return (step_of(Path(complete[0])) if complete else -1, len(attempts), remote_size) > here

    def _is_wanted(self, name: str, remote: ObjectFacts, is_newer: bool) -> bool:
        """Return True if the record is missing, or if the remote one is newer and differs."""
        path = self.path / name
        if not path.exists():
            return True
        if not is_newer or path.is_symlink():
            return False
        # The e_tag of S3 is the MD5 of an object that was uploaded in one part.
        digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
        return remote.e_tag.strip('"') != digest

    def _replace(self, name: str) -> None:
        path = self.path / name
        partial = path.with_name(f".{path.name}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        try:
            self._store.download(f"{self._prefix}{name}", partial)
        except FileNotFoundError:  # the run has removed it
            return
        self._set_aside(name)
        partial.replace(path)

    def _set_aside(self, name: str) -> None:
        """Move a local file or directory that is to be replaced to `REPLACED`, over an earlier one."""
        path, kept = self.path / name, self.path / REPLACED / name
        if path.exists():
            shutil.rmtree(kept, ignore_errors=True)
            kept.parent.mkdir(parents=True, exist_ok=True)
            path.rename(kept)

    def _merge_attempts(self, remote: Iterable[bytes]) -> None:
        """Append the remote attempts that the local file lacks, such as those of another machine."""
        path = self.path / ATTEMPTS
        replaced = self.path / REPLACED / ATTEMPTS
        texts = [file.read_bytes().splitlines(keepends=True) if file.exists() else [] for file in (path, replaced)]
        if missing := [line for line in dict.fromkeys([*remote, *texts[1]]) if line not in texts[0]]:
            with open(path, "ab") as file:
                file.writelines(missing)

    def _download_checkpoints(self, complete: Sequence[str], names: Sequence[str], is_newer: bool, named: str) -> None:
        best = [f"step_{step}" for step in best_steps(self.path)] if BEST in names else []
        wanted = {*names, *next(([each] for each in best if each in complete), [])} & {*complete}
        for name in complete if ALL in names else sorted(wanted):
            self._download_checkpoint(name, is_newer, named)
        problems = list[InputError]()
        for name in complete if LAST in names else ():
            try:
                self._download_checkpoint(name, is_newer, named)
                return
            except InputError as error:
                print(f"warning: {error}; trying the previous one", file=sys.stderr)
                problems.append(error)
        if problems and not list_checkpoints(self.path / CHECKPOINTS):
            raise problems[0]  # the run must not start again from step 0

    def _download_checkpoint(self, name: str, is_newer: bool, named: str) -> None:
        """Download a checkpoint, twice if it is damaged. Raise InputError if it is still damaged."""
        path, prefix = self.path / CHECKPOINTS / name, f"{self._prefix}{CHECKPOINTS}/{name}"
        manifest = self._store.get(f"{prefix}/{MANIFEST}")
        if manifest is None:  # the run has removed it
            return
        with suppress(OSError, ValueError):
            if not is_newer or (path / MANIFEST).read_bytes() == manifest:
                verify(path)
                return
        partial = self.path / CHECKPOINTS / f".{name}.partial"
        problem = ""
        for _ in range(_ATTEMPTS):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            (partial / MANIFEST).write_bytes(manifest)
            try:
                for file, record in read_manifest(partial).items():
                    if problem or not _link(path / file, partial / file, record):
                        self._store.download(f"{prefix}/{file}", partial / file)
                verify(partial)
            except ValueError as error:
                problem = str(error).replace(str(partial), f"{CHECKPOINTS}/{name}")
                continue
            except FileNotFoundError as error:
                problem = f"{CHECKPOINTS}/{name} lacks a file ({str(error).splitlines()[0]})"
                continue
            if (path / MANIFEST).exists() and (path / MANIFEST).read_bytes() == manifest:
                for each in partial.iterdir():  # the checkpoint must not disappear, because its mirror would delete it
                    each.replace(path / each.name)
                shutil.rmtree(partial)  # renaming a hard link to the same file does nothing
            else:
                self._set_aside(f"{CHECKPOINTS}/{name}")
                partial.rename(path)
            return
        shutil.rmtree(partial, ignore_errors=True)
        raise InputError(f"{named}: {problem}")


def _link(source: Path, target: Path, record: FileRecord) -> bool:
    """Link to a local file of this size, such as one that this machine has written. Return True if it succeeds."""
    try:
        if is_saved(source, record, is_hashed=False):
            os.link(source, target)
    except OSError:  # a file system without hard links
        return False
    return target.exists()


def _is_record(name: str) -> bool:
    is_hidden = any(part.startswith(".") for part in name.split("/"))
    return not (_is_checkpoint(name) or is_hidden or name in (LOCK, WANTED))


def _is_checkpoint(name: str) -> bool:
    return name.startswith(f"{CHECKPOINTS}/")


def main() -> None:
    """Download what the input orders, and print the messages of an InputError as a list."""
    order = json.loads(sys.stdin.read())
    try:
        _pull(order)
        print("[]")
    except InputError as error:
        print(json.dumps(error.messages))
    except StoreError as error:
        print(json.dumps([str(error)]))
    except OSError as error:
        message = f"{order['key']}={order['address']}: the copy {order['directory']} cannot be written ({error})"
        print(json.dumps([message]))


if __name__ == "__main__":
    main()
