"""data=sequences: models of transformers train in every mode as in a plain loop over whole batches."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from mode_cases import Case
from parity import COMMON, assert_equal
from ranks import RankError
from runner.shipped.data.sequences import Sequences
from token_files import VOCABULARY, save_records, save_tokenizer, transformers
from worlds import run

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"vocab_size": len(VOCABULARY)}
WORDS = VOCABULARY[16:]
DROPOUT = "model.options={hidden_dropout_prob: 0.5, attention_probs_dropout_prob: 0.5}"
THOROUGH = pytest.mark.thorough
CASES = [Case("ddp", 2), *(pytest.param(case, marks=THOROUGH) for case in (Case("none", 1), Case("fsdp", 2)))]


def sentence(number: int) -> str:
    """Return 2 to 11 words."""
    return " ".join(WORDS[(number * 7 + place * place) % len(WORDS)] for place in range(2 + number * 3 % 10))


RECORDS = {
    "classes": [{"text": sentence(number), "label": "even" if number % 2 else "odd"} for number in range(30)],
    "text": [{"text": sentence(number)} for number in range(30)],
    "completion": [{"prompt": sentence(number), "completion": " " + sentence(30 - number)} for number in range(30)],
}


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that returns the overrides of an experiment with some records."""
    monkeypatch.chdir(tmp_path)
    transformers.utils.logging.set_verbosity_error()
    save_tokenizer(tmp_path / "tokenizer")

    def overrides(kind: str, *others: str) -> tuple[str, ...]:
        save_records(tmp_path / "train.jsonl", RECORDS[kind])
        save_records(tmp_path / "val.jsonl", RECORDS[kind][:7])
        config_of(kind).save_pretrained(tmp_path / "config")
        return (
            *("model=hf", "model.config=config", "data=sequences", "data.tokenizer=tokenizer", "data.max_tokens=16"),
            *("data.files.train=train.jsonl", "data.files.val=val.jsonl", f"data.num_outputs={outputs_of(kind)}"),
            *(*COMMON, "batch_size=12", *others),
        )

    return overrides


def outputs_of(kind: str) -> int:
    return 2 if kind == "classes" else len(VOCABULARY)


def config_of(kind: str) -> Any:
    if kind == "classes":
        without = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        return transformers.BertConfig(**SIZES, **without, architectures=["BertForSequenceClassification"])
    return transformers.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])


def plain_loop(data: Sequences, kind: str, order: list[list[int]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on whole batches. Return the losses and the weights."""
    config = config_of(kind)
    torch.manual_seed(0)
    model = getattr(transformers, config.architectures[0])(config).double()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), []
    for indices in order:
        inputs, targets = data.collate([data[index] for index in indices])
        logits = model(**inputs, **{"use_cache": False} if kind != "classes" else {}).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses, model.state_dict()


@pytest.mark.parametrize(("kind", "packing"), [*((kind, False) for kind in RECORDS), ("text", True)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sequences_train_as_in_a_plain_loop(kind: str, packing: bool, case: Case, words: Any, tmp_path: Path) -> None:
    """The local micro-batches have other padded lengths than the whole batch, and other numbers of targets."""
    size = 5 if packing else 12
    options = (f"data.packing={packing}", f"batch_size={size}", "loader.shuffle=false")
    made = run(tmp_path, case.world_size, *words(kind, *options), *case.overrides)
    data = Sequences("train", [16], outputs_of(kind), {"train": "train.jsonl"}, "tokenizer", 16, packing=packing)
    epoch = [[*range(len(data))][first : first + size] for first in range(0, len(data), size)]
    losses, weights = plain_loop(data, kind, [*itertools.islice(itertools.cycle(epoch), 10)])
    assert [*made.losses.values()] == pytest.approx([losses[step - 1] for step in made.losses], rel=1e-9)
    weights = {name: tensor for name, tensor in weights.items() if name in made.weights}
    torch.testing.assert_close(dict(made.weights), weights, rtol=0, atol=1e-8)  # Llama's norms compute in float32


def test_random_numbers_do_not_depend_on_the_padded_length(words: Any, tmp_path: Path) -> None:
    """The halves of a batch have other longest samples. Positions of random numbers do not depend on shapes."""
    overrides = words("classes", DROPOUT, "loader.shuffle=false")
    one, two = (run(tmp_path / f"{n}", n, *overrides, f"parallel={'ddp' if n > 1 else 'none'}") for n in (1, 2))
    assert_equal(two, one)
    without = run(tmp_path / "without", 1, *words("classes", "loader.shuffle=false"))
    assert one.losses[1] != pytest.approx(without.losses[1], rel=1e-5)


def test_the_header_counts_records_and_labels_of_the_validation_files_are_known(
    words: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, 1, *words("text", "data.max_tokens=8", "max_steps=1", "data.files.val=null", "val_fraction=0.2"))
    output = capfd.readouterr().out
    assert "data     train: 30 records of 177 tokens; 9 truncated to 8 tokens" in output, output
    assert "data     sequences, 24 training and 6 validation samples" in output
    overrides = words("classes")
    save_records(tmp_path / "val.jsonl", [{"text": "a", "label": "both"}])
    with pytest.raises(RankError, match=r"val\.jsonl, line 1: label is 'both', which no training record has"):
        run(tmp_path / "unknown", 1, *overrides)
