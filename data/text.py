"""Text as blocks of tokens for a language model: the characters or bytes of any files."""

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .checks import check_rows, check_sizes
from .paths import find_files
from .tensors import BatchDataset

PARTS = {"train": (0.0, 0.9), "val": (0.9, 0.95), "test": (0.95, 1.0)}  # parts of the text, by position
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
    ASCII. Raises ValueError if num_outputs is not the size of the vocabulary, a split is shorter than a block, or a
    file is missing or not UTF-8.
    """

    reads_ahead = True  # several batches at once, because a block does not depend on the others

    def __init__(
        self,
        split: Literal["train", "val", "test"],
        sample_shape: Sequence[int],
        num_outputs: int,
        files: str | Sequence[str] | None = None,
        unit: Literal["characters", "bytes"] = "characters",
    ) -> None:
        check_sizes(sample_shape, num_outputs)
        if len(sample_shape) != 1:
            raise ValueError(f"sample_shape={list(sample_shape)} must be one size, the tokens of a block; try [128]")
        if unit == "bytes":
            paths = [] if files is None else find_files("files", files)
            contents = [path.read_bytes().removeprefix(codecs.BOM_UTF8) for path in paths]
            content = b"".join(contents) if paths else _pydoc().encode()
            self.vocabulary, tokens = [chr(number) for number in range(256)], np.frombuffer(content, np.uint8)
        else:
            text = _pydoc() if files is None else "".join(map(_read_characters, find_files("files", files)))
            self.vocabulary, tokens = _tokenize(text, PRINTABLE if files is None else "")
        if num_outputs != len(self.vocabulary):
            size = len(self.vocabulary)
            raise ValueError(
                f"num_outputs={num_outputs} must be {size}, the number of different {unit} of the text; "
                f"set data.num_outputs={size}"
            )
        self.unit, self.block = unit, sample_shape[0]
        start, end = (round(part * len(tokens)) for part in PARTS[split])
        if end - start <= self.block:
            raise ValueError(
                f"sample_shape={list(sample_shape)} is too long: the {split} split has {end - start} tokens, but a "
                f"block needs one more than its length; try [{max(1, min(128, (end - start) // 4))}] or a longer text"
            )
        self.tokens = tokens[start:end]

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


def _read_characters(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # without a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"files: {path} is not UTF-8 ({error.reason}); convert it, or set unit=bytes") from None


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
