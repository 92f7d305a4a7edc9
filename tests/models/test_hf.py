"""model=hf: models of transformers train in every mode as in a plain loop."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mode_cases import Case, mesh
from parity import COMMON, assert_equal, losses_of_a_plain_loop
from runner.shipped.models.hf import create
from torch.utils.data import Dataset
from worlds import build_experiment, run

from runner.errors import InputError

os.environ["HF_HUB_OFFLINE"] = "1"
transformers: Any = pytest.importorskip("transformers", reason="needs the extra hf")

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"vocab_size": 30, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = SMALL | {"num_key_value_heads": 2}
QWEN2 = LLAMA | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 30, "bos_token_id": 1, "eos_token_id": 2}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
CONFIGS = {
    "LlamaForCausalLM": ("LlamaConfig", LLAMA | {"tie_word_embeddings": True}),
    # The second layer has another mask than the first.
    "Qwen2ForCausalLM": ("Qwen2Config", QWEN2),
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
    "BertForSequenceClassification": (
        "BertConfig",
        SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
}


class Sentences(Dataset):
    """20 sentences of 3 to 8 random tokens, padded to 8; for training, all are one batch."""

    def __init__(self, split: str, sample_shape: list[int], num_outputs: int, kind: str = "next"):
        random = torch.Generator().manual_seed(int(split == "train"))
        self.tokens = torch.randint(3, 30, (20, 9), generator=random)
        self.lengths = torch.randint(3, 9, (20,), generator=random)
        self.labels = torch.randint(num_outputs, (20,), generator=random)
        self.kind = kind

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Any, torch.Tensor]:
        tokens, following = self.tokens[index, :-1], self.tokens[index, 1:]
        if self.kind == "full":  # without padding
            return tokens, following
        mask = torch.arange(8) < self.lengths[index]
        inputs = {"input_ids": tokens * mask, "attention_mask": mask.long()}
        return inputs, self.labels[index] if self.kind == "class" else following.masked_fill(~mask, -100)


def write_config(name: str, path: Path, **options: Any) -> Any:
    kind, values = CONFIGS[name]
    config = getattr(transformers, kind)(**{**values, **options}, architectures=[name])
    config.save_pretrained(path)
    return config


def overrides(path: Path, kind: str) -> tuple[str, ...]:
    outputs = 4 if kind == "class" else 30
    data = ("data=toy", "data._target_=test_hf.Sentences", "data.sample_shape=[8]", f"data.num_outputs={outputs}")
    drop = ("~data.num_train", "~data.num_val", "~data.noise", "~data.seed")
    return (*data, *drop, f"+data.kind={kind}", "batch_size=20", *COMMON, "model=hf", f"model.config={path}")


def cross_entropy(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits.movedim(-1, 1), targets)


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.set_verbosity_error()


def kind_of(name: str) -> str:
    return "class" if "Classification" in name else "next"


PADDED = [Case(*case) for case in (("none", 1), ("ddp", 2), ("allreduce", 4), ("zero", 2), ("fsdp", 2), ("fsdp", 4))]
PADDED += [Case("ps", 3), Case("tp", 2), Case("fsdp", 2, ("activation_checkpointing=full",))]
WHOLE = [Case("pipeline", 2), Case("pipeline", 4), Case("tp", 2), Case("mesh", 4, mesh("stage=2 tensor=2")[1][1:])]
CELLS = [(name, case, kind_of(name)) for name in CONFIGS for case in PADDED]
CELLS = [cell for cell in CELLS if cell[1].mode != "tp" or "Llama" in cell[0] or "Qwen" in cell[0]]
CELLS += [(name, case, "full") for name in ("LlamaForCausalLM", "Qwen2ForCausalLM") for case in WHOLE]
SEQUENCES = [Case("mesh", 2 * n, mesh(f"shard={n} sequence=2")[1][1:]) for n in (1, 2)]
CELLS += [("LlamaForCausalLM", case, "full") for case in SEQUENCES]
DEFAULT = (Case("ddp", 2), Case("pipeline", 2), SEQUENCES[0])


@pytest.mark.parametrize(
    ("name", "case", "kind"),
    [pytest.param(*cell, marks=() if cell[1] in DEFAULT else pytest.mark.thorough) for cell in CELLS],
    ids=str,
)
def test_a_model_of_transformers_equals_a_plain_loop(name: str, case: Case, kind: str, tmp_path: Path) -> None:
    config = write_config(name, tmp_path / "config")
    made = run(tmp_path, case.world_size, *overrides(tmp_path / "config", kind), "max_steps=3", *case.overrides)
    torch.manual_seed(0)
    config.num_labels = 4
    model = getattr(transformers, name)(config).double()
    dataset = Sentences("train", [8], 4 if kind == "class" else 30, kind)
    losses = losses_of_a_plain_loop(model, dataset, lr=0.01, num_steps=3, loss=cross_entropy)
    assert [made.losses[step] for step in (1, 2, 3)] == pytest.approx(losses, rel=1e-9)
    weights = {key: value for key, value in model.state_dict().items() if key in made.weights}
    torch.testing.assert_close(dict(made.weights), weights, rtol=0, atol=1e-9)


def test_the_dtype_of_a_configuration_does_not_round_the_weights(tmp_path: Path) -> None:
    created = []
    for dtype in ("float32", "bfloat16"):
        write_config("LlamaForCausalLM", tmp_path / dtype, dtype=dtype)
        torch.manual_seed(0)
        created.append(create(str(tmp_path / dtype), [8], 30).state_dict())
    torch.testing.assert_close(created[0], created[1], rtol=0, atol=0)


def test_what_a_configuration_may_not_decide(tmp_path: Path) -> None:
    """Gradient checkpointing would draw other dropout masks, and outputs may not be tuples."""
    options = {"gradient_checkpointing": True, "return_dict": False, "attention_dropout": 0.3}
    write_config("LlamaForCausalLM", tmp_path, **options)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text()) | {"gradient_checkpointing": True}
    file.write_text(json.dumps(values | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ValueError, match=r"quantized models .quantization_config. are not supported"):
        create(str(tmp_path), [8], 30)
    file.write_text(json.dumps(values))
    model = create(str(tmp_path), [8], 30)
    assert not any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    assert isinstance(model(torch.ones(1, 8, dtype=torch.long)), torch.Tensor)


def test_a_classifier_finds_the_last_token_whatever_the_padding_is(tmp_path: Path) -> None:
    write_config("LlamaForCausalLM", tmp_path, pad_token_id=5)
    model = create(str(tmp_path), [8], 4, architecture="LlamaForSequenceClassification").eval()
    tokens, mask = torch.arange(6, 14)[None], torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0]])
    alone = model(tokens[:, :3], attention_mask=mask[:, :3])
    for padding in (0, 5, 7):
        padded = tokens.where(mask == 1, padding)
        torch.testing.assert_close(model(input_ids=padded, attention_mask=mask), alone)


def test_a_model_that_ignores_positions_refuses_packed_records(tmp_path: Path) -> None:
    config = transformers.BloomConfig(vocab_size=30, hidden_size=16, n_layer=1, n_head=2)
    config.architectures = ["BloomForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="BloomForCausalLM ignores position_ids, and cannot separate packed records"):
        create(str(tmp_path), [8], 30)(input_ids=torch.ones(1, 4, dtype=torch.long), position_ids=torch.arange(4)[None])


@pytest.mark.parametrize("case", [Case("ddp", 2), Case("fsdp", 2), Case("tp", 2)], ids=str)
def test_dropout_draws_what_one_process_draws(case: Case, tmp_path: Path) -> None:
    name = "LlamaForCausalLM" if case.mode == "tp" else "BertForSequenceClassification"
    rates = {"attention_dropout": 0.3} if case.mode == "tp" else {"hidden_dropout_prob": 0.3}
    write_config(name, tmp_path / "config", **rates)
    words = (*overrides(tmp_path / "config", kind_of(name)), "max_steps=3")
    one, several = run(tmp_path / "one", 1, *words), run(tmp_path / "several", case.world_size, *words, *case.overrides)
    assert_equal(several, one)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model.config=absent",), "config=absent: no such file, nor a directory with config.json"),
        (("model.architecture=LlamaForCausaLM",), "is not a model of transformers; did you mean LlamaForCausalLM?"),
        (("model.architecture=AutoTokenizer",), "architecture=AutoTokenizer is not a model of transformers"),
        (("model.options={num_layers:3}",), "options.num_layers is not a value of config="),
        (("model.options={vocab_size:20}",), "its vocab_size=20 must be at least num_outputs=30"),
        (("model.options={num_attention_heads:two}",), "transformers cannot read it: "),
        (
            ("model.architecture=LlamaForSequenceClassification", "model.options={pad_token_id:null}"),
            "finds the last token by pad_token_id, which is not set",
        ),
        (("model.options={hidden_act:rellu}",), "transformers refuses LlamaForCausalLM with config="),
        (("model.architecture=T5Model",), "transformers refuses T5Model with config="),
    ],
)
def test_wrong_options_are_refused(
    words: tuple[str, ...], message: str, here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path.parent / f"{tmp_path.name}-config"
    write_config("LlamaForCausalLM", config)
    words = words if words[0].startswith("model.config") else (f"model.config={config}", *words)
    assert here(*overrides(config, "next")[:-1], *words) == 2
    errors = capfd.readouterr().err
    assert message in errors and len(errors.splitlines()) <= 3 and not [*tmp_path.iterdir()], errors


def test_a_missing_config_is_refused(here: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    assert here("model=hf", "data=text") == 2
    errors = capfd.readouterr().err
    assert "model.config" in errors and len(errors.splitlines()) <= 3, errors


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [("Gemma2ForCausalLM", "Gemma2Config", ()), ("LlamaForCausalLM", "LlamaConfig", ("attn_implementation:eager",))],
)
def test_attention_by_other_functions_cannot_be_split(
    name: str, kind: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    getattr(transformers, kind)(**LLAMA, architectures=[name]).save_pretrained(tmp_path)
    words = [f"model.options={{{option}}}" for option in options]
    with pytest.raises(InputError, match="model=hf computes other values for a part of the positions"):
        build_experiment(*overrides(tmp_path, "full"), *words, *mesh("shard=2 sequence=2")[1], world_size=4)


def test_a_pipeline_refuses_masks_and_scaled_embeddings(
    here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path.parent / f"{tmp_path.name}-config"
    write_config("LlamaForCausalLM", config)
    assert here(*overrides(config, "next"), "parallel=pipeline") == 2
    fails = r"the composition of the stages\(\) of model=hf fails for {input_ids: tensor \[1, 8\], attention_mask"
    assert re.search(fails, capfd.readouterr().err)
    # The forward of a Granite model multiplies the embedded tokens, wherever they come from.
    transformers.GraniteConfig(**LLAMA, embedding_multiplier=3.0, architectures=["GraniteForCausalLM"]).save_pretrained(
        config
    )
    assert here(*overrides(config, "full"), "parallel=pipeline") == 2
    assert "the stages() of model=hf is not its forward" in capfd.readouterr().err
    assert not [*tmp_path.iterdir()]
