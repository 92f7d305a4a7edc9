"""Reading and writing the JSON, JSON lines and YAML files of runs and sweeps.

Non-finite numbers are stored as `null`, because JSON cannot represent them, and are read back as NaN. The readers check
the types and the size of the values, because a run directory may belong to another user or may be damaged.
"""

import errno
import itertools
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from runner.errors import InputError

METRICS, LOG = "metrics.jsonl", "log.txt"
# Lists in metrics.jsonl: checksums of the samples of each step up to the line's, and of each batch of an evaluation.
TRAIN_CHECKSUMS, VAL_CHECKSUMS = "train_checksums", "val_checksums"
MAX_BYTES, MAX_LINE = 16 << 20, 16 << 20  # of a record that is read as a whole; characters of a line
MAX_DEPTH, MAX_VALUES, MAX_ALIASES = 50, 1_000_000, 10  # of the values in a record
MAX_INT = 2**1023  # larger integers may not be convertible to float
_decode = json.JSONDecoder().decode  # json.loads without its checks of the arguments, for speed
_NOT_REGULAR = "it is a link or another special file, which a run does not use; remove it"
SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, ten times as fast: sweeps may have many jobs


def dumps(value: Any, **options: Any) -> str:
    """Return `value` as JSON, with null for non-finite numbers. The options are those of json.dumps."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:  # a number is not finite; a circular reference is reported by the next call
        return json.dumps(_replace_non_finite(value), allow_nan=False, **options)


def parse_metrics(metrics: Any) -> dict[str, float]:
    """Return the values of a mapping from JSON that can be converted to float: its numbers, and NaN for null."""
    if not isinstance(metrics, dict):
        return {}
    return {
        name: math.nan if value is None else value
        for name, value in metrics.items()
        if value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < MAX_INT)
    }


def without_links(path: str, flags: int) -> int:
    """Open a regular file, as the `opener` of `open`. Raise OSError for a link, a pipe, a device or a directory."""
    return regular(path, flags | os.O_NOFOLLOW)


def regular(path: str, flags: int) -> int:
    """Open a regular file as `without_links` does, but follow links, for example to a checkpoint on another disk."""
    try:
        file = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a pipe without a reader
            raise OSError(errno.ELOOP, _NOT_REGULAR, str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.ELOOP, _NOT_REGULAR, str(path))
    return file


def make_directory(path: Path) -> None:
    """Create a directory in a run directory unless it exists. Raise OSError if it is a link."""
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, _NOT_REGULAR, str(path))


def check_links(directory: Path) -> None:
    """Raise InputError if a run directory contains a link, through which the run would write to another location.

    The directory itself and `checkpoints` may be links that this user owns, for example to a larger disk. The log, to
    which the run appends without reading it first, must be a regular file.
    """
    moved = (directory, directory / "checkpoints")
    for link in (directory, *(directory.iterdir() if directory.is_dir() else ())):
        if link.is_symlink() and (link not in moved or os.lstat(link).st_uid != os.geteuid()):
            raise InputError(f"{link} is a link, and the run would write to another place; remove the link")
    if (log := directory / LOG).exists() and not log.is_file():
        raise InputError(f"{log} is a directory or another special file; remove it")


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file. Raise OSError if one of the paths is a link or another special file."""
    with open(source, "rb", opener=without_links) as file, open(target, "wb", opener=without_links) as copy:
        shutil.copyfileobj(file, copy)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file's content. After a crash, the file has either the old or the new content, never a part of it.

    Bytes that were decoded with `surrogateescape` are written unchanged. The new file has an unpredictable name until
    it is complete, and replaces a link instead of following it.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(partial, "xb", opener=without_links) as file:
            file.write(content if isinstance(content, bytes) else content.encode(errors="surrogateescape"))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # an error of `write` names no file
        raise


def append_json_lines(path: Path, *lines: Mapping[str, Any]) -> None:
    """Append the lines, if possible with one write, so that concurrent processes do not interleave. Sync the file.

    If a crash has truncated the last line of the file, the new lines start below it. Raise OSError for a link.
    """
    text = "".join(dumps(line) + "\n" for line in lines)
    file = without_links(str(path), os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(file).st_size
        is_truncated = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        rest = memoryview(("\n" * is_truncated + text).encode())
        while rest:  # the system may write less than it is given, as after a signal or on an almost full disk
            if not (written := os.write(file, rest)):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            rest = rest[written:]
        os.fsync(file)
    finally:
        os.close(file)


def read_json_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines. Lines that are not JSON, as after a crash, are skipped.

    Raises as `read_lines` does, and InputError if a line is JSON but not an object.
    """
    for number, text in enumerate(read_lines(path), start=1):
        try:
            line = parse_json(text)
        except (ValueError, RecursionError):
            continue
        if not isinstance(line, dict):
            raise InputError(f"{path}, line {number}: {text.strip()[:40]} is not a JSON object; remove the line")
        yield line


def read_lines(path: str | Path) -> Iterator[str]:
    """Yield the lines of a regular file. Raise FileNotFoundError, or InputError if it cannot be read.

    A line that is longer than MAX_LINE cannot be read.
    """
    with readable(path), open(path, errors="replace", opener=without_links) as file:
        for number in itertools.count(1):
            line = file.readline(MAX_LINE)
            if len(line) == MAX_LINE:
                raise InputError(f"{path}, line {number} is longer than {MAX_LINE:,} characters; remove the line")
            if not line:
                return
            yield line


def read_bytes(path: str | Path, opener: Callable[[str, int], int] = without_links) -> bytes:
    """Return the content of a regular file of at most MAX_BYTES. Raise as `readable` does."""
    with readable(path), open(path, "rb", opener=opener) as file:
        # Not read(MAX_BYTES + 1), which would first allocate as much memory: that takes longer than all the rest.
        content = file.read(min(os.fstat(file.fileno()).st_size, MAX_BYTES + 1))
        if len(content) > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
    return content


@contextmanager
def readable(path: Path | str) -> Iterator[None]:
    """Raise InputError, which names the file, if reading it fails; FileNotFoundError if it does not exist."""
    try:
        yield
    except (FileNotFoundError, InputError):
        raise
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path} cannot be read ({reason[:200]}); restore the file") from None


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raise ValueError or RecursionError if it is invalid or nested too deeply."""
    text = text.decode() if isinstance(text, bytes) else text
    value = _decode(text)
    is_small = len(text) <= MAX_VALUES and text.count("{") + text.count("[") <= MAX_DEPTH
    return value if is_small else _check_size(value)


def read_metrics(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the numbers of each line of metrics.jsonl, NaN for null. Raises InputError if it cannot be read."""
    path = f"{directory}/{METRICS}"  # a string: joining paths takes longer
    for line in read_json_lines(path) if os.path.lexists(path) else ():
        numbers = parse_metrics(line)
        if type(numbers.get("step")) is not int:
            raise InputError(f"{path}: {str(line)[:40]} has no step; remove the line")
        yield numbers


def read_checksums(directory: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Return the checksums of the samples of a run's first steps, by step, and of its first evaluation, by batch.

    Raise as `read_metrics` does.
    """
    of_steps, of_batches = dict[int, float](), dict[int, float]()
    path = directory / METRICS
    for line in read_json_lines(path) if os.path.lexists(path) else ():
        step, train, val = line.get("step"), line.get(TRAIN_CHECKSUMS), line.get(VAL_CHECKSUMS)
        if isinstance(train, list) and type(step) is int:
            of_steps |= _numbered(train, step - len(train) + 1)
        if isinstance(val, list):
            of_batches |= _numbered(val, 1)
    return of_steps, of_batches


def _numbered(values: list[Any], first: int) -> dict[int, float]:
    return {number: value for number, value in enumerate(values, first) if isinstance(value, float)}


def read_mapping(path: Path | str) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file. Raises InputError if the file contains anything else."""
    found = _parse(path)
    if not isinstance(found, dict):
        raise InputError(f"{path} must contain a mapping; restore the file")
    return found


def read_string_list(path: Path | str) -> list[str]:
    """Return the list of strings in a YAML file. Raises InputError if the file contains anything else."""
    found = _parse(path)
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise InputError(f"{path} must contain a list of strings; restore the file, or name another run")
    return found


def _parse(path: Path | str) -> Any:
    try:
        text = read_bytes(path)
    except FileNotFoundError as error:
        raise InputError(f"{path} cannot be read ({error}); restore the file") from None
    with readable(path):
        if str(path).endswith(".json"):
            return parse_json(text)
        if b"*" in text:  # nested aliases expand exponentially; the runner writes no aliases
            aliases = (event for event in yaml.parse(text, Loader=SAFE_LOADER) if isinstance(event, yaml.AliasEvent))
            if len(list(itertools.islice(aliases, MAX_ALIASES + 1))) > MAX_ALIASES:
                raise ValueError(f"it has more than {MAX_ALIASES} aliases")
        return _check_size(yaml.load(text, Loader=SAFE_LOADER))


def _check_size(value: Any) -> Any:
    """Return the value. Raise ValueError if it is nested too deeply for recursive functions, or has too many parts."""
    level, count = [value], 0
    for _ in range(MAX_DEPTH):
        parts: Iterable[Iterable[Any]] = (
            each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list, tuple))
        )
        level = list(itertools.islice(itertools.chain.from_iterable(parts), MAX_VALUES + 1))
        count += len(level)
        if not level or count > MAX_VALUES:
            break
    if level:
        raise ValueError(f"it has more than {MAX_VALUES:,} values, or more than {MAX_DEPTH} levels of nesting")
    return value


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _replace_non_finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_non_finite(inner) for inner in value]
    return value
