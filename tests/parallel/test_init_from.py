"""`init_from` and `freeze` in every mode: the same numbers, and no rank has or reads the whole model."""

from collections.abc import Mapping
from pathlib import Path

import custom_models
import pytest
import torch
from runner.shipped.models.convnet import ConvNet
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from worlds import run

import runner.training.build
from runner.checkpoints.saved_state import weights_sha256
from runner.checkpoints.weights_file import open_weights
from runner.training.model import initial_weights

COMMON = ("precision=fp64", "logger=none", "optimizer.lr=0.1", "batch_size=90", "eval_batches=2")
DIGITS = ("model=convnet", "model.channels=[4,8]", *COMMON, "data.sample_shape=[1,8,8]", "batch_size=350")
HEAD_ALONE = ("init_from.strict=false", 'freeze=["^(?!head|fc)"]')
CHAIN = ("model=linear", "data=toy", "data.num_train=350", *COMMON)


def _of(name: str) -> str:
    return f"model._target_=custom_models.{name}"


def _hash_without_head(weights: Mapping[str, Tensor]) -> str:
    """Return a hash over names and bytes of everything but the head, including buffers."""
    return weights_sha256({name: t.double() for name, t in weights.items() if not name.startswith(("head", "fc"))})


@pytest.fixture(scope="module")
def other_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a convnet with another number of classes and updated BatchNorm statistics, in float32."""
    torch.manual_seed(7)
    model = ConvNet((1, 8, 8), 3, (4, 8))
    model(torch.rand(5, 1, 8, 8))
    file = tmp_path_factory.mktemp("weights") / "convnet.safetensors"
    save_file(model.state_dict(), file)
    return file


@pytest.mark.thorough
def test_numbers_and_frozen_parameters_are_the_same_in_every_mode(other_head: Path, tmp_path: Path) -> None:
    file = open_weights(other_head)
    expected = _hash_without_head({name: tensor.read() for name, tensor in file.items()})
    words = (*DIGITS, *HEAD_ALONE, f"init_from={other_head}", "max_steps=6", "optimizer.weight_decay=0.1")
    made = {
        mode: run(tmp_path / mode, world_size, *words, f"parallel={mode}")
        for mode, world_size in (("none", 1), ("fsdp", 2), ("ps", 2))
    }
    for mode, each in made.items():
        assert _hash_without_head(each.weights) == expected, mode
        assert each.losses == pytest.approx(made["none"].losses, rel=1e-12), mode
    assert made["none"].losses[6] < made["none"].losses[1]
    log = (made["fsdp"].path / "log.txt").read_text()
    for line in (
        f"init     {other_head}, 14 of 16 weights: block1.0.weight, ",
        "of another shape, initial values kept: head.weight [3, 32] in the file, [10, 32] in the model; head.bias [3]",
        "frozen   8 of 10 parameters and the statistics of 2 normalization layers: block1.0.weight, ",
        "1,266 parameters, 330 of them trained",
    ):
        assert line in log


@pytest.mark.thorough
def test_from_a_run_of_any_mode_into_any_mode(tmp_path: Path) -> None:
    """With tied weights, and in another precision; a learning rate of 0 keeps the initial weights."""
    words = (_of("Tied"), *CHAIN, "max_steps=2")
    first = run(tmp_path / "fsdp", 2, *words, "parallel=fsdp", "precision=fp32")
    keep = (*words, "optimizer.lr=0", "optimizer.momentum=0")
    second = run(tmp_path / "pipeline", 2, *keep, "parallel=pipeline", f"init_from={first.path}")
    third = run(tmp_path / "none", 1, *keep, f"init_from={second.path}/checkpoints/best")
    of_rank_0 = f"init_from={third.path}/checkpoints/step_2/rank_0.safetensors"
    fourth = run(tmp_path / "of_rank_0", 1, *keep, of_rank_0)
    assert first.weights["head.weight"].dtype == torch.float32
    for made in (second, third, fourth):
        assert made.weights.keys() == first.weights.keys()
        assert all(torch.equal(made.weights[name], tensor.double()) for name, tensor in first.weights.items())
    assert second.losses == pytest.approx(third.losses, rel=1e-12)


def test_no_rank_materializes_or_reads_the_whole_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.manual_seed(7)
    weights = custom_models.Chain([10], 5).state_dict()
    save_file(weights, tmp_path / "chain.safetensors")
    total = sum(tensor.nbytes for tensor in weights.values()) * 2  # in float64

    class Watched(initial_weights.InitialWeights):
        """Records how much of the model this rank has and has read, whenever submodules were filled."""

        def fill(self, module: nn.Module) -> None:
            super().fill(module)
            held = sum(_local_bytes(tensor) for tensor in {*module.parameters(), *module.buffers()})
            with (tmp_path / f"{self._path.stem}-{torch.distributed.is_initialized()}").open("a") as file:
                file.write(
                    f"{held} {sum(weights[name].nbytes * 2 for name in self._loaded if name not in self._pending)}\n"
                )

    monkeypatch.setattr(runner.training.build, "InitialWeights", Watched)
    words = (_of("Chain"), *CHAIN, "max_steps=2")
    reference = run(tmp_path / "none", 1, *words, f"init_from={tmp_path / 'chain.safetensors'}", "micro_batches=4")
    for mode in ("fsdp", "pipeline"):
        file = tmp_path / f"{mode}.safetensors"
        save_file(weights, file)
        each = run(tmp_path / mode, 2, *words, f"parallel={mode}", f"init_from={file}")
        assert each.losses == pytest.approx(reference.losses, rel=1e-12)
        lines = (tmp_path / f"{mode}-True").read_text().splitlines()
        held, read = zip(*(map(int, line.split()) for line in lines), strict=True)
        assert 0 < max(held) < 0.8 * total
        assert max(read) == total if mode == "fsdp" else max(read) < 0.8 * total


def _local_bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return 0 if local.is_meta else local.nbytes


@pytest.mark.thorough
def test_a_resumed_run_does_not_need_the_file(other_head: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    file.write_bytes(other_head.read_bytes())
    words = (*DIGITS, *HEAD_ALONE)
    whole = run(tmp_path / "whole", 1, *words, f"init_from={file}", "max_steps=4")
    begun = run(tmp_path / "begun", 1, *words, f"init_from={file}", "max_steps=2")
    file.unlink()
    resumed = run(tmp_path / "begun", 2, f"resume='{begun.path}'", "parallel=fsdp", "max_steps=4")
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-12)
    assert _hash_without_head(resumed.weights) == _hash_without_head(whole.weights)
    found = run(tmp_path / "evaluated", 1, "task=evaluate", f"run='{begun.path}'")
    assert found.result["metrics"]["val/loss"] == pytest.approx(resumed.result["metrics"]["val/loss"], rel=1e-12)
    for key in ("resume", "run"):
        task = ("task=evaluate",) if key == "run" else ()
        with pytest.raises(ValueError, match=rf"init_from.path=\S+ has no effect on {key}="):
            run(tmp_path / "refused", 1, *task, f"{key}='{begun.path}'", f"init_from.path={other_head}")
