"""Tiny configurations of many architectures of transformers: with dropout and padded batches, modes agree."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from mode_cases import Case
from parity import COMMON, assert_equal
from torch.utils.data import Dataset
from worlds import run

os.environ["HF_HUB_OFFLINE"] = "1"
transformers: Any = pytest.importorskip("transformers", reason="needs the extra hf")

IMAGES = {"image_size": 32, "patch_size": 8, "num_channels": 3}
TEXT = {"vocab_size": 30, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ENCODER = TEXT | LAYERS
DECODER = ENCODER | {"num_key_value_heads": 1, "attention_dropout": 0.1, "head_dim": 8}
SEQ2SEQ = TEXT | {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
SEQ2SEQ |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_start_token_id": 1}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONVOLUTIONS = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "embedding_size": 8}
# By model class: the class of its configuration, the kind of its samples, and values of the configuration.
ZOO = {
    "BertForSequenceClassification": ("BertConfig", "class", ENCODER),
    "RobertaForSequenceClassification": ("RobertaConfig", "class", ENCODER),
    "ElectraForSequenceClassification": ("ElectraConfig", "class", ENCODER | {"embedding_size": 16}),
    "DebertaV2ForSequenceClassification": ("DebertaV2Config", "class", ENCODER),
    "DistilBertForSequenceClassification": (
        "DistilBertConfig",
        "class",
        TEXT | {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2},
    ),
    "AlbertForSequenceClassification": ("AlbertConfig", "class", ENCODER | {"embedding_size": 16}),
    "ModernBertForSequenceClassification": (
        "ModernBertConfig",
        "class",
        ENCODER | {"cls_token_id": 1, "sep_token_id": 2},
    ),
    "LlamaForCausalLM": ("LlamaConfig", "next", DECODER),
    "Qwen3ForCausalLM": ("Qwen3Config", "next", DECODER),
    "GPT2LMHeadModel": ("GPT2Config", "next", TEXT | {"n_embd": 16, "n_layer": 2, "n_head": 2}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", "next", ENCODER | {"hidden_dropout": 0.1}),
    "OPTForCausalLM": ("OPTConfig", "next", ENCODER | {"ffn_dim": 32, "word_embed_proj_dim": 16}),
    "Gemma2ForCausalLM": ("Gemma2Config", "next", DECODER),
    "PhiForCausalLM": ("PhiConfig", "next", ENCODER | {"resid_pdrop": 0.1}),
    "MixtralForCausalLM": ("MixtralConfig", "next", DECODER | EXPERTS),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", "next", DECODER | EXPERTS),
    "T5ForConditionalGeneration": (
        "T5Config",
        "pair",
        TEXT | {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
    ),
    "BartForConditionalGeneration": ("BartConfig", "pair", SEQ2SEQ | {"dropout": 0.1}),
    "ViTForImageClassification": ("ViTConfig", "image", LAYERS | IMAGES | {"hidden_dropout_prob": 0.1}),
    "Dinov2ForImageClassification": ("Dinov2Config", "image", LAYERS | IMAGES | {"drop_path_rate": 0.1}),
    "ConvNextForImageClassification": ("ConvNextConfig", "image", CONVOLUTIONS | {"drop_path_rate": 0.1}),
    "ResNetForImageClassification": ("ResNetConfig", "image", CONVOLUTIONS),
    "SwinForImageClassification": (
        "SwinConfig",
        "image",
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    ),
    "Wav2Vec2ForSequenceClassification": (
        "Wav2Vec2Config",
        "sound",
        LAYERS
        | {"conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_conv_pos_embeddings": 4}
        | {
            "num_feat_extract_layers": 2,
            "num_conv_pos_embedding_groups": 2,
            "apply_spec_augment": False,
            "layerdrop": 0.0,
        },
    ),
}
MODES = [Case("ddp", 2), Case("zero", 2), Case("fsdp", 2), Case("allreduce", 4)]


class Samples(Dataset):
    """12 random samples of a kind; texts have 3 to 8 tokens, padded to 8. The targets are classes or tokens."""

    def __init__(self, split: str, sample_shape: list[int], num_outputs: int, kind: str):
        self.kind, self.shape, self.num_outputs = kind, sample_shape, num_outputs
        self.seed = 1000 * (split == "train")

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Any, torch.Tensor]:
        random = torch.Generator().manual_seed(self.seed + index)
        label = torch.randint(self.num_outputs, (), generator=random)
        if self.kind in ("image", "sound"):
            return torch.randn(self.shape, generator=random), label
        tokens = torch.randint(3, 30, (2, 9), generator=random)
        mask = torch.arange(8) < torch.randint(3, 9, (), generator=random)
        inputs = {"input_ids": tokens[0, :-1] * mask, "attention_mask": mask.long()}
        if self.kind == "class":
            return inputs, label
        if self.kind == "pair":
            return inputs | {"decoder_input_ids": tokens[1, :-1]}, tokens[1, 1:]
        return inputs, tokens[0, 1:].masked_fill(~mask, -100)


UNUSED = ("freeze=['mask_token|masked_spec_embed']",)  # in training without masks
EAGER = ("model.options={experts_implementation:eager}",)  # torch's grouped_mm has no float64
EXTRA = {"Dinov2ForImageClassification": UNUSED, "Wav2Vec2ForSequenceClassification": UNUSED}
EXTRA |= {"MixtralForCausalLM": EAGER, "Qwen3MoeForCausalLM": EAGER}
SHAPES = {"image": [3, 32, 32], "sound": [400]}


@pytest.mark.soak
@pytest.mark.parametrize("name", ZOO)
def test_an_architecture_of_transformers_agrees_in_all_modes(name: str, tmp_path: Path) -> None:
    kind_of_config, kind, values = ZOO[name]
    getattr(transformers, kind_of_config)(**values, architectures=[name]).save_pretrained(tmp_path / "config")
    shape, outputs = SHAPES.get(kind, [8]), 30 if kind in ("next", "pair") else 4
    words = (
        *("data=toy", "data._target_=test_hf_zoo.Samples", f"data.sample_shape={shape}", f"data.num_outputs={outputs}"),
        *("~data.num_train", "~data.num_val", "~data.noise", "~data.seed", f"+data.kind={kind}", "batch_size=8"),
        *(*COMMON, "model=hf", f"model.config={tmp_path / 'config'}", "max_steps=3"),
    )
    words += EXTRA.get(name, ())
    one = run(tmp_path / "one", 1, *words)
    for case in MODES:
        assert_equal(run(tmp_path / str(case), case.world_size, *words, *case.overrides), one)
