"""export.format=hf: transformers loads the weights of a run to the bit, and so does a new run."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.utils.data import Dataset
from worlds import Run, run

from runner.checkpoints.saved_state import weights_sha256
from runner.tasks.hf_directory import class_of

os.environ["HF_HUB_OFFLINE"] = "1"
transformers: Any = pytest.importorskip("transformers", reason="needs the extra hf")

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"vocab_size": 96, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "LlamaForCausalLM": ("LlamaConfig", SMALL | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
    "BertForSequenceClassification": ("BertConfig", SMALL),
}
COMMON = ("logger=none", "batch_size=20", "eval_batches=1", "optimizer.lr=0.1")
TEXT = ("data=text", "data.sample_shape=[8]", *COMMON)
CLASSES = (
    *("data=toy", "data._target_=test_hf_directory.Labeled", "data.sample_shape=[8]", "data.num_outputs=3"),
    *("~data.num_train", "~data.num_val", "~data.noise", "~data.seed", *COMMON),
)


class Labeled(Dataset):
    """20 sequences of 8 random tokens, in one of three classes."""

    def __init__(self, split: str, sample_shape: list[int], num_outputs: int):
        random = torch.Generator().manual_seed(int(split == "train"))
        self.tokens = torch.randint(3, 96, (20, *sample_shape), generator=random)
        self.labels = torch.randint(num_outputs, (20,), generator=random)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens[index], self.labels[index]


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def write_config(name: str, path: Path) -> None:
    kind, values = CONFIGS[name]
    getattr(transformers, kind)(**values, architectures=[name]).save_pretrained(path)


def tensors_in(directory: Path) -> dict[str, Path]:
    files = directory.glob("*.safetensors")
    return {name: file for file in files for name in safe_open(file, "pt").keys()}  # noqa: SIM118  # no mapping


@pytest.mark.parametrize(
    ("name", "auto", "num_ranks", "words"),
    [
        ("LlamaForCausalLM", "AutoModelForCausalLM", 2, (*TEXT, "parallel=fsdp", "ema.decay=0.5")),
        ("BertForSequenceClassification", "AutoModelForSequenceClassification", 2, (*CLASSES, "parallel=fsdp")),
        pytest.param(
            *("LlamaForCausalLM", "AutoModelForCausalLM", 1, (*TEXT, "parallel=none")), marks=pytest.mark.thorough
        ),
        pytest.param(
            *("GPT2LMHeadModel", "AutoModelForCausalLM", 1, (*TEXT, "parallel=none", "precision=fp64")),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=("llama-averaged", "bert", "llama", "gpt2"),
)
def test_transformers_and_a_new_run_load_the_weights_to_the_bit(
    name: str, auto: str, num_ranks: int, words: tuple[str, ...], here: Callable[..., int], tmp_path: Path
) -> None:
    write_config(name, tmp_path / "config")
    words = (*words, "model=hf", f"model.config={tmp_path}/config")
    done = run(tmp_path / "trained", num_ranks, *words, "max_steps=3")
    expected = {key: tensor.read() for key, tensor in done.saved.evaluated().model().items()}
    directory = tmp_path / "exported"
    sharded = ("export.shard_gb=1e-5",) if num_ranks > 1 else ()
    assert here("task=export", f"run={done.path}", "export.format=hf", f"export.output={directory}", *sharded) == 0

    loaded = getattr(transformers, auto).from_pretrained(directory)
    state = loaded.state_dict()
    assert type(loaded).__name__ == name and state.keys() == expected.keys()
    assert all(state[key].dtype == tensor.dtype and torch.equal(state[key], tensor) for key, tensor in expected.items())
    facts = json.loads((tmp_path / "exported.json").read_text())
    assert facts["weights_sha256"] == weights_sha256(expected)
    if "ema.decay=0.5" not in words:
        assert facts["weights_sha256"] == done.result["weights_sha256"]
    assert tensors_in(directory).keys() == expected.keys() - facts["tied"].keys()
    assert [*facts["tied"]] == ([] if name.startswith("Bert") else ["lm_head.weight"])
    assert (len({*tensors_in(directory).values()}) > 1) == bool(sharded)

    keep = ("max_steps=1", "optimizer.lr=0", "optimizer.momentum=0", "parallel=none", "ema.decay=null")
    again = run(tmp_path / "again", 1, *words, *keep, f"init_from={directory}")
    assert again.result["weights_sha256"] == facts["weights_sha256"]


def trained(tmp_path: Path, name: str = "LlamaForCausalLM") -> Run:
    write_config(name, tmp_path / "config")
    return run(tmp_path / "trained", 1, *TEXT, "max_steps=1", "model=hf", f"model.config={tmp_path}/config")


def test_adapters_are_merged_into_the_exported_weights(here: Callable[..., int], tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs the extra lora")
    write_config("LlamaForCausalLM", tmp_path / "config")
    words = (*TEXT, "model=hf", f"model.config={tmp_path}/config", "max_steps=2")
    done = run(tmp_path / "trained", 1, *words, "adapters=lora")
    assert here("task=export", f"run={done.path}", "export.format=hf", "export.output=exported") == 0
    facts = json.loads((tmp_path / "exported.json").read_text())
    state = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    assert weights_sha256(state) == facts["weights_sha256"] != done.result["weights_sha256"]
    layer, base = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.base_layer.weight"
    assert not torch.equal(state[layer], done.weights[base])


def test_the_files_of_the_tokenizer_are_copied(
    here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done = trained(tmp_path)
    copied = ["additional_chat_templates/rag.jinja", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    for name in (*copied, "README.md", "model.safetensors"):
        (tmp_path / "config" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "config" / name).write_text("{}")
    (tmp_path / "config" / "generation_config.json").write_text('{"max_length": 7}')
    assert here("task=export", f"run={done.path}", "export.format=hf") == 0
    directory = done.path / "export" / "hf-step_1-hf"
    assert {path.name for path in directory.parent.iterdir()} == {directory.name, f"{directory.name}.json"}
    files = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert files == {"config.json", "generation_config.json", "model.safetensors", *copied}
    assert transformers.GenerationConfig.from_pretrained(directory).max_length == 7
    printed = capfd.readouterr().out
    assert f"copied   {', '.join(copied)}, from {tmp_path}/config\n" in printed
    assert "tied     lm_head.weight is stored as model.embed_tokens.weight\n" in printed
    assert "checked  LlamaForCausalLM.from_pretrained returns these weights\n" in printed
    (tmp_path / "words.json").write_text("[]")  # the tokenizer of the data takes precedence
    used = (f"data.tokenizer={tmp_path}/words.json", "export.output=other", "precision=fp64")
    assert here("task=export", f"run={done.path}", "export.format=hf", *used) == 0
    assert f"copied   tokenizer.json, from {tmp_path}/words.json\n" in capfd.readouterr().out
    assert (tmp_path / "other" / "tokenizer.json").read_text() == "[]"
    converted = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "other").state_dict()
    assert all(torch.equal(converted[name], tensor.double()) for name, tensor in done.weights.items())


def test_what_cannot_be_exported_is_refused_and_leaves_no_file(
    here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = run(tmp_path / "toy", 1, "model=toy", "data=toy", "logger=none", "max_steps=1")
    done = trained(tmp_path)

    def refused(run: Run, *words: str) -> str:
        before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
        capfd.readouterr()
        assert here("task=export", f"run={run.path}", *words) == 2
        assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before
        (line,) = capfd.readouterr().err.splitlines()
        return line

    assert refused(other, "export.format=hf") == (
        "export.format=hf: Toy is not a model of transformers; try export.format=safetensors"
    )
    existing = f"export.output={tmp_path / 'config'}"
    assert f"{existing} exists already" in refused(done, "export.format=hf", existing)
    assert "export.shard_gb=2 has no effect without export.format=hf" in refused(done, "export.shard_gb=2")
    assert "export.tolerance=0.1 has no effect with export.format=hf" in refused(
        done, "export.format=hf", "export.tolerance=0.1"
    )

    def other_weights(*args: Any, **kwargs: Any) -> Any:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIGS["LlamaForCausalLM"][1]))

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", other_weights)
    assert "LlamaForCausalLM.from_pretrained does not return model.embed_tokens.weight as it was written" in refused(
        done, "export.format=hf"
    )


def test_a_class_made_from_one_of_transformers_is_exported_as_that_class() -> None:
    kind = transformers.LlamaForCausalLM
    model = type("Renamed", (kind,), {})(transformers.LlamaConfig(**CONFIGS["LlamaForCausalLM"][1]))
    assert class_of(model) is kind
