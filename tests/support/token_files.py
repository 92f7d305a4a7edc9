"""A small tokenizer, saved as transformers saves it, and files of records."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the import: tests use no network
transformers: Any = pytest.importorskip("transformers", reason="needs the extra hf")

# The words of the tokenizer, by token.
VOCABULARY = (
    *("<unk>", "<eos>", "<pad>", "<user>", "<assistant>", ".", *"0123456789"),
    *("the", "cat", "sat", "on", "a", "mat", "dog", "ran", "bird", "sang", "in", "old", "tree", "near", "blue", "lake"),
    *("small",),
)
SPECIAL = {"eos_token": "<eos>", "pad_token": "<pad>"}
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} <eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_tokenizer(folder: Path, template: str | None = TEMPLATE, **special: str) -> Path:
    """Save a tokenizer of words, whose tokens of unknown words are 0. Return its directory."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(VOCABULARY)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **(special or SPECIAL))
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def save_records(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Save records as JSON lines, or as Parquet by the ending of the path."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
