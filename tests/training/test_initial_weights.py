"""init_from: which tensors of a file are loaded, which files are refused, and what freezing a layer means."""

import argparse
import copy
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankError
from safetensors.torch import save_file
from torch import Tensor, nn
from worlds import run

from runner.config.schema import InitFrom
from runner.distributed.sync_batch_norm import synchronize_batch_norm
from runner.errors import InputError
from runner.optimization.parameter_patterns import freeze
from runner.training.model.initial_weights import InitialWeights, locate_initial_weights

TOY = ("model=toy", "data=toy", "logger=none", "max_steps=1")


class Net(nn.Module):
    def __init__(self, num_outputs: int = 3):
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, num_outputs)
        self.tied = nn.Linear(2, 4, bias=False)
        self.tied.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


def weights(seed: int = 7) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: t.clone() if t.dim() == 0 else torch.rand_like(t) for name, t in Net().state_dict().items()}


def load(held: Mapping[str, Any], path: Path, *entries: str, strict: bool = True, into: nn.Module | None = None) -> Any:
    """Load a file with this content into a model with other weights. Return the weights and the lines of the log."""
    if path.suffix == ".safetensors":
        save_file(dict(held), path)
    elif not path.exists():
        torch.save(held, path)
    module = into or Net()
    initial = InitialWeights(InitFrom(str(path), list(entries), strict), path, module)
    initial.fill(module)
    assert not initial._file  # closed once all is copied
    return module.state_dict(), "\n".join(initial.describe())


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(one[name], tensor) for name, tensor in other.items())


def test_what_a_file_may_hold(tmp_path: Path) -> None:
    """A state dict, plain, nested or in the format of older torch versions, or without tensors that can be derived."""
    held = weights()
    held["tied.weight"] = held["embed.weight"]
    legacy = tmp_path / "legacy.pth"
    torch.save(held, legacy, _use_new_zipfile_serialization=False)
    for path, value in ((tmp_path / "plain.pt", held), (tmp_path / "nested.ckpt", {"state_dict": held, "epoch": 3})):
        assert equal(load(value, path)[0], held)
    assert equal(load(held, legacy)[0], held)
    # safetensors stores shared tensors once, torch before 0.4 had no num_batches_tracked, and a layout is preserved
    less = {name: t for name, t in held.items() if name not in ("embed.weight", "norm.num_batches_tracked")}
    found, printed = load(less, tmp_path / "less.safetensors")
    assert equal(found, held)
    assert printed == (
        f"init     {tmp_path}/less.safetensors, 8 of 9 weights: embed.weight, norm.weight, norm.bias, "
        "head.weight, head.bias, tied.weight, norm.running_mean, norm.running_var\n"
        "         not in the file, initial values kept: norm.num_batches_tracked"
    )
    convolution = nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last, dtype=torch.float64)
    values = {name: torch.rand_like(t).float().contiguous() for name, t in convolution.state_dict().items()}
    assert load(values, tmp_path / "conv.safetensors", into=convolution)[0]["weight"].dtype == torch.float64
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(convolution.weight.float(), values["weight"])


def test_names_are_mapped_in_turn(tmp_path: Path) -> None:
    held = weights()
    held["tied.weight"] = held["embed.weight"].clone()
    theirs = {f"module.{n.replace('head', 'fc')}": t for n, t in held.items()} | {"module.teacher.w": torch.zeros(1)}
    entries = (r"^module\.->", "^(f)c[.]->head.", "^teacher[.].*->")
    assert equal(load(theirs, tmp_path / "1.safetensors", *entries)[0], held)
    for more, message in (
        (("^hed[.]->x.",), r"init_from.map.3=^hed[.]->x. matches no name in the file; near it: head.bias, head.weight"),
        (("^norm[.](bias)->head.bias",), "gives module.fc.bias and module.norm.bias the same name, head.bias"),
        ((r"^norm[.]->\2",), r"init_from.map.3=^norm[.]->\2: invalid group reference 2"),
    ):
        with pytest.raises(InputError) as refused:
            load(theirs, tmp_path / "2.safetensors", *entries, *more)
        assert message in str(refused.value), message


def test_a_mismatch_is_reported_with_the_fix(tmp_path: Path) -> None:
    held = weights()
    del held["tied.weight"]
    one = tmp_path / "1.safetensors"

    def refuse(held: Mapping[str, Any], path: Path = one, **options: Any) -> list[str]:
        with pytest.raises(InputError) as refused:
            load(held, path, **options)
        assert len(refused.value.messages) <= 3
        return [message.replace(f"init_from.path={path}", "") for message in refused.value.messages]

    other = Net(5)
    assert refuse(held, into=other) == [
        " has weights of another shape: head.weight [3, 2] in the file, [5, 2] in the model; head.bias [3] in the "
        "file, [5] in the model; init_from.strict=false loads the others"
    ]
    before = other.head.weight.clone()
    found, printed = load(held, one, strict=False, into=other)
    assert torch.equal(found["head.weight"], before)
    assert torch.equal(found["norm.weight"], held["norm.weight"])
    assert "of another shape, initial values kept: head.weight [3, 2] in the file, [5, 2] in the model; head" in printed
    renamed = {f"model.net.{name}": t for name, t in held.items()}
    for line in refuse(renamed):
        assert line.endswith("; try init_from.map='[\"^model[.]net[.]->\"]'")
    assert "; try init_from.map='[\"^->0.\"]'" in refuse(held, into=nn.Sequential(Net()))[0]
    assert "none of its weights has the name and shape" in refuse({"x": torch.zeros(1)}, strict=False)[0]
    whole = held | {"head.bias": torch.ones(3, dtype=torch.int64)}
    assert "head.bias [3] of integers in the file, [3] in the model" in refuse(whole)[0]


@pytest.mark.parametrize("strict", [True, False])
def test_weights_with_separate_scales_are_refused(strict: bool, tmp_path: Path) -> None:
    held = weights()
    held |= {"head.weight": held["head.weight"].to(torch.float8_e4m3fn), "head.weight_scale_inv": torch.ones(1)}
    with pytest.raises(InputError) as refused:
        load(held, tmp_path / "8.safetensors", strict=strict)
    (message,) = refused.value.messages
    assert message.endswith(
        "8.safetensors has quantized weights of torch.float8_e4m3fn, whose scales are not applied: head.weight; "
        "convert the file to bfloat16"
    )
    load(held, tmp_path / "9.safetensors", "^head[.]weight.*->", strict=False)  # the others


class WithHead(nn.Module):
    """A network of another class as a submodule, and a new head."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.classifier = nn.Linear(3, 2)


def test_the_hint_for_a_network_within_another_names_the_new_head(tmp_path: Path) -> None:
    save_file({name: t for name, t in weights().items() if name != "tied.weight"}, tmp_path / "model.safetensors")
    path = locate_initial_weights(str(tmp_path), None)
    assert path == tmp_path / "model.safetensors"
    into = WithHead()
    with pytest.raises(InputError) as refused:
        InitialWeights(InitFrom(str(tmp_path)), path, into)
    fix = (
        "; try init_from.map='[\"^->net.\"]' and init_from.strict=false, which leaves classifier.weight, "
        "classifier.bias at their initial values"
    )
    lacks, has = refused.value.messages
    assert " lacks weights of the model: net.embed.weight, " in lacks and lacks.endswith(fix)
    assert "has weights that the model does not have: " in has and has.endswith(fix)
    initial = InitialWeights(InitFrom(str(tmp_path), ["^->net."], strict=False), path, into)
    initial.fill(into)
    assert equal(into.net.state_dict(), {name: t for name, t in weights().items() if name != "tied.weight"})
    assert "initial values kept: classifier.weight; classifier.bias" in "\n".join(initial.describe())


def write_shards(directory: Path, held: Mapping[str, Tensor]) -> Path:
    """Write a directory as save_pretrained does, with two shards, and return its index."""
    directory.mkdir()
    names = sorted(held)
    parts = {f"model-0000{n + 1}-of-00002.safetensors": names[n::2] for n in range(2)}
    for file, part in parts.items():
        save_file({name: held[name] for name in part}, directory / file, metadata={"format": "pt"})
    index = directory / "model.safetensors.index.json"
    located = {name: file for file, part in parts.items() for name in part}
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": located}))
    return index


def test_a_directory_of_hugging_face_is_read_like_one_file(tmp_path: Path) -> None:
    """Also by its index, without the second name of a tied weight, or with a file of torch.save."""
    held = weights()
    less = {name: t for name, t in held.items() if name != "tied.weight"}
    index = write_shards(tmp_path / "shards", less)
    (tmp_path / "pickled").mkdir()
    torch.save(less, tmp_path / "pickled" / "pytorch_model.bin")
    for named in (index.parent, index, tmp_path / "pickled"):
        path = locate_initial_weights(str(named), None)
        assert path is not None and path.is_file()
        module = Net()
        initial = InitialWeights(InitFrom(str(named)), path, module)
        initial.fill(module)
        assert equal(module.state_dict(), {**held, "tied.weight": held["embed.weight"]})


@pytest.mark.fault("a damaged directory of Hugging Face's weights", outcome="refused")
def test_a_damaged_directory_of_hugging_face_is_refused(tmp_path: Path) -> None:
    def refuse(name: str, change: Callable[[Path], object]) -> str:
        index = write_shards(tmp_path / name, weights())
        change(index)
        with pytest.raises(InputError) as refused:
            InitialWeights(InitFrom(str(index.parent)), index, Net())
        (line,) = refused.value.messages
        return line.removeprefix(f"init_from.path={index.parent}: ")

    def second(index: Path) -> Path:
        return index.with_name("model-00002-of-00002.safetensors")

    listed, again = "model.safetensors.index.json lists ", "; copy the whole directory again"
    assert refuse("missing", lambda index: second(index).unlink()) == (
        f"{listed}model-00002-of-00002.safetensors, which is missing{again}"
    )
    assert refuse("lacking", lambda index: save_file({"x": torch.zeros(1)}, second(index))) == (
        f"{listed}head.bias in model-00002-of-00002.safetensors, which lacks it{again}"
    )
    truncated = refuse("truncated", lambda index: os.truncate(second(index), second(index).stat().st_size - 1))
    assert "model-00002-of-00002.safetensors cannot be read as safetensors (" in truncated
    assert "index.json cannot be read as an index of weights (" in refuse("index", lambda index: index.write_text("{}"))
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin.index.json").touch()
    with pytest.raises(InputError, match=r"it is a directory without checkpoints; name a run .*model.safet"):
        locate_initial_weights(str(tmp_path / "pickled"), None)


class Touch:
    """Unpickling it runs a command."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_a_file_of_another_kind_is_refused_without_reading_it(tmp_path: Path) -> None:
    sound = {"weight": torch.zeros(2)}
    save_file(sound, tmp_path / "sound.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "sound.safetensors").read_bytes()[:-1])
    (tmp_path / "text.pt").write_text("no weights\n" * 9)
    torch.save({"model": sound, "args": argparse.Namespace()}, tmp_path / "args.pth")
    torch.save({"weight": Touch(tmp_path / "touched")}, tmp_path / "code.pt")
    torch.save({"model": sound, "state_dict": sound}, tmp_path / "both.pt")
    (tmp_path / "notes.md").write_text("")
    for name, message in {
        "cut.safetensors": f"{tmp_path}/cut.safetensors cannot be read as safetensors (",
        "text.pt": "it is not a file of torch.save, or it is truncated (",
        "args.pth": "it contains argparse.Namespace, which is code and is not executed; save only the state dict",
        "code.pt": "it contains posix.system, which is code and is not executed; save only the state dict",
        "both.pt": "it must contain one state dict, at its top or under model or state_dict; save only",
        "notes.md": "the suffix is not that of a weights file, one of .safetensors, .pt, ",
    }.items():
        path = tmp_path / name
        with pytest.raises(InputError) as refused:
            InitialWeights(InitFrom(str(path)), path, Net())
        assert str(refused.value).startswith(f"init_from.path={path}: {message}")
    assert not (tmp_path / "touched").exists()


@pytest.mark.fault("a malicious file of weights", outcome="refused")
def test_a_file_with_code_is_refused_by_all_ranks_and_nothing_written(tmp_path: Path) -> None:
    torch.save({"weight": Touch(tmp_path / "touched")}, tmp_path / "code.pt")
    with pytest.raises(
        RankError, match=r"InputError: init_from.path=.*code.pt: it contains posix.system, which is code and"
    ):
        run(tmp_path / "outputs", 2, *TOY, f"init_from={tmp_path}/code.pt", "parallel=ddp")
    assert not list(tmp_path.glob("outputs/run/*")) and not (tmp_path / "touched").exists()


def test_frozen_layers_keep_their_statistics() -> None:
    """Those whose parameters are all frozen, in any class and in a copy, also after model.train()."""
    module = nn.Sequential(
        nn.BatchNorm1d(2),
        nn.BatchNorm1d(2),
        nn.BatchNorm1d(2, affine=False),
        nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        nn.Linear(2, 2),
    )
    assert freeze(["^[02][.]", "^1[.]weight", "^3[.]"], module) == [
        "frozen   5 of 8 parameters and the statistics of 3 normalization layers: 0.weight, 0.bias, 1.weight, "
        "3.weight, 3.bias"
    ]
    synchronize_batch_norm(module)
    for each in (module, copy.deepcopy(module)):
        each.eval().train()
        before = {name: tensor.clone() for name, tensor in each.state_dict().items()}
        assert [part.training for part in each] == [False, True, False, False, True]
        features = torch.rand(4, 2, 3)
        for part in each[:4]:
            part(features)
        moved = {name for name, tensor in each.state_dict().items() if not torch.equal(tensor, before[name])}
        assert moved == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert freeze([], module) == []
    with pytest.raises(InputError, match=r"freeze.0=\^bais\$ matches no parameter's name; near it: 0.bias, 1.bias, 3"):
        freeze(["^bais$"], module)
