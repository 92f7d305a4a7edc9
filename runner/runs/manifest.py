"""The files of a checkpoint and their hashes: whether a folder `step_N` is what was saved; readable without torch."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.runs.train_state import PROGRESS, available, read_train_state

MANIFEST, FACTS = "manifest.json", "state.json"
STATE = "state.pt"  # all of a checkpoint of before format 2, whose manifest has a hash per file alone
FORMAT = 2
_FILE = re.compile(r"[A-Za-z0-9_]+\.(safetensors|json|pt)")


@dataclass(frozen=True)
class Written:
    """A file as it was written."""

    sha256: str
    size: int  # bytes; -1 in a checkpoint of before format 2


def shard_name(rank: int) -> str:
    """The file of the tensors that a rank writes."""
    return f"rank_{rank}.safetensors"


def manifest_text(files: Mapping[str, Written]) -> str:
    """What manifest.json holds: all other files, and a hash of that list itself."""
    listed = {name: {"sha256": files[name].sha256, "size": files[name].size} for name in sorted(files)}
    return json.dumps({"format": FORMAT, "files": listed, "sha256": _sha256_of_list(listed)}, indent=1) + "\n"


def read_manifest(path: Path) -> dict[str, Written]:
    """The files of the checkpoint. Raises ValueError that names the manifest where it is not what was written."""
    file = path / MANIFEST
    try:
        text = file.read_text()
        found = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read ({_why(error)}); the checkpoint is damaged") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no mapping; the checkpoint is damaged")
    if "format" not in found:
        needed, files = {STATE, PROGRESS}, {name: Written(str(sha256), -1) for name, sha256 in found.items()}
    elif found["format"] != FORMAT:
        raise ValueError(f"{file} is of format {found['format']}, and this version reads up to {FORMAT}, or is damaged")
    else:
        listed = found.get("files")
        if not isinstance(listed, dict) or found.get("sha256") != _sha256_of_list(listed):
            raise ValueError(f"{file} is not what was saved; the checkpoint is damaged")
        try:
            needed, files = {FACTS, PROGRESS}, {name: Written(**written) for name, written in listed.items()}
        except TypeError:
            raise ValueError(f"{file} has no hash and size of each file; the checkpoint is damaged") from None
        if text != manifest_text(files):
            raise ValueError(f"{file} is not what was saved; the checkpoint is damaged")
    if lacking := sorted(needed - files.keys()):
        raise ValueError(f"{file} does not list {lacking[0]}; the checkpoint is damaged")
    if strange := [name for name in files if not _FILE.fullmatch(name)]:
        raise ValueError(f"{file} lists {strange[0]}, which is no file of a checkpoint; the checkpoint is damaged")
    return files


def verify(path: Path, part: int = 0, parts: int = 1, shards: bool = True) -> None:
    """Raises ValueError that names the file when one is missing or is not what was written.

    Neither torch nor the file system notices a flipped bit. The hashes of the large files take as long as reading them:
    of `parts` ranks each may compute its part of them; without `shards` their sizes alone are compared.
    """
    files = read_manifest(path)
    large = sorted(name for name in files if not name.endswith(".json"))
    own = large[part::parts] if shards else []
    for name, written in files.items():
        hashed = name in own or name not in large
        if not _is(path / name, written, hashed):
            raise ValueError(f"{path / name} is not what was saved; the checkpoint is damaged")
    try:
        read_train_state(path)
        read_facts(path)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({_why(error)}); the checkpoint is damaged") from None


def read_facts(path: Path) -> dict[str, Any]:
    """What of a checkpoint is no tensor; empty for one of before format 2. Raises OSError or ValueError."""
    if (path / STATE).exists():
        return {}
    facts = json.loads((path / FACTS).read_text())
    if not isinstance(facts, dict):
        raise ValueError(f"{FACTS} holds no mapping")
    return facts


def newest_sound(folder: Path, shards: bool = True) -> Path | None:
    """The newest checkpoint that is what was saved, as `verify` says; None where there is none."""
    for path in reversed(available(folder)):
        try:
            verify(path, shards=shards)
        except ValueError:
            continue
        return path
    return None


def _why(error: Exception) -> str:
    """Without the file's name, which the message has."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _is(path: Path, written: Written, hashed: bool) -> bool:
    try:
        if written.size >= 0 and path.stat().st_size != written.size:
            return False
        if not hashed:
            return path.is_file()
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == written.sha256
    except OSError:
        return False


def _sha256_of_list(listed: Any) -> str:
    return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()
