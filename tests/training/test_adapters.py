"""adapters=lora in one process: checkpoints and their file of frozen weights, exports, plans and refusals."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import adapted_models
import pytest
import torch
from adapted_models import GPT_WORDS, LLAMA_WORDS, TEXT, Files, write_files
from ranks import RankError
from safetensors.torch import load_file, save_file
from torch import nn
from worlds import Run, configure, run, unconnected

import runner
from runner.errors import InputError
from runner.input.datasets import load_data
from runner.planning.imagined_rank import ModeConfig, plan_rank

peft: Any = pytest.importorskip("peft", reason="needs the extra lora")

TOKENS = torch.randint(256, (3, adapted_models.BLOCK), generator=torch.Generator().manual_seed(2))
MLP = ("model=mlp", "model.hidden=[16,16]", "data.sample_shape=[1,8,8]", "batch_size=90", "max_steps=2", "logger=none")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Files, Run]:
    folder = tmp_path_factory.mktemp("gpt")
    files = write_files(folder, adapted_models.gpt)
    return files, run(folder / "outputs", 1, *GPT_WORDS, *files.words, f"init_from={files.base}", "ema.decay=0.5")


@pytest.fixture
def moved(trained: tuple[Files, Run], tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the run's directory, whose frozen weights are in another file, and this file."""
    base, path = tmp_path / "base.safetensors", tmp_path / "outputs" / "run" / "copied"
    words = (*GPT_WORDS, *trained[0].words, f"init_from={base}", "max_steps=2")
    shutil.copy(trained[0].base, base)
    done = run(tmp_path / "first", 1, *words)
    shutil.copytree(done.path, path)
    return path, base


def test_a_checkpoint_contains_only_the_adapters(trained: tuple[Files, Run]) -> None:
    _, done = trained
    saved = done.saved
    assert [name for name in saved.model() if "lora_" not in name] == []
    num_trained = 4 * 2 * 4 * 16  # layers, matrices, rank, dim
    assert sum(tensor.read().numel() for tensor in saved.model().values()) == num_trained
    (checkpoint,) = {saved.path / "rank_0.safetensors"}
    assert checkpoint.stat().st_size < 8 * 3 * num_trained + 15_000  # weights, average, momentum; names and offsets
    log = (done.path / "log.txt").read_text()
    assert f"11,328 parameters, {num_trained:,} of them trained, fp64" in log
    assert "adapters rank 4, alpha 8, in 4 layers: blocks.0.attention.query, " in log
    assert "37 of 37 weights: " in log


@pytest.mark.fault("a file of frozen weights that has changed or no longer exists", outcome="refused")
@pytest.mark.parametrize("words", [("task=evaluate", "run"), ("task=export", "run"), ("max_steps=3", "resume")])
def test_the_file_of_the_frozen_weights_must_be_the_same(
    words: tuple[str, str], moved: tuple[Path, Path], here: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    path, base = moved
    command = (words[0], f"{words[1]}={path}")
    content = base.read_bytes()
    for changed, problem in ((None, "no longer exists"), (content[:-8] + b"\1" * 8, "is not the file with")):
        base.unlink()
        if changed is not None:
            base.write_bytes(changed)
        assert here(*command) == 2
        assert f"init_from.path={base} {problem}" in capfd.readouterr().err
        base.write_bytes(content)
    assert here(*command) == 0


def test_a_model_in_python_is_loaded_with_the_base_that_has_moved(
    moved: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, base = moved
    expected = runner.open_run(path).predict(TOKENS)
    base.rename("elsewhere.safetensors")
    with pytest.raises(InputError, match=r"restore it, or add init_from.path=COPY \(init_from=COPY in open_run\)"):
        runner.open_run(path).model()
    assert torch.equal(runner.open_run(path, init_from="elsewhere.safetensors").predict(TOKENS), expected)


def test_the_configuration_of_a_base_that_has_moved_is_read_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=256, bos_token_id=None, eos_token_id=None, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    (tmp_path / "text").write_bytes(bytes(range(97, 122)) * 40)
    monkeypatch.chdir(tmp_path)
    data = ("data=text", "data.unit=bytes", "data.files=text", "data.sample_shape=[8]", "data.num_outputs=256")
    adapters = ("adapters=lora", "adapters.target=[q_proj]", "max_steps=1", "logger=none", "batch_size=4")
    made = run(Path("outputs"), 1, *data, *adapters, "model=hf", "model.config=base", "init_from=base")
    expected = runner.open_run(made.path).predict(TOKENS)
    Path("base").rename("moved")
    assert torch.equal(runner.open_run(made.path, init_from="moved").predict(TOKENS), expected)


@pytest.mark.parametrize("words", [("task=evaluate", "run"), ("task=export", "run"), ("max_steps=3", "resume")])
def test_the_file_of_the_frozen_weights_may_move(
    words: tuple[str, str], moved: tuple[Path, Path], here: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    """Also into a directory; checkpoints then record the new path."""
    path, base = moved
    command = (words[0], f"{words[1]}={path}", "init_from.path=new")
    assert here(*command) == 2
    assert "init_from.path=new has no effect on" in capfd.readouterr().err
    Path("new").mkdir()
    copy = base.rename(Path("new/model.safetensors").absolute())
    assert here(*command[:2]) == 2
    assert (
        "the frozen weights are read from this file; restore it, or add init_from.path=COPY" in capfd.readouterr().err
    )
    assert here(*command[:2], "init_from.path=nowhere") == 2
    assert "init_from.path=nowhere: no such file or directory" in capfd.readouterr().err
    assert here(*command) == 0
    if words[1] == "resume":
        assert Run(path).saved.facts["base"]["path"] == str(copy)
        assert here("task=evaluate", f"run={path}") == 0
        copy.rename("new/moved")
        shutil.copytree("new", "other")
    else:
        Path("other").mkdir()
        copy.rename("other/model.safetensors")
    with Path("other/model.safetensors").open("ab") as file:
        file.write(b"1")
    assert here(*command[:2], "init_from.path=other") == 2
    assert "other/model.safetensors is not the file with which the run has started" in capfd.readouterr().err


@pytest.mark.thorough
def test_an_index_names_several_files(
    trained: tuple[Files, Run], here: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    weights, index = load_file(trained[0].base), Path("model.safetensors.index.json")
    files = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(weights)}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in weights.items() if files[name] == file}, file)
    index.write_text(json.dumps({"weight_map": files}))
    done = run(Path("outputs"), 1, *GPT_WORDS, *trained[0].words, "init_from=.", "max_steps=2")
    assert [name for name in done.saved.model() if "lora_" not in name] == []
    assert here("task=evaluate", f"run={done.path}") == 0
    Path("part-1.safetensors").rename("moved")
    capfd.readouterr()
    assert here("task=evaluate", f"run={done.path}") == 2
    assert "part-1.safetensors, which is missing, but the frozen weights" in capfd.readouterr().err
    Path("part-1.safetensors").write_bytes(Path("moved").read_bytes()[:-1] + b"1")
    assert here("task=evaluate", f"run={done.path}") == 2
    assert "is not the file with which the run has started" in capfd.readouterr().err


def test_weights_of_the_constructor_and_of_checkpoints_are_stored(trained: tuple[Files, Run], tmp_path: Path) -> None:
    """No file determines the former, and another run may remove the latter."""
    words = (*GPT_WORDS, *trained[0].words, "max_steps=2")
    own = run(tmp_path / "own", 1, *words)
    assert "the frozen weights are those of the model's constructor" in (own.path / "log.txt").read_text()
    assert "embed.weight" in own.weights
    full = run(tmp_path / "full", 1, *(word for word in words if "adapters" not in word))
    other = run(tmp_path / "other", 1, *words, f"init_from={full.path}")
    for name, tensor in full.weights.items():
        changed = name.replace("query.", "query.base_layer.").replace("value.", "value.base_layer.")
        torch.testing.assert_close(other.weights[changed], tensor, rtol=0, atol=0)
    again = run(tmp_path / "again", 1, *words, f"init_from={other.path}", "optimizer.lr=0")
    torch.testing.assert_close(again.weights, other.weights, rtol=0, atol=0)
    plain = [word for word in words if not word.startswith("adapters")]
    with pytest.raises(RankError, match="task=export writes a file in which they are merged"):
        run(tmp_path / "refused", 1, *plain, f"init_from={other.path}")


def test_a_new_run_starts_with_the_adapters_and_the_base_of_another(
    moved: tuple[Path, Path], trained: tuple[Files, Run], tmp_path: Path
) -> None:
    """Without adapters it is refused, because the names differ."""
    path, base = moved
    words = (*GPT_WORDS, *trained[0].words, "max_steps=1", f"init_from={path}")
    again = run(tmp_path / "again", 1, *words, "optimizer.lr=0")
    names = {name: re.sub(r"\.(query|value)\.", r".\1.base_layer.", name) for name in load_file(base)}
    frozen = {names[name]: tensor for name, tensor in load_file(base).items()}
    torch.testing.assert_close(again.weights, frozen | Run(path).weights, rtol=0, atol=0)
    plain = [word for word in words if not word.startswith("adapters")]
    with pytest.raises(RankError, match="task=export writes a file in which they are merged"):
        run(tmp_path / "plain", 1, *plain)
    base.unlink()
    with pytest.raises(RankError, match=r"base\.safetensors no longer exists, but the frozen weights are"):
        run(tmp_path / "missing", 1, *words)


def test_a_forked_run_reads_the_same_file(trained: tuple[Files, Run], tmp_path: Path) -> None:
    forked = run(tmp_path, 1, f"fork={trained[1].path}", "max_steps=6")
    assert [name for name in forked.saved.model() if "lora_" not in name] == []
    assert forked.result["step"] == 6


def test_merged_weights_have_the_names_of_the_model(trained: tuple[Files, Run], here: Callable[..., int]) -> None:
    files, done = trained
    assert here("task=export", f"run={done.path}", "export.output=merged.safetensors") == 0
    weights = load_file("merged.safetensors")
    facts = json.loads(Path("merged.safetensors.json").read_text())
    weights |= {name: weights[kept] for name, kept in facts["tied"].items()}
    model = adapted_models.gpt().double().eval()
    model.load_state_dict(weights)
    base = load_file(files.base)
    changed = [name for name in base if name in weights and not torch.equal(base[name], weights[name])]
    assert changed == [f"blocks.{n}.attention.{kind}.weight" for n in (0, 1) for kind in ("query", "value")]
    plain = [word for word in (*GPT_WORDS, *files.words) if not word.startswith("adapters")]
    words = (*plain, "init_from=merged.safetensors", "max_steps=1", "optimizer.lr=0", "optimizer.momentum=0")
    full = run(Path("full"), 1, *words)
    assert full.result["metrics"]["val/loss"] == pytest.approx(done.result["metrics"]["val/loss"], rel=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(runner.Run(done.path).model("last")(TOKENS), model(TOKENS), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.thorough)])
def test_peft_reads_the_exported_directory(name: str, here: Callable[..., int], tmp_path: Path) -> None:
    """Also a module that is trained as a whole, and a program of the merged model."""
    make = adapted_models.gpt if name == "gpt" else adapted_models.Llama
    words = GPT_WORDS if name == "gpt" else LLAMA_WORDS
    last = "blocks.1.norm2" if name == "gpt" else "model.norm"
    files = write_files(tmp_path, make)
    done = run(tmp_path / "outputs", 1, *words, *files.words, f"init_from={files.base}", f"adapters.train=[{last}]")
    assert f"{last}.weight" in done.saved.model() or f"language.{last}.weight" in done.saved.model()
    assert here("task=export", f"run={done.path}", "export.format=peft", "export.output=adapters") == 0
    assert here("task=export", f"run={done.path}", "export.format=peft", "export.output=adapters") == 2
    assert {path.name for path in Path("adapters").iterdir()} >= {"adapter_model.safetensors", "adapter_config.json"}
    base = make().double()
    base.load_state_dict(load_file(files.base))
    model = peft.PeftModel.from_pretrained(base, "adapters").eval()
    with torch.no_grad():
        expected = runner.Run(done.path).model("last")(TOKENS)
        torch.testing.assert_close(model(TOKENS), expected, rtol=0, atol=1e-9)
        base.load_state_dict(load_file(files.base), strict=False)
        program = ("export.format=torch_export", "export.output=merged.pt2")
        if name == "gpt":
            assert here("task=export", f"run={done.path}", *program) == 0
            program_of_run = torch.export.load("merged.pt2").module()
            torch.testing.assert_close(program_of_run(TOKENS[:1]), expected[:1], rtol=0, atol=1e-9)


def test_a_plan_counts_gradients_and_optimizer_state_of_adapters_only() -> None:
    words = ("model=gpt", "model.dim=32", *TEXT, "data.sample_shape=[16]", "batch_size=16", "optimizer=adam")

    def plan(*overrides: str) -> Any:
        config, request = configure(*words, *overrides)
        data = load_data(config, request.command.choices, unconnected())
        return plan_rank(ModeConfig(config, request.command.choices), data, 0, 2)

    for mode in ("ddp", "fsdp"):
        full, lora = plan(f"parallel={mode}"), plan(f"parallel={mode}", "adapters=lora", "adapters.rank=2")
        assert 0 < lora.memory["optimizer state"] < 0.2 * full.memory["optimizer state"]
        assert lora.memory["parameters"] > full.memory["parameters"]
        assert 0 < sum(lora.bytes_per_step.values()) < sum(full.bytes_per_step.values())


def test_batch_norm_keeps_its_statistics(tmp_path: Path) -> None:
    made = run(tmp_path, 1, *MLP, "model.batch_norm=true", "adapters=lora", "adapters.train=[head]")
    assert (made.weights["layers.1.running_mean"] == 0).all()
    assert {name for name in made.state["optimizer"]["state"]} >= {"head.weight", "layers.3.lora_A.default.weight"}
    assert "in 2 layers: layers.0, layers.3" in (made.path / "log.txt").read_text()


class Direct(nn.Module):
    """A model that uses the weight of a layer without calling it."""

    def __init__(self, sample_shape: Sequence[int], num_outputs: int):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(20, 8), nn.Linear(8, 8), nn.Linear(8, num_outputs)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.linear(self.first(rows), self.second.weight))


@pytest.mark.parametrize("mode", ["none", pytest.param("fsdp", marks=pytest.mark.thorough)])
def test_a_warning_names_adapters_without_effect(mode: str, tmp_path: Path) -> None:
    words = ("model=linear", "model._target_=test_adapters.Direct", "data=random", "max_steps=1", "logger=none")
    made = run(tmp_path, 1, *words, "adapters=lora", f"parallel={mode}")
    (line,) = [line for line in (made.path / "log.txt").read_text().splitlines() if "does not call" in line]
    assert "adapters: for the first samples, the model does not call second" in line


class Attentive(nn.Module):
    """A layer whose attention uses the weight of its last linear layer without calling it."""

    def __init__(self, sample_shape: Sequence[int], num_outputs: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 1)
        self.head = nn.Linear(8, num_outputs)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = images.flatten(1, 2)
        return self.head(self.attention(rows, rows, rows)[0].mean(1))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("adapters.rank=0",), "adapters.rank=0 must be at least 1; try rank=8"),
        (("adapters.alpha=0",), "adapters.alpha=0 must be above 0; try alpha=16"),
        (("adapters.dropout=1",), "adapters.dropout=1 must be at least 0 and below 1"),
        (("adapters.target=[]",), "adapters.target=[] must name layers; try target=all-linear"),
        (("adapters.target=hed",), "adapters.target=hed must be list[str] | all-linear"),
        (
            ("adapters.target=[laiers.0]",),
            "adapters.target=laiers.0 matches no layer of the model; near it: layers.0",
        ),
        (("adapters.train=[hed]",), "adapters.train=hed matches no layer of the model; near it: head"),
        (("model=gpt", "data=text", "adapters.train=[head]"), "adapters.train=head: head shares its weight with"),
        (("adapters.train=[layers]",), "adapters.train=['layers'] trains all of layers.0, which adapters.target="),
        (("freeze=[head]",), "freeze=['head'] has no effect with adapters=lora, which trains only adapters"),
        (("model=linear", "data=toy"), "adapters.target=all-linear: the model has no linear layer besides its output"),
        (("model=gpt", "data=text", "adapters.target=[head]"), "head shares its weight with embed.weight"),
        (
            ("model._target_=test_adapters.Attentive", "adapters.target=[out_proj]"),
            "attention.out_proj is a NonDynamicallyQuantizableLinear, but only linear layers can have adapters",
        ),
        (("model._target_=test_adapters.Attentive", "adapters.target=[conv]"), "conv is a Conv1d, but only linear"),
        (("export.format=peft", "task=export"), "needs the run to read"),
    ],
)
def test_wrong_options_are_refused(
    words: tuple[str, ...], message: str, here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = [] if any(word.startswith("model=") for word in words) else ["model=mlp"]
    if any(word.startswith("model._target_") for word in words):
        model = ["model=linear"]
    assert here(*model, "adapters=lora", *words) == 2
    errors = capfd.readouterr().err
    assert message in errors and len(errors.splitlines()) <= 3 and not [*tmp_path.iterdir()], errors


def test_a_run_without_adapters_has_none_to_export(
    here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done = run(tmp_path / "outputs", 1, *MLP)
    assert here("task=export", f"run={done.path}", "export.format=peft") == 2
    assert "export.format=peft needs a run with adapters" in capfd.readouterr().err


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, here: Callable[..., int], capfd: Any) -> None:
    monkeypatch.setattr("runner.training.model.adapters.find_spec", lambda name: None)
    assert here("model=mlp", "adapters=lora") == 2
    assert "adapters=lora: it needs peft; pip install 'experiment-runner[lora]'" in capfd.readouterr().err


def test_all_heads_of_a_timm_model_are_output_layers() -> None:
    """One layer, or a tuple."""
    timm = pytest.importorskip("timm", reason="needs the extra timm")
    from runner.training.model.adapters import LoRA

    sizes = {"img_size": 16, "patch_size": 8, "depth": 1, "embed_dim": 8, "num_heads": 2, "num_classes": 3}
    for name, heads in (("deit_tiny_distilled_patch16_224", {"head", "head_dist"}), ("vit_tiny_patch16_224", {"head"})):
        adapted = LoRA(rank=2).inject(timm.create_model(name, **sizes))
        without = {
            name
            for name, part in adapted.named_modules()
            if type(part) is nn.Linear and "lora_" not in name and "base_layer" not in name
        }
        assert without == heads


def test_a_linear_layer_of_gpt_2_is_adapted(tmp_path: Path) -> None:
    """Conv1D stores the transposed weight."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from runner.training.model.adapters import LoRA

    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2)).eval()
    tokens = torch.arange(8)[None]
    expected, names = model(tokens).logits, list(model.state_dict())
    lora = LoRA(rank=2)
    adapted = lora.inject(model)
    assert [name for name, p in adapted.named_parameters() if p.requires_grad and "c_fc" in name] and [
        name for name in model.state_dict() if "lm_head.lora" in name
    ] == []
    torch.testing.assert_close(adapted(tokens).logits, expected, rtol=0, atol=1e-6)
    for parameter in adapted.parameters():
        parameter.data += 0.1 * parameter.requires_grad
    changed = adapted(tokens).logits
    assert list(lora.merge(adapted).state_dict()) == names
    torch.testing.assert_close(adapted(tokens).logits, changed, rtol=0, atol=1e-5)


def test_the_file_may_have_other_weights(tmp_path: Path, trained: tuple[Files, Run]) -> None:
    """Those that it lacks are stored in checkpoints, and strict=true names them by their names in the model."""
    files, _ = trained
    weights = load_file(files.base)
    del weights["blocks.0.attention.query.weight"]
    save_file(weights, tmp_path / "partial.safetensors")
    words = (*GPT_WORDS, *files.words, f"init_from={tmp_path / 'partial.safetensors'}", "max_steps=2")
    with pytest.raises(RankError, match=r"lacks weights of the model: blocks\.0\.attention\.query\.weight; init_from"):
        run(tmp_path / "strict", 1, *words)
    made = run(tmp_path / "lax", 1, *words, "init_from.strict=false")
    stored = [name for name in made.weights if "lora_" not in name]
    assert stored == ["blocks.0.attention.query.base_layer.weight"]
    line = "partial.safetensors lacks blocks.0.attention.query.weight, which adapters freeze; try adapters.train="
    assert line in (made.path / "log.txt").read_text()
    resumed = run(tmp_path / "lax", 1, f"resume='{made.path}'", "max_steps=3")
    assert [name for name in resumed.weights if "lora_" not in name] == stored
