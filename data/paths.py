"""The files that an option names by paths, or by patterns such as texts/*.txt."""

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path


def find_files(option: str, value: str | Sequence[str]) -> list[Path]:
    """Return the files that a path, a pattern or a list of them names, in that order; those of a pattern are sorted.

    Raise ValueError if one of them names no file.
    """
    found: list[Path] = []
    for name in [value] if isinstance(value, str) else value:
        pattern = str(Path(name).expanduser())
        matching = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
        files = [Path(path) for path in matching if Path(path).is_file()]
        if not files:
            kind = (
                f"is a directory; name the files in it, as in {name}/*" if Path(pattern).is_dir() else "is not a file"
            )
            raise ValueError(f"{option}={name} {kind} (looked in {Path.cwd()})")
        found += files
    if not found:
        raise ValueError(f"{option}=[] must name at least one file")
    return found


def find_split(files: Mapping[str, str | Sequence[str] | None], split: str, kinds: str) -> list[Path]:
    """Return the files of a split as `find_files` does. Raise ValueError if the option `files` names none for it."""
    value = files.get(split)
    if value is None:
        given = [name for name in ("train", "val", "test") if files.get(name) is not None]
        have = f"there are files for {' and '.join(given)}" if given else "there are no files"
        raise ValueError(f"files.{split}=null: the {split} split needs a {kinds} file; {have}")
    return find_files(f"files.{split}", value)
