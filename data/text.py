"""Text as blocks of tokens for a language model: characters, bytes or the tokens of a tokenizer."""

import codecs
import hashlib
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .checks import check_rows, check_sizes
from .paths import find_files
from .tensors import BatchDataset
from .tokens import MappedTokens, batches, cached_tokens, check_vocabulary, open_tokenizer

PARTS = {"train": (0.0, 0.9), "val": (0.9, 0.95), "test": (0.95, 1.0)}  # parts of the text, by position
PIECE = 2**16  # least number of characters that are encoded at once, in whole lines
PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))  # the vocabulary of the text that comes with Python
# Typographic quotation marks, dashes and ellipses, and their ASCII equivalents.
TO_ASCII = str.maketrans(
    dict(zip("\u201c\u201d\u2018\u2019\u2013\u2014\u2026", ('"', '"', "'", "'", "-", "-", "..."), strict=True))
)


class Text(BatchDataset):
    """Blocks of int64 tokens, (block,), and as targets the token that follows each of them; sample_shape is [block].

    files: paths and patterns, read as UTF-8 and concatenated; None means the English help texts of pydoc (0.4 million
        characters, which differ slightly between versions of Python).
    The first 90% of the tokens are for training, 5% for validation and 5% for testing; blocks do not overlap.
    The vocabulary consists of the sorted characters of the whole text, or of all 256 bytes; for pydoc, of printable
    ASCII.
    tokenizer: a directory with tokenizer.json, or such a file. Its tokens replace characters, without special tokens
        such as an end of text. They are computed once, in pieces of whole lines, and stored in the directory `cache`,
        from which they are mapped into memory.
    Raises ValueError if num_outputs is not the size of the vocabulary, a split is shorter than a block, or a file is
    missing or not UTF-8.
    """

    reads_ahead = True  # several batches at once, because a block does not depend on the others

    def __init__(
        self,
        split: Literal["train", "val", "test"],
        sample_shape: Sequence[int],
        num_outputs: int,
        files: str | Sequence[str] | None = None,
        unit: Literal["characters", "bytes"] = "characters",
        tokenizer: str | None = None,
        cache: str = "datasets/tokens",
    ) -> None:
        check_sizes(sample_shape, num_outputs)
        if len(sample_shape) != 1:
            raise ValueError(f"sample_shape={list(sample_shape)} must be one size, the tokens of a block; try [128]")
        if tokenizer is not None and unit == "bytes":
            raise ValueError(f"unit=bytes has no effect with tokenizer={tokenizer}; leave out one of them")
        self.unit, self.tokenizer, self.block = unit, tokenizer, sample_shape[0]
        tokens: np.ndarray | MappedTokens
        if tokenizer is not None:
            tokens = _encode(tokenizer, num_outputs, [] if files is None else find_files("files", files), cache)
        elif unit == "bytes":
            paths = [] if files is None else find_files("files", files)
            content = b"".join(map(_read_bytes, paths)) if paths else _pydoc().encode()
            self.vocabulary, tokens = [chr(number) for number in range(256)], np.frombuffer(content, np.uint8)
        else:
            text = _pydoc() if files is None else "".join(map(_read_characters, find_files("files", files)))
            self.vocabulary, tokens = _tokenize(text, PRINTABLE if files is None else "")
        if tokenizer is None and num_outputs != (size := len(self.vocabulary)):
            raise ValueError(
                f"num_outputs={num_outputs} must be {size}, the number of different {unit} of the text; "
                f"set data.num_outputs={size}"
            )
        start, end = (round(part * len(tokens)) for part in PARTS[split])
        if end - start <= self.block:
            raise ValueError(
                f"sample_shape={list(sample_shape)} is too long: the {split} split has {end - start} tokens, but a "
                f"block needs one more than its length; try [{max(1, min(128, (end - start) // 4))}] or a longer text"
            )
        self.tokens = tokens.part(start, end) if isinstance(tokens, MappedTokens) else tokens[start:end]

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.block

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a batch: (len(indices), block) tokens, and the tokens that follow them."""
        rows = check_rows(indices, len(self)).numpy()
        positions = rows[:, None] * self.block + np.arange(self.block + 1)  # (N, block + 1)
        tokens = torch.from_numpy(self.tokens[positions].astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens; invalid UTF-8 becomes a replacement character."""
        if self.tokenizer is not None:
            text: str = open_tokenizer(self.tokenizer)[0].decode(list(tokens))
            return text
        if self.unit == "bytes":
            return bytes(tokens).decode(errors="replace")
        return "".join(self.vocabulary[number] for number in tokens)


def _tokenize(text: str, vocabulary: str) -> tuple[list[str], np.ndarray]:
    """Return the sorted characters of text and vocabulary, and the index of each character of the text among them."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)  # (T,)
    known = np.union1d(codes, np.frombuffer(vocabulary.encode("utf-32-le"), np.uint32))
    kind = np.uint8 if len(known) <= 256 else np.int32  # Unicode has 1.1 million characters
    # In pieces, because searchsorted returns 8 bytes per character.
    pieces = [np.searchsorted(known, codes[at : at + 2**24]).astype(kind) for at in range(0, len(codes), 2**24)]
    return [chr(code) for code in known], np.concatenate([np.empty(0, kind), *pieces])


def _encode(tokenizer: str, num_outputs: int, paths: Sequence[Path], cache: str) -> MappedTokens:
    """Return the tokens of some files, or of pydoc's help texts without files."""
    opened, sources = open_tokenizer(tokenizer)
    dtype = "uint16" if check_vocabulary(num_outputs, opened) <= 2**16 else "uint32"
    opened.backend_tokenizer.no_truncation()
    opened.backend_tokenizer.no_padding()

    def encoded() -> Iterator[np.ndarray]:
        for file in (_decoding(path) for path in paths) if paths else [io.StringIO(_pydoc())]:
            with file as lines:
                for pieces in batches(iter(lambda: "".join(lines.readlines(PIECE)), "")):
                    for encoding in opened.backend_tokenizer.encode_batch(pieces, add_special_tokens=False):
                        yield np.array(encoding.ids)

    # The help texts differ between versions of Python.
    settings = "files" if paths else hashlib.sha256(_pydoc().encode()).hexdigest()
    return cached_tokens(cache, [*sources, *paths], settings, dtype, encoded())


@contextmanager
def _decoding(path: Path) -> Iterator[io.TextIOBase]:
    """Open a file of UTF-8, without a byte order mark. Raise ValueError if it cannot be read or has other bytes."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError as error:
        raise ValueError(f"files: {path} is not UTF-8 ({error.reason}); convert it, or set unit=bytes") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"files: {path} cannot be read: {error.strerror}")


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise _unreadable(path, error) from None


def _read_characters(path: Path) -> str:
    with _decoding(path) as file:
        return file.read()


def _pydoc() -> str:
    """Return Python's help texts in the order of their names, in printable ASCII.

    Repeated paragraphs are skipped, so that no test text occurs in the training text.
    """
    from pydoc_data.topics import topics

    paragraphs: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in topics[name].translate(TO_ASCII).split("\n\n"):
            paragraphs.setdefault(" ".join(paragraph.split()), paragraph)
    return "".join(character for character in "\n\n".join(paragraphs.values()) if character in PRINTABLE)
