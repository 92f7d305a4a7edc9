"""data.packing=true is refused for models whose outputs of a record depend on the record before it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from token_files import VOCABULARY, save_records, save_tokenizer, transformers
from worlds import build_experiment

from runner.errors import InputError

COMMON = {"vocab_size": len(VOCABULARY), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {**COMMON, "intermediate_size": 16}
MODELS = {
    "LlamaForCausalLM": ("LlamaConfig", LLAMA, True),
    "Qwen2ForCausalLM": ("Qwen2Config", {**LLAMA, "num_key_value_heads": 1}, True),
    "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": len(VOCABULARY), "n_embd": 16, "n_layer": 2, "n_head": 2}, True),
    "OPTForCausalLM": ("OPTConfig", {**COMMON, "ffn_dim": 16, "word_embed_proj_dim": 16}, False),
    "BioGptForCausalLM": ("BioGptConfig", {**COMMON, "intermediate_size": 16}, False),
    "BertLMHeadModel": ("BertConfig", {**LLAMA, "is_decoder": True}, False),
}


@pytest.mark.parametrize(
    ("architecture", "packing"),
    [
        ("LlamaForCausalLM", True),
        ("OPTForCausalLM", True),
        ("OPTForCausalLM", False),
        *(pytest.param(name, True, marks=pytest.mark.thorough) for name in MODELS if name[:3] not in ("Lla", "OPT")),
    ],
)
def test_models_must_separate_packed_records(
    architecture: str, packing: bool, tmp_path: Path, here: Callable[..., int]
) -> None:
    kind, sizes, separates = MODELS[architecture]
    without: dict[str, Any] = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"), 0.0)
    getattr(transformers, kind)(**sizes, architectures=[architecture], **without).save_pretrained("config")
    save_tokenizer(tmp_path / "tokenizer")
    save_records(tmp_path / "train.jsonl", [{"text": "the cat sat on a mat"}, {"text": "a dog ran"}] * 4)
    data = ("data=sequences", "data.tokenizer=tokenizer", "data.max_tokens=16", f"data.num_outputs={len(VOCABULARY)}")
    files = ("data.files.train=train.jsonl", "val_fraction=0.5", f"data.packing={packing}")
    words = ("model=hf", "model.config=config", *data, *files, "batch_size=2")
    if separates or not packing:
        build_experiment(*words)
        assert here("task=plan", *words) == 0  # without values of tensors
    else:
        with pytest.raises(InputError, match=r"^data.packing=true: model=hf computes other outputs for a record that"):
            build_experiment(*words)
