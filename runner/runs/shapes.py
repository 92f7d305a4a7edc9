"""Whether recorded files have the shape in which they were written: what is read is not believed to be one's own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from runner.errors import InputError

SAFE = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast: a sweep may have a thousand jobs


def read_words(path: Path) -> list[str]:
    """A YAML list of words, as overrides.yaml is one. Raises InputError that names the file for anything else."""
    found = _parsed(path)
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        what = "is empty" if found is None else "is no list of words"
        raise InputError(f"{path} {what}, and so not what a run has recorded; put it back, or name another run")
    return found


def read_mapping(path: Path) -> dict[str, Any]:
    """A mapping, of YAML or JSON. Raises InputError that names the file for anything else."""
    found = _parsed(path)
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no mapping, and so not what a run has recorded; put it back")
    return found


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The mappings of a file of JSON lines, as they are asked for; one that a crash has cut short is passed over.

    Raises OSError, and InputError that names the line where it is something else.
    """
    with path.open(errors="replace") as file:
        for number, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if not isinstance(line, dict):
                raise InputError(f"{path}, line {number}: {text.strip()[:40]} is no mapping; remove the line")
            yield line


def _parsed(path: Path) -> Any:
    try:
        text = path.read_text()
        return json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=SAFE)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise InputError(f"{path} cannot be read ({why[:200]}); put it back") from None
