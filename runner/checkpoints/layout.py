"""The files of a checkpoint `step_N`, their hashes, and its position in the run; readable without torch."""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from runner.records.run_files import parse_metrics, without_links
from runner.records.run_record import DONE, find_run

log = logging.getLogger(__name__)

MANIFEST, FACTS, PROGRESS = "manifest.json", "state.json", "progress.json"
LAST, BEST = "last", "best"  # names of checkpoints, and links next to them, for people
STEP = re.compile(r"step_(\d+)")
FORMAT = 2
BASE = "base"  # the key in FACTS of the file with frozen weights that the checkpoint leaves out
_FILE = re.compile(r"[A-Za-z0-9_]+\.(safetensors|json)")
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)  # of a damaged JSON file


@dataclass(frozen=True)
class TrainState:
    """A position between two steps of a run. Together with the seed it determines the order of the later samples."""

    step: int  # optimizer steps done
    epoch: int  # epochs done
    step_in_epoch: int  # steps done of the current epoch
    batch_size: int  # of the steps that step_in_epoch counts
    skipped_steps: int = 0  # steps done without an update: see on_nonfinite
    ended_epochs: int = 0  # epochs for which the callbacks' after_epoch was called
    logged: dict[str, float] = field(default_factory=dict)  # the losses of the last step whose losses were logged
    evaluated: dict[str, float] = field(default_factory=dict)  # the metrics of the evaluation here; empty before it

    def after_step(self, ends_epoch: bool) -> "TrainState":
        """Return the position after one more optimizer step."""
        in_epoch = 0 if ends_epoch else self.step_in_epoch + 1
        epoch = self.epoch + ends_epoch
        return replace(self, step=self.step + 1, epoch=epoch, step_in_epoch=in_epoch, evaluated={})


class FileRecord(TypedDict):
    """The hash and the size of a file as it was written."""

    sha256: str
    size: int  # bytes


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints in a run's checkpoint directory, oldest first."""
    return sorted((path for path in directory.glob("step_*") if STEP.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """Return the number of optimizer steps that were done when the checkpoint was saved."""
    return int(path.name.removeprefix("step_"))


def find_checkpoint(directory: Path, name: str) -> Path:
    """Return the checkpoint last, best or step_N. Raise ValueError, which lists the existing ones, if it is missing."""
    paths = list_checkpoints(directory)
    if name == LAST and paths:
        return paths[-1]
    best = best_steps(directory.parent) if name == BEST and paths else []
    names = [f"step_{step}" for step in best] if name == BEST else [name]
    if found := [path for each in names for path in paths if path.name == each]:
        return found[0]
    if not paths:
        raise ValueError(f"{directory.parent} has no checkpoint yet")
    existing = ", ".join(path.name for path in paths)
    reason = ""
    if name == BEST and best:
        reason = f": the record of the run names {names[0]}, which is missing"
    elif name == BEST:
        reason = ": none is kept with checkpoint.keep_best=0, or before the first evaluation"
    raise ValueError(f"{directory.parent} has no checkpoint {name}, only {existing}{reason}")


def best_steps(run: Path) -> list[int]:
    """Return the step whose checkpoint is the best one of a run; for an unfinished run several, the best first.

    The record of the run decides, and not the link `best`: a tool that copies run directories may skip links, or follow
    them. An unfinished run may not have recorded its best checkpoint, so its evaluations are compared.
    """
    record = find_run(run)
    if record.state in DONE:
        step = (record.best or {}).get("step")
        return [step] if type(step) is int else []
    monitor = record.standing.monitor
    if monitor is None or record.value("checkpoint.keep_best") == "0":
        return []
    return monitor.best(record.curves(monitor.name)[monitor.name])


def choose_checkpoint(
    directory: Path,
    name: str = LAST,
    paths: Sequence[Path] | None = None,
    check: Callable[[Path], None] | None = None,
) -> Path:
    """Return the verified checkpoint best or step_N; for last, return the newest undamaged one.

    A damaged newest checkpoint is named in a warning, and the previous one is tried. Raise ValueError if the named
    checkpoint is damaged or none is undamaged, because a run must not silently start again from step 0.
    By default, `paths` is the result of `candidates` and `check` is `verify`; `open_on_all_ranks` replaces both.
    """
    problems = list[str]()
    for path in candidates(directory, name) if paths is None else paths:
        try:
            (check or verify)(path)
        except ValueError as error:
            if name != LAST:
                raise
            log.warning("%s; trying the previous one", error)
            problems.append(f": {error}")
            continue
        return path
    raise ValueError(f"{directory} has no undamaged checkpoint{''.join(problems[:1])}")


def candidates(directory: Path, name: str) -> list[Path]:
    """Return the checkpoints to which a name may refer: for last all of them, newest first."""
    return list_checkpoints(directory)[::-1] if name == LAST else [find_checkpoint(directory, name)]


def read_train_state(path: Path) -> TrainState:
    """Read the position of one checkpoint. Raise OSError or ValueError if it cannot be read."""
    try:
        state = TrainState(**_read_mapping(path / PROGRESS))
    except TypeError as error:
        raise ValueError(f"{PROGRESS} has other keys ({error})") from None
    for name, value in asdict(state).items():
        if name not in ("logged", "evaluated") and (type(value) is not int or value < 0):
            raise ValueError(f"{PROGRESS} has {name}={value!r}, which is not a count")
    return replace(state, logged=parse_metrics(state.logged), evaluated=parse_metrics(state.evaluated))


def read_facts(path: Path) -> dict[str, Any]:
    """Read what a checkpoint stores besides tensors. Raise OSError or ValueError if it cannot be read."""
    return _read_mapping(path / FACTS)


def lacks_base(directory: Path) -> bool:
    """Return True if the newest checkpoint leaves out frozen weights whose file no longer exists."""
    try:
        return not Path(read_facts(list_checkpoints(directory)[-1])[BASE]["path"]).exists()
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return False  # also without checkpoints


def shard_name(rank: int) -> str:
    """Return the name of the file with the tensors that a rank writes."""
    return f"rank_{rank}.safetensors"


def manifest_text(files: Mapping[str, FileRecord]) -> str:
    """Return the content of manifest.json: the records of all other files, and a hash of that list itself."""
    listed = {name: files[name] for name in sorted(files)}
    digest = hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()
    return json.dumps({"format": FORMAT, "files": listed, "sha256": digest}, indent=1) + "\n"


def read_manifest(path: Path) -> dict[str, FileRecord]:
    """Return the files of the checkpoint. Raise ValueError, which names the manifest, if it is not what was saved."""
    file = path / MANIFEST
    try:
        text = _read_text(file)
        records = json.loads(text)["files"].items()
        files = {name: FileRecord(sha256=record["sha256"], size=record["size"]) for name, record in records}
    except _UNREADABLE as error:
        raise ValueError(f"{file} cannot be read ({error}); the checkpoint is damaged") from None
    is_complete = {FACTS, PROGRESS} <= files.keys() and all(map(_FILE.fullmatch, files))
    if not is_complete or text != manifest_text(files):  # this also compares the hash of the list
        raise ValueError(f"{file} is not what was saved; the checkpoint is damaged")
    return files


def is_complete(path: Path) -> bool:
    """Return False if files are missing that machines without a shared file system have written for themselves."""
    try:
        return all((path / name).exists() for name in read_manifest(path))
    except ValueError:  # the manifest is damaged
        return True


def verify(path: Path, part: int = 0, num_parts: int = 1, shards: bool = True) -> None:
    """Raise ValueError, which names the file, if a file of the checkpoint is missing or is not what was saved.

    Neither torch nor the file system detects a flipped bit. Of the large files, only one part is hashed, because that
    takes as long as reading them, and none without `shards`. The sizes of all files are compared.
    """
    check_regular(path)
    files = read_manifest(path)
    large = sorted(name for name in files if not name.endswith(".json"))
    skipped = {*large} - {*large[part::num_parts]} if shards else {*large}
    for name, record in files.items():
        if not is_saved(path / name, record, is_hashed=name not in skipped):
            raise ValueError(f"{path / name} is not what was saved; the checkpoint is damaged")
    try:
        read_train_state(path)
        read_facts(path)
    except _UNREADABLE as error:
        raise ValueError(f"{path} cannot be read ({error}); the checkpoint is damaged") from None


def check_regular(path: Path) -> None:
    """Raise ValueError, which names the entry, if a checkpoint contains anything else than regular files."""
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False):
                reason = "it is a link or another special file, which no run has written"
                raise ValueError(f"{entry.path} is not what was saved: {reason}; the checkpoint is damaged")


def is_saved(path: Path, record: FileRecord, is_hashed: bool = True) -> bool:
    """Return True if the file is what was saved, or with `is_hashed=False` if it has the same size."""
    try:
        with open(path, "rb", opener=without_links) as file:
            if path.stat().st_size != record["size"]:
                return False
            return not is_hashed or hashlib.file_digest(file, "sha256").hexdigest() == record["sha256"]
    except OSError:
        return False


def _read_mapping(path: Path) -> dict[str, Any]:
    found = json.loads(_read_text(path))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} contains no mapping")
    return found


def _read_text(path: Path) -> str:
    with open(path, opener=without_links) as file:
        return file.read()
