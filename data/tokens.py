"""Tokenizers of transformers, and tokens in memory-mapped files that processes share."""

import fcntl
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
FORMAT = 2  # of the files; increase it when the same options lead to other integers


class MappedTokens:
    """Integers of a file, mapped into memory, so that they need not fit into it. Pickling stores only the path."""

    def __init__(self, path: Path, dtype: str, start: int = 0, end: int | None = None) -> None:
        self.path, self.dtype, self.start = path, dtype, start
        self.array: np.ndarray = np.memmap(path, dtype, "r")[start:end]

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedTokens, (self.path, self.dtype, self.start, self.start + len(self))

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, positions: Any) -> np.ndarray:
        found: np.ndarray = self.array[positions]
        return found

    def part(self, start: int, end: int) -> "MappedTokens":
        return MappedTokens(self.path, self.dtype, self.start + start, self.start + end)


def cached_tokens(
    cache: str, sources: Sequence[Path], settings: str, dtype: str, arrays: Iterable[np.ndarray]
) -> MappedTokens:
    """Return the integers of `arrays`, which is iterated once, to store them in a file of the directory `cache`.

    Several processes may call it at once: one of them writes the file, while the others on its file system wait. The
    file is complete or absent at any time. Its name depends on `settings`, on the versions of the libraries, and on the
    paths, sizes and modification times of `sources`. Raise ValueError if the directory cannot be written, or if there
    are no integers. An OSError is reported as a fault of the directory, so `arrays` must not raise one.
    """
    facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
    versions = [FORMAT, *map(version, ("transformers", "tokenizers"))]
    key = hashlib.sha256(json.dumps([versions, facts, settings, dtype]).encode()).hexdigest()[:32]
    directory = Path(cache).expanduser()
    path, partial = directory / f"{key}.tokens", directory / f"{key}.partial"
    try:
        if directory.is_file():
            raise ValueError(f"cache={cache} is a file, not a directory; set data.cache")
        if not path.exists():
            directory.mkdir(parents=True, exist_ok=True)
            with open(directory / f"{key}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    try:
                        with open(partial, "wb") as file:
                            file.writelines(integers.astype(dtype).tobytes() for integers in arrays)
                        if not partial.stat().st_size:
                            raise ValueError(f"files: there are no tokens in {', '.join(map(str, sources[:-1]))}")
                        partial.rename(path)
                    finally:
                        partial.unlink(missing_ok=True)
        return MappedTokens(path, dtype)
    except OSError as error:
        raise ValueError(f"cache={cache}: tokens cannot be stored there ({error}); set data.cache") from None


def open_tokenizer(tokenizer: str) -> tuple[Any, list[Path]]:
    """Return the tokenizer of transformers in a directory or a JSON file, and the files that determine its tokens.

    Raise ValueError if there is no tokenizer.json, or if transformers is missing or cannot read it.
    """
    path = Path(tokenizer).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        problem = "has no tokenizer.json" if path.is_dir() else "is neither a directory nor a file"
        raise ValueError(f"tokenizer={tokenizer} {problem} (looked in {Path.cwd()}); write it by save_pretrained")
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError:
        raise ValueError(f"tokenizer={tokenizer} needs transformers; pip install 'experiment-runner[hf]'") from None
    try:
        if path.is_dir():
            opened: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
            return opened, sorted([*path.glob("*.json"), *path.rglob("*.jinja")])
        return PreTrainedTokenizerFast(tokenizer_file=str(path)), [path]
    except Exception as error:  # the libraries raise anything for a damaged file
        raise ValueError(f"tokenizer={tokenizer} cannot be read ({' '.join(str(error).split())})") from None


def check_vocabulary(num_outputs: int, tokenizer: Any) -> int:
    """Return the size of the vocabulary. Raise ValueError unless num_outputs is equal to it."""
    size: int = 1 + max(tokenizer.get_vocab().values())
    if num_outputs != size:
        raise ValueError(
            f"num_outputs={num_outputs} must be {size}, the size of the tokenizer's vocabulary; "
            f"set data.num_outputs={size}"
        )
    return size


def batches(items: Iterable[T], size: int = 64) -> Iterator[list[T]]:
    """Yield lists of successive items. The tokenizer encodes the texts of a list on all cores."""
    remaining = iter(items)
    return iter(lambda: list(itertools.islice(remaining, size)), [])
