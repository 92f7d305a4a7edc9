"""Token sequences for classifiers and language models, from JSON lines and Parquet files."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from .checks import check_counts, check_rows
from .documents import IGNORED, Documents, Form, check_tokenizer, encode_records
from .paths import find_split
from .records import Record, read_records
from .tokens import cached_tokens, check_vocabulary, open_tokenizer

KINDS = ".jsonl or .parquet"


class Sequences(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Sample i is ({"input_ids": (T,), "attention_mask": (T,)}, targets), the arguments of a model of transformers.

    The targets are the class of a text, (), or for a language model the token that follows each token, (T,), and -100
    after tokens of a prompt. All are int64. `collate` pads on the right; padding has attention_mask 0 and the target
    -100.

    Args:
        files: for each split paths or patterns of files of JSON lines or Parquet, or lists of them; None for a missing
            split. A record has the fields `text` and `label`; or for a language model `text`, `prompt` and
            `completion`, or `messages`, of which those of the assistant are learned.
        tokenizer: the directory of a tokenizer of transformers with tokenizer.json, or such a file.
        max_tokens: T is at most this number, as sample_shape is [max_tokens]; longer records are truncated.
        kind: whether the targets are classes or tokens; auto: classes if the first training record has a label,
            and then each record must have one, or otherwise none.
        pad_to: the length of a batch: its longest sample, a multiple of a number of tokens, or max_tokens.
        packing: sample i consists of as many successive documents as fit into max_tokens. Instead of attention_mask it
            has position_ids, which start at 0 in each document, and by which transformers separates the documents.
        cache: the directory in which the tokens are stored; see `cached_tokens`.

    Classes are numbered in the sorted order of the training split's labels, which `classes` contains.
    Raises ValueError if files or fields are missing, a line is not JSON, a label occurs in no training record,
    labels are of two types, or num_outputs is neither the number of classes nor the size of the vocabulary.
    """

    def __init__(
        self,
        split: Literal["train", "val", "test"],
        sample_shape: Sequence[int],
        num_outputs: int,
        files: Mapping[str, str | list[str] | None],
        tokenizer: str,
        max_tokens: int,
        kind: Literal["auto", "classes", "tokens"] = "auto",
        pad_to: int | Literal["longest", "max_tokens"] = "longest",
        packing: bool = False,
        cache: str = "datasets/tokens",
    ) -> None:
        check_counts(max_tokens=max_tokens, num_outputs=num_outputs)
        if list(sample_shape) != [max_tokens]:
            raise ValueError(f"sample_shape={list(sample_shape)} must be [max_tokens]; set data.max_tokens instead")
        if isinstance(pad_to, int) and not 1 <= pad_to <= max_tokens:
            raise ValueError(f"pad_to={pad_to} must be from 1 to max_tokens={max_tokens}; try max_tokens")
        paths = {name: find_split(files, name, KINDS) for name in dict.fromkeys(("train", split))}
        names = {name: _field_names(f"files.{name}={files[name]}", found) for name, found in paths.items()}
        has_classes = kind == "classes" or (kind == "auto" and "label" in names["train"])
        if packing and has_classes:
            raise ValueError("packing=true is for language models, and these records have classes; leave it out")
        self.max_tokens, self.pad_to, self.packing = max_tokens, pad_to, packing
        self.classes: list[str] = []
        self.labels: np.ndarray | None = None  # (N,), the class of each record
        if has_classes:
            self._read_labels(paths["train"], paths[split], num_outputs)
        fields: tuple[Form, ...] = ("messages", "completion", "text")
        form: Form = "classes" if has_classes else next((name for name in fields if name in names[split]), "text")
        opened, sources = open_tokenizer(tokenizer)
        if not has_classes:
            check_vocabulary(num_outputs, opened)
        check_tokenizer(f"tokenizer={tokenizer}", opened, form, max_tokens)
        # The mask and the targets exclude padding, so any token would do, except for a decoder with a classification
        # head: it finds the last token of a text by pad_token_id of its configuration. models.hf fills in that token.
        self.padding = opened.pad_token_id or 0
        records = read_records(paths[split])
        if kind == "auto" and not has_classes:
            records = _refusing_labels(records)
        integers = cached_tokens(
            cache,
            [*paths[split], *sources],
            f"{form} {kind} {max_tokens}",
            "int32",
            encode_records(opened, records, form, max_tokens),
        )
        self.documents = Documents(integers, has_targets=not has_classes)
        lengths = self.documents.lengths
        if not len(lengths):
            raise ValueError(f"files.{split}: no record has a token to predict within max_tokens={max_tokens}")
        # The first document of each sample, and the number of documents. (len + 1,)
        self.bounds = _pack(lengths, max_tokens) if packing else np.arange(len(lengths) + 1)
        self.header_lines = [self._describe(split)]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        check_rows([index], len(self))
        documents = [self.documents.read(number) for number in range(*self.bounds[index : index + 2])]
        rows = torch.from_numpy(np.concatenate(documents, axis=1))  # (1 or 2, T)
        inputs = {"input_ids": rows[0], "attention_mask": torch.ones_like(rows[0])}
        if self.packing:
            positions = [torch.arange(document.shape[1]) for document in documents]
            inputs = {"input_ids": rows[0], "position_ids": torch.cat(positions)}
        return inputs, rows[1] if self.labels is None else torch.tensor(self.labels[index])

    def collate(self, samples: Sequence[tuple[dict[str, Tensor], Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
        """Return a batch, (N, T), padded on the right; position_ids of padding are those of one more document."""
        longest = max(len(inputs["input_ids"]) for inputs, _ in samples)
        step = self.pad_to if isinstance(self.pad_to, int) else 1
        width = self.max_tokens if self.pad_to == "max_tokens" else min(-(-longest // step) * step, self.max_tokens)
        fill = {"input_ids": self.padding, "attention_mask": 0}

        def padded(name: str, tokens: Tensor) -> Tensor:
            missing = width - len(tokens)
            if name == "position_ids":
                return torch.cat([tokens, torch.arange(missing)])
            return F.pad(tokens, (0, missing), value=fill.get(name, IGNORED))

        inputs = {name: torch.stack([padded(name, sample[name]) for sample, _ in samples]) for name in samples[0][0]}
        targets = [target if target.dim() == 0 else padded("targets", target) for _, target in samples]
        return inputs, torch.stack(targets)

    def _read_labels(self, train: Sequence[Path], paths: Sequence[Path], num_outputs: int) -> None:
        positions: dict[type, str] = {}  # of the first label of each type
        found = set()
        for record in read_records(train):
            found.add(label := record.label())
            positions.setdefault(type(label), record.position)
        if len(positions) > 1:
            raise ValueError(
                f"{positions[str]}: label is text, but an integer in {positions[int]}; write all labels as one type"
            )
        try:
            known = sorted(found, key=lambda label: (int(label), str(label)))  # 1 and 01 are two labels
        except ValueError:
            known = sorted(found, key=str)
        self.classes = [str(label) for label in known]
        if num_outputs != (count := len(self.classes)):
            listed = ", ".join(self.classes[:5]) + (", ..." if count > 5 else "")
            raise ValueError(
                f"num_outputs={num_outputs} must be {count}, the number of labels ({listed}); "
                f"set data.num_outputs={count}"
            )
        numbers = {label: number for number, label in enumerate(known)}
        labels = []
        for record in read_records(paths):
            if (label := record.label()) not in numbers:
                raise ValueError(f"{record.position}: label is {label!r}, which no training record has")
            labels.append(numbers[label])
        self.labels = np.array(labels)

    def _describe(self, split: str) -> str:
        documents = self.documents
        line = f"{split}: {len(documents.lengths):,} records of {documents.lengths.sum():,} tokens"
        if self.packing:
            used = documents.lengths.sum() / (len(self) * self.max_tokens)
            line += f" in {len(self):,} rows, which they fill to {used:.0%}"
        if documents.num_truncated:
            line += f"; {documents.num_truncated:,} truncated to {self.max_tokens} tokens"
        if documents.num_left_out:
            line += f"; {documents.num_left_out:,} left out, because they have no token to predict"
        return line


def _field_names(option: str, paths: Sequence[Path]) -> set[str]:
    """Return the names of the first record's fields. Raise ValueError if there is no record."""
    for record in read_records(paths):
        return {*record.fields}
    raise ValueError(f"{option} has no records; at least one is required")


def _refusing_labels(records: Iterator[Record]) -> Iterator[Record]:
    """Yield the records. Raise ValueError if one has a label, because the first training record has none."""
    for record in records:
        if "label" in record.fields:
            raise ValueError(
                f"{record.position}: the record has a label, but the first training record has none; add a label to "
                "each record, or set data.kind=tokens"
            )
        yield record


def _pack(lengths: np.ndarray, room: int) -> np.ndarray:
    """Return the first document of each row, and the number of documents. A row has at most `room` tokens.

    The documents stay in their order, and a row ends before the first one that does not fit (next-fit).
    """
    bounds, used = [0], 0
    for number, length in enumerate(lengths.tolist()):
        if used + length > room:
            bounds.append(number)
            used = 0
        used += length
    return np.array([*bounds, len(lengths)])
