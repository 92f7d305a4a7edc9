"""Records of text as sequences of tokens: samples, targets, padding, packing, the cache, and refused files."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runner.shipped.data.sequences import Sequences
from runner.shipped.data.text import Text
from token_files import VOCABULARY, save_records, save_tokenizer, transformers

EOS, PAD = VOCABULARY.index("<eos>"), VOCABULARY.index("<pad>")
SENTENCES = ["the cat sat on a mat", "a dog", "the bird sang in a old tree near the blue lake", "small cat ran"]
Make = Callable[..., Sequences]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a function that saves records and returns the dataset."""
    monkeypatch.chdir(tmp_path)
    tokenizer = str(save_tokenizer(tmp_path / "tokenizer"))

    def dataset(records: Any, name: str = "records.jsonl", **options: Any) -> Sequences:
        save_records(tmp_path / name, records)
        known: Any = {"split": "train", "num_outputs": len(VOCABULARY), "max_tokens": 8, "tokenizer": tokenizer}
        known |= {"files": {"train": name}, **options}
        return Sequences(sample_shape=[known["max_tokens"]], **known)

    return dataset


def words(*tokens: str) -> list[int]:
    return [VOCABULARY.index(token) for token in tokens]


def as_lists(data: Sequences) -> list[tuple[list[int], list[int]]]:
    return [(inputs["input_ids"].tolist(), targets.tolist()) for inputs, targets in data]


@pytest.mark.parametrize("name", ["records.jsonl", "records.parquet"])
def test_the_targets_are_the_next_tokens_that_are_learned(make: Make, name: str) -> None:
    assert as_lists(make([{"text": "the cat sat"}], name)) == [
        (words("the", "cat", "sat"), words("cat", "sat", "<eos>"))
    ]
    pair = {"prompt": "the cat", "completion": " sat on"}
    expected = (words("the", "cat", "sat", "on"), [-100, *words("sat", "on", "<eos>")])
    assert as_lists(make([pair], f"pair_{name}")) == [expected]
    chat = [("user", "the cat"), ("assistant", "sat on"), ("user", "a dog"), ("assistant", "ran")]
    messages = [{"role": role, "content": content} for role, content in chat]
    ((tokens, targets),) = as_lists(make([{"messages": messages}], f"chat_{name}", max_tokens=20))
    first = words("<user>", "the", "cat", "<eos>", "<assistant>", "sat", "on", "<eos>")
    assert tokens == [*first, *words("<user>", "a", "dog", "<eos>", "<assistant>", "ran")]
    assert targets == [*[-100] * 4, *words("sat", "on", "<eos>"), *[-100] * 5, *words("ran", "<eos>")]


def test_long_records_are_truncated_and_records_without_targets_left_out(make: Make) -> None:
    prompt = " ".join(["the"] * 9)
    data = make([*({"prompt": "", "completion": text} for text in SENTENCES), {"prompt": prompt, "completion": " cat"}])
    assert data.header_lines == [
        "train: 4 records of 19 tokens; 1 truncated to 8 tokens; 1 left out, because they have no token to predict"
    ]
    assert as_lists(data)[2] == (words(*SENTENCES[2].split()[:8]), words(*SENTENCES[2].split()[1:9]))


def test_classes_are_the_sorted_labels_of_the_training_split(make: Make, tmp_path: Path) -> None:
    train = [{"text": text, "label": label} for text, label in zip(SENTENCES, (10, 9, 10, 9), strict=True)]
    data = make(train, num_outputs=2)
    assert data.classes == ["9", "10"] and [target.item() for _, target in data] == [1, 0, 1, 0]
    inputs, targets = data.collate([data[0], data[1]])
    assert inputs["input_ids"].tolist() == [words(*SENTENCES[0].split()), [*words("a", "dog"), *[PAD] * 4]]
    assert inputs["attention_mask"].tolist() == [[1] * 6, [1, 1, 0, 0, 0, 0]] and targets.tolist() == [1, 0]
    save_records(tmp_path / "val.jsonl", [train[1], {"text": "a", "label": "11"}])
    with pytest.raises(ValueError, match=r"^val.jsonl, line 2: label is '11', which no training record has"):
        make(train, num_outputs=2, split="val", files={"train": "records.jsonl", "val": "val.jsonl"})


def test_a_truncated_text_keeps_the_special_tokens_of_its_classifier(make: Make, tmp_path: Path) -> None:
    from tokenizers import processors

    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer", local_files_only=True)
    parts = [("<user>", words("<user>")[0]), ("<eos>", EOS)]
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing("<user> $A <eos>", special_tokens=parts)
    fast.backend_tokenizer.save(str(tmp_path / "marked.json"))
    data = make([{"text": SENTENCES[0], "label": "x"}], num_outputs=1, max_tokens=4, tokenizer="marked.json")
    assert data[0][0]["input_ids"].tolist() == words("<user>", "the", "cat", "<eos>")
    assert data.padding == 0  # such a file names no padding token
    with pytest.raises(
        ValueError, match=r"^max_tokens=2 must be greater than 2, the number of special tokens that tok"
    ):
        make([{"text": SENTENCES[0], "label": "x"}], num_outputs=1, max_tokens=2, tokenizer="marked.json")
    with pytest.raises(ValueError, match=r"^tokenizer=marked.json has no end-of-text token, so .*; set eos_token of"):
        make([{"text": SENTENCES[0]}], tokenizer="marked.json")


def test_all_labels_are_of_one_type_and_all_records_of_one_kind(make: Make, tmp_path: Path) -> None:
    zeros = [{"text": "a", "label": "0" * count + "1"} for count in range(8)]
    assert make(zeros, num_outputs=8).classes == sorted(str(record["label"]) for record in zeros)
    mixed: list[dict[str, Any]] = [{"text": "a", "label": "1"}, {"text": "a", "label": 1}]
    message = r"records.jsonl, line 1: label is text, but an integer in records.jsonl, line 2; write all labels as one"
    with pytest.raises(ValueError, match=f"^{message}"):
        make(mixed, num_outputs=1)
    save_records(tmp_path / "val.jsonl", mixed)
    with pytest.raises(ValueError, match=r"^val.jsonl, line 2: label is 1, which no training record has"):
        make(mixed[:1], num_outputs=1, split="val", files={"train": "records.jsonl", "val": "val.jsonl"})
    later = [{"text": "a cat"}, {"text": "a", "label": "x"}]
    assert len(make(later, kind="tokens")) == 2
    with pytest.raises(ValueError, match=r"^records.jsonl, line 2: the record has a label, but the first training rec"):
        make(later)  # the stored tokens of the other kind are not used


@pytest.mark.parametrize(("pad_to", "width"), [("longest", 6), (4, 8), (5, 8), ("max_tokens", 8)])
def test_batches_are_padded_to_the_longest_sample_to_a_multiple_or_to_max_tokens(
    make: Make, pad_to: Any, width: int
) -> None:
    data = make([{"text": text} for text in SENTENCES], pad_to=pad_to)
    inputs, targets = data.collate([data[0], data[1]])
    assert {name: tensor.shape for name, tensor in inputs.items()} == dict.fromkeys(inputs, (2, width))
    assert targets[1].tolist() == [*words("dog", "<eos>"), *[-100] * (width - 2)]


def test_packed_rows_are_successive_documents(make: Make) -> None:
    data = make([{"text": text} for text in SENTENCES], packing=True)
    assert data.header_lines == [
        "train: 4 records of 19 tokens in 3 rows, which they fill to 79%; 1 truncated to 8 tokens"
    ]
    inputs, targets = data.collate([data[number] for number in range(3)])
    assert {*inputs} == {"input_ids", "position_ids"} and targets.shape == (3, 8)
    assert inputs["position_ids"].tolist() == [[*range(6), 0, 1], [*range(8)], [*range(3), *range(5)]]
    assert inputs["input_ids"][0].tolist() == words(*SENTENCES[0].split(), "a", "dog")
    assert targets[0].tolist() == words(*SENTENCES[0].split()[1:], "<eos>", "dog", "<eos>")
    assert targets[2].tolist() == [*words("cat", "ran", "<eos>"), *[-100] * 5]


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_packed_documents_do_not_attend_to_each_other(make: Make, kind: str) -> None:
    """The logits of transformers with SDPA are those of each document alone."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "GPT2LMHeadModel":
        config: Any = transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=len(VOCABULARY)
        )
    else:
        config = transformers.LlamaConfig(**sizes, vocab_size=len(VOCABULARY))
    model = getattr(transformers, kind)(config).double().eval()
    assert model.config._attn_implementation == "sdpa"
    records = [{"text": text} for text in SENTENCES]
    alone, packed = make(records, max_tokens=16), make(records, max_tokens=16, packing=True)
    logits = [model(inputs["input_ids"][None]).logits[0] for inputs, _ in alone]
    inputs, _ = packed.collate([packed[number] for number in range(len(packed))])
    found = model(**inputs, use_cache=False).logits
    assert len(packed) == 2
    torch.testing.assert_close(found[0, :8], torch.cat(logits[:2]), rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1, : len(logits[2])], logits[2], rtol=0, atol=1e-12)


def test_the_tokens_are_computed_once_and_mapped(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    records = [{"text": "the cat sat on a mat"}] * 300
    data = make(records)
    again = pickle.loads(pickle.dumps(data))
    assert as_lists(again) == as_lists(data)
    assert len(pickle.dumps(data)) < 12_000  # 24 bytes a record, and no tokens
    monkeypatch.setattr("json.loads", None)  # the records are not read again
    (cached,) = (tmp_path / "datasets" / "tokens").glob("*.tokens")
    time = cached.stat().st_mtime_ns
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert as_lists(Sequences("train", [8], len(VOCABULARY), {"train": "records.jsonl"}, "tokenizer", 8)) == as_lists(
        data
    )
    assert cached.stat().st_mtime_ns == time
    assert as_lists(make([{"text": "a dog"}])) == [(words("a", "dog"), words("dog", "<eos>"))]  # another file


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"^records.jsonl, line 2: is not JSON \(.*\); write one JSON object per line$"),
        ("[1]", r"^records.jsonl, line 2: is list in JSON; write one JSON object per line$"),
        ('{"body": "a"}', r"^records.jsonl, line 2: the field text is missing; the record has body$"),
        ('{"text": null}', r"^records.jsonl, line 2: the field text is null; remove the record, or fill in the value$"),
        ('{"text": 1}', r"^records.jsonl, line 2: the field text must be str, not int$"),
        (r'{"text": "a \ud800"}', r"^records.jsonl, line 2: \\ud800 is one half of a surrogate pair; remove it, or"),
    ],
)
def test_records_that_cannot_be_read_are_named(line: str, message: str, make: Make, tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text(f'{{"text": "a cat"}}\n{line}\n')
    with pytest.raises(ValueError, match=message):
        Sequences("train", [8], len(VOCABULARY), {"train": "records.jsonl"}, "tokenizer", 8)
    assert not [*tmp_path.glob("datasets/tokens/*.tokens"), *tmp_path.glob("datasets/tokens/*.partial")]


def test_invalid_options_are_refused_before_anything_is_written(make: Make, tmp_path: Path) -> None:
    text, labeled = [{"text": "a cat"}], [{"text": "a cat", "label": "x"}]
    (tmp_path / "empty").mkdir()
    (tmp_path / "wrong.json").write_text("{}")
    for records, options, message in (
        (
            text,
            {"num_outputs": 2},
            r"num_outputs=2 must be 33, the size of the tokenizer's vocabulary; set data.num_out",
        ),
        (labeled, {}, r"num_outputs=33 must be 1, the number of labels \(x\); set data.num_outputs=1"),
        ([{"text": "a", "label": None}], {"kind": "classes"}, "records.jsonl, line 1: the field label is null"),
        ([{"text": "a", "label": 0.5}], {}, "records.jsonl, line 1: the field label must be str, not float"),
        ([], {}, r"files.train=records.jsonl has no records; at least one is required"),
        (text, {"files": {"train": "other.jsonl"}}, r"files.train=other.jsonl is not a file"),
        (text, {"files": {"train": None}}, r"files.train=null: the train split needs a .jsonl or .parquet file"),
        (text, {"tokenizer": "empty"}, r"tokenizer=empty has no tokenizer.json"),
        (text, {"tokenizer": "other"}, r"tokenizer=other is neither a directory nor a file"),
        (text, {"tokenizer": "wrong.json"}, r"tokenizer=wrong.json cannot be read \("),
        (text, {"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        (text, {"pad_to": 9}, "pad_to=9 must be from 1 to max_tokens=8"),
        (labeled, {"num_outputs": 1, "packing": True}, "packing=true is for language models"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            make(records, **options)
    assert not (tmp_path / "datasets").exists()
    with pytest.raises(ValueError, match=r"^files.train: no record has a token to predict within max_tokens=1"):
        make([{"prompt": "a cat", "completion": " ran"}], max_tokens=1)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^cache=file is a file, not a directory; set data.cache"):
        make(text, cache="file")
    with pytest.raises(ValueError, match=r"^cache=file/a: tokens cannot be stored there \(.*\); set data.cache"):
        make(text, cache="file/a")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux's /proc")
def test_a_file_that_cannot_be_read_is_no_fault_of_the_cache(make: Make, tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").symlink_to("/proc/self/mem")
    with pytest.raises(ValueError, match=r"^broken.jsonl cannot be read: Input/output error"):
        make([], files={"train": "broken.jsonl"})
    with pytest.raises(ValueError, match=r"^files: broken.jsonl cannot be read: Input/output error"):
        Text("train", [8], len(VOCABULARY), "broken.jsonl", tokenizer="tokenizer")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "line 1: the tokenizer's chat template refuses messages: Cannot use chat"),
        ("{{ raise_exception('no such role') }}", "line 1: .*chat template refuses messages: no such role$"),
        (
            "{{ strftime_now('%S') }}",
            "^tokenizer=.*: its chat template contains today's date .*; write a fixed date into",
        ),
        ("{% for m in messages %}{{ loop.revindex }}{% endfor %}", "line 1: .*its text of a message depends on later"),
    ],
)
def test_messages_that_the_chat_template_does_not_suit_are_refused(
    template: str | None, message: str, make: Make, tmp_path: Path
) -> None:
    tokenizer = str(save_tokenizer(tmp_path / "other", template))
    messages = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match=message):
        make([{"messages": messages}], tokenizer=tokenizer)


def test_text_is_read_as_the_tokens_of_a_tokenizer(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are encoded in pieces, and the splits are parts of their tokens."""
    monkeypatch.setattr("runner.shipped.data.text.PIECE", 100)
    lines = [f"{sentence} {number % 10} ." for number in range(100) for sentence in SENTENCES]
    (tmp_path / "a.txt").write_text("\n".join(lines[:200]) + "\n")
    (tmp_path / "b.txt").write_text("\n".join(lines[200:]) + "\n")
    tokens = words(*" ".join(lines).split())
    splits = [
        Text(split, [8], len(VOCABULARY), "*.txt", tokenizer="tokenizer/tokenizer.json") for split in ("train", "val")
    ]
    assert splits[0].tokens[:].tolist() + splits[1].tokens[:].tolist() == tokens[: round(0.95 * len(tokens))]
    inputs, targets = pickle.loads(pickle.dumps(splits[1])).__getitems__([0, 1])
    assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])
    assert splits[1].decode(inputs[0].tolist()).split() == [VOCABULARY[token] for token in inputs[0]]
    assert len([*(tmp_path / "datasets" / "tokens").glob("*.tokens")]) == 1
    with pytest.raises(
        ValueError, match=r"^num_outputs=96 must be 33, the size of the tokenizer's vocabulary; set data"
    ):
        Text("train", [8], 96, "*.txt", tokenizer="tokenizer")
    with pytest.raises(ValueError, match=r"^unit=bytes has no effect with tokenizer=tokenizer; leave out one of them"):
        Text("train", [8], 256, "*.txt", "bytes", tokenizer="tokenizer")
    (tmp_path / "c.txt").write_bytes(b"a cat\n\xff\xfe")
    with pytest.raises(ValueError, match=r"^files: c\.txt is not UTF-8 \("):
        Text("train", [8], len(VOCABULARY), "c.txt", tokenizer="tokenizer")
