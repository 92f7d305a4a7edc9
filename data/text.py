"""Text as blocks of tokens, for a language model: the characters, or the bytes, of any files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from data.checks import check_rows, check_sizes
from data.paths import find_files

PARTS = {"train": (0.0, 0.9), "val": (0.9, 0.95), "test": (0.95, 1.0)}  # of the text, by position
PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))  # the vocabulary of the text that comes with Python
# Quotation marks, dashes and the ellipsis of a printed page, as they are typed.
TYPED = str.maketrans(
    dict(zip("\u201c\u201d\u2018\u2019\u2013\u2014\u2026", ('"', '"', "'", "'", "-", "-", "..."), strict=True))
)


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Sample i: (block,) int64 tokens, and as targets the (block,) that follow each of them, for sample_shape [block].

    files: paths and patterns, read in UTF-8 and joined in that order; None is the English of Python's own reference,
        the help texts of pydoc (0.4 million characters; they differ a little between versions of Python).
    The first 90 % of the tokens are for training, 5 % for validation and 5 % for testing; blocks do not overlap.
    The vocabulary are the sorted characters of the whole text, or all 256 bytes; of pydoc's texts, printable ASCII.
    Raises ValueError where num_outputs is not the size of the vocabulary, a split is shorter than a block, and a file
    is missing or not in UTF-8.
    """

    reads_ahead = True  # several shares at once: a block is the same, whatever it is cut with

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
            content = b"".join(path.read_bytes() for path in paths) if paths else _pydoc().encode()
            self.vocabulary, tokens = [chr(number) for number in range(256)], np.frombuffer(content, np.uint8)
        else:
            text = _pydoc() if files is None else "".join(map(_read_characters, find_files("files", files)))
            self.vocabulary, tokens = _tokenize(text, PRINTABLE if files is None else "")
        if num_outputs != len(self.vocabulary):
            size = len(self.vocabulary)
            raise ValueError(
                f"num_outputs={num_outputs} must be {size}, the different {unit} of the text; "
                f"set data.num_outputs={size}"
            )
        self.unit, self.block = unit, sample_shape[0]
        start, end = (round(part * len(tokens)) for part in PARTS[split])
        if end - start <= self.block:
            raise ValueError(
                f"sample_shape={list(sample_shape)} is too long: the {split} split has {end - start} tokens, and a "
                f"block needs one more than it is long; try [{max(1, min(128, (end - start) // 4))}] or a longer text"
            )
        self.tokens = tokens[start:end]

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.block

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A batch: (len(indices), block) tokens and the tokens that follow them, collated."""
        rows = check_rows(indices, len(self)).numpy()
        places = rows[:, None] * self.block + np.arange(self.block + 1)  # (N, block + 1)
        tokens = torch.from_numpy(self.tokens[places].astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens; bytes that are no UTF-8 are shown as a replacement character."""
        if self.unit == "bytes":
            return bytes(tokens).decode(errors="replace")
        return "".join(self.vocabulary[number] for number in tokens)


def _tokenize(text: str, vocabulary: str) -> tuple[list[str], np.ndarray]:
    """The sorted characters, of the text and of the vocabulary that is known, and each character's place among them."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)  # (T,)
    known = np.union1d(codes, np.frombuffer(vocabulary.encode("utf-32-le"), np.uint32))
    kind = np.uint8 if len(known) <= 256 else np.int32  # there are 1.1 million characters
    # In pieces: what is searched for takes 8 bytes each.
    pieces = [np.searchsorted(known, codes[at : at + 2**24]).astype(kind) for at in range(0, len(codes), 2**24)]
    return [chr(code) for code in known], np.concatenate([np.empty(0, kind), *pieces])


def _read_characters(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"files: {path} is not in UTF-8 ({error.reason}); convert it, or read unit=bytes") from None


def _pydoc() -> str:
    """Python's help texts in the order of their names, in printable ASCII; a paragraph that comes again is left out,
    so that what is tested on has not been trained on."""
    from pydoc_data.topics import topics

    paragraphs: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in topics[name].translate(TYPED).split("\n\n"):
            paragraphs.setdefault(" ".join(paragraph.split()), paragraph)
    return "".join(character for character in "\n\n".join(paragraphs.values()) if character in PRINTABLE)
