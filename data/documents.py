"""Documents of tokens with the tokens to predict, from records of text, of prompts and completions, or of messages."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np

from .records import Record
from .tokens import MappedTokens, batches

IGNORED = -100  # a target that torch's losses do not count
Form = Literal["classes", "messages", "completion", "text"]  # of records
Ranges = list[tuple[int, int]]  # of the characters of a text that a language model learns to write


class Documents:
    """The documents in the integers of `encode_records`, with their lengths, (N,) int64, and numbers of records."""

    def __init__(self, integers: MappedTokens, has_targets: bool) -> None:
        count, self.num_truncated, self.num_left_out = integers[-3:].tolist()
        self.lengths = integers[-3 - count : -3].astype(np.int64)
        self._integers, self._rows = integers, 2 if has_targets else 1
        self._starts = np.concatenate([[0], self.lengths.cumsum()]) * self._rows

    def read(self, number: int) -> np.ndarray:
        """Return the tokens of a document, and if it has targets those in a second row. (1 or 2, T) int64"""
        found = self._integers[self._starts[number] : self._starts[number + 1]]
        return found.astype(np.int64).reshape(self._rows, -1)


def check_tokenizer(option: str, tokenizer: Any, form: Form, max_tokens: int) -> None:
    """Raise ValueError, which names `option`, if the tokenizer does not suit records of this form."""
    if form == "messages":
        if "strftime_now" in str(tokenizer.chat_template):  # one template, or several by name
            raise ValueError(
                f"{option}: its chat template contains today's date (strftime_now), so a resumed run would learn other "
                "tokens; write a fixed date into the template"
            )
        return
    if max_tokens <= (number := tokenizer.backend_tokenizer.num_special_tokens_to_add(False)):
        # The tokenizer would not truncate at all.
        raise ValueError(
            f"max_tokens={max_tokens} must be greater than {number}, the number of special tokens that {option} adds "
            "to each text; try 128"
        )
    if form != "classes" and tokenizer.eos_token_id is None:
        raise ValueError(
            f"{option} has no end-of-text token, so a model would not learn where a text ends; set eos_token of the "
            "tokenizer, and save it by save_pretrained in a directory"
        )


def encode_records(tokenizer: Any, records: Iterable[Record], form: Form, max_tokens: int) -> Iterator[np.ndarray]:
    """Yield the integers of all documents: tokens and targets of each, and at the end their lengths and numbers.

    With the form `classes`, a document has no targets. Otherwise, its targets are the next tokens, and the token of the
    end of a text is appended, except to messages. Records whose first `max_tokens` targets are all ignored are left
    out. Raise ValueError, which names the line, if a record does not suit. `check_tokenizer` must have passed.
    """
    backend, eos = tokenizer.backend_tokenizer, tokenizer.eos_token_id
    backend.no_padding()
    classes, is_chat = form == "classes", form == "messages"
    backend.enable_truncation(max_tokens + (not classes))  # keeps the special tokens at the end
    lengths: list[int] = []
    num_truncated = num_left_out = 0
    for batch in batches(records):
        prepared = [_prepare(tokenizer, record, form) for record in batch]
        encodings = backend.encode_batch([text for text, _ in prepared], add_special_tokens=not is_chat)
        for (_, ranges), encoding, record in zip(prepared, encodings, batch, strict=True):
            is_truncated = bool(encoding.overflowing)
            document = np.array(encoding.ids, np.int64)[None]
            if not classes:
                document = _with_targets(encoding, ranges, None if is_chat or is_truncated else eos)
                is_truncated |= document.shape[1] > max_tokens
                document = document[:, :max_tokens]
                if (document[1:] == IGNORED).all():
                    num_left_out += 1
                    continue
            elif not document.size:
                raise ValueError(f"{record.position}: text has no tokens; remove the record")
            lengths.append(document.shape[1])
            num_truncated += is_truncated
            yield document.ravel()
    yield np.array([*lengths, len(lengths), num_truncated, num_left_out])


def _with_targets(encoding: Any, ranges: Ranges, eos: int | None) -> np.ndarray:
    """Return the tokens of a document without the last one, and the tokens that follow them. (2, T)"""
    ids, offsets = np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2)
    is_learned = np.zeros(len(ids), bool)
    for start, end in ranges:
        is_learned |= (offsets[:, 1] > start) & (offsets[:, 0] < end)
    if eos is not None:
        ids = ids if len(ids) and ids[-1] == eos else np.append(ids, eos)
        is_learned = np.append(is_learned[: len(ids) - 1], True)
    return np.stack([ids[:-1], np.where(is_learned[1:], ids[1:], IGNORED)])


def _prepare(tokenizer: Any, record: Record, form: Form) -> tuple[str, Ranges]:
    """Return the text of a record, and what a language model learns of it."""
    if form == "messages":
        return _render_chat(tokenizer, record)
    prompt = record.get("prompt", str) if form == "completion" else ""
    text = prompt + record.get("completion" if form == "completion" else "text", str)
    return text, [(len(prompt), len(text))]


def _render_chat(tokenizer: Any, record: Record) -> tuple[str, Ranges]:
    """Return the text of the chat template. The messages of the assistant are learned."""
    messages, ranges = record.get("messages", list), []

    def render(number: int, add_generation_prompt: bool = False) -> str:
        if not number:
            return ""
        text: str = tokenizer.apply_chat_template(
            messages[:number], tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text

    try:
        text = render(len(messages))
        for number in (number for number, message in enumerate(messages) if message["role"] == "assistant"):
            before, until = render(number, True), render(number + 1)
            if not (until.startswith(before) and text.startswith(until)):
                raise ValueError("its text of a message depends on later ones; use prompt and completion")
            ranges.append((len(before), len(until)))
    except Exception as error:  # a template may raise anything, also of its own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{record.position}: the tokenizer's chat template refuses messages: {reason}") from None
    return text, ranges
