"""The labels of a run or a sweep, in the file labels.json: its tags, and whether it is archived."""

import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from runner.errors import InputError
from runner.records.run_files import dumps, read_mapping, write_atomically

LABELS = "labels.json"
_TAG = re.compile(r"[\w.:/+-]+")


@dataclass
class Labels:
    tags: list[str] = field(default_factory=list)
    archived: bool = False  # not listed by default


def read_labels(directory: Path) -> Labels:
    """Return the labels of a run or sweep. Raises InputError if the file is damaged."""
    if not os.path.exists(f"{directory}/{LABELS}"):
        return Labels()
    path = directory / LABELS
    match read_mapping(path):
        case {"tags": list(tags), "archived": bool(archived)}:
            if all(isinstance(tag, str) and _TAG.fullmatch(tag) for tag in tags):
                return Labels(tags, archived)
    raise InputError(f"{path} must contain tags and archived; restore the file, or remove it")


def write_labels(directory: Path, labels: Labels) -> None:
    """Write the labels, or remove the file if all are empty. Raises InputError if a label is invalid."""
    for tag in labels.tags:
        if not _TAG.fullmatch(tag):
            raise InputError(f"tag {tag!r} must consist of letters, digits and _ . : / + -")
    try:
        if labels == Labels():
            (directory / LABELS).unlink(missing_ok=True)
        else:
            write_atomically(directory / LABELS, dumps(asdict(labels)) + "\n")
    except OSError as error:
        raise InputError(f"{directory / LABELS} cannot be written: {error.strerror or error}") from None
