"""task=export: the file contains the trained model; if the export fails, no file is written."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from commands import Commands
from runner.shipped.data.digits import Digits
from torch import nn
from worlds import Run, run

from runner.checkpoints.saved_state import open_checkpoint
from runner.paths import ROOT
from runner.tasks.export import SUFFIXES, Example, _known_reason, trace

OWN = Path(__file__).parents[1] / "parallel" / "own"
HEADS = (f"--config-dir={OWN}", "data=figures", "model=two_heads", "loss=both_heads", "batch_size=20")
TOY = ("data=toy", "data.num_train=60", "data.num_val=20", "batch_size=20")


def train(folder: Path, *args: str, ranks: int = 1) -> Run:
    return run(folder, ranks, *args, "logger=none", "max_steps=3", "optimizer.lr=0.01")


def odd(folder: Path, name: str) -> Run:
    return train(folder, *TOY, "model=linear", f"model._target_=odd_model.{name}")


@pytest.mark.parametrize("kind", ["torch_export", pytest.param("onnx", marks=pytest.mark.thorough)])
def test_a_program_accepts_the_inputs_of_the_model(
    kind: str, here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Dicts as inputs and outputs, any number of samples, and a run of several ranks, exported by one process."""
    done = train(tmp_path, *HEADS, "parallel=ddp", ranks=2)
    recorded = yaml.safe_load((done.path / "overrides.yaml").read_text())
    (done.path / "overrides.yaml").write_text(yaml.safe_dump([*recorded, "launcher=slurm", "launcher.nodes=2"]))
    file = done.path / "export" / f"two_heads-step_3{SUFFIXES[kind]}"
    file.parent.mkdir()
    file.write_text("of an earlier export")
    assert here("task=export", f"run={done.path}", f"export.format={kind}") == 0
    printed = capfd.readouterr().out
    assert "batches  any number of samples" in printed and "checked  outputs differ" in printed
    facts = json.loads(file.with_name(f"{file.name}.json").read_text())
    assert [file.name, f"{file.name}.json"] == sorted(path.name for path in file.parent.iterdir())
    assert facts["inputs"] == [
        {"name": "points", "dtype": "float32", "shape": ["batch", 6]},
        {"name": "scale", "dtype": "float32", "shape": ["batch"]},
    ]
    assert [output["name"] for output in facts["outputs"]] == ["kind", "size"]
    assert facts["batch"] is None and 0 <= facts["largest_difference"] < 1e-6
    assert facts["model"] == {"name": "two_heads", "target": "own_parity.TwoHeads", "options": {"width": 8}}
    points, scale = torch.randn(7, 6), torch.rand(7)
    if kind == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(file)
        assert [taken.name for taken in session.get_inputs()] == ["points", "scale"]
        kind_of, _ = session.run(None, {"points": points.numpy(), "scale": scale.numpy()})
        assert kind_of.shape == (7, 3)
    else:
        assert torch.export.load(file).module()(points=points, scale=scale)["kind"].shape == (7, 3)


class Graphs(nn.Module):
    """The sums of the nodes of each graph."""

    def forward(self, nodes: torch.Tensor, graph: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        return torch.zeros(size.size(0), nodes.size(1)).index_add(0, graph, nodes) / size[:, None]


def test_a_program_of_graphs_accepts_any_number_of_nodes() -> None:
    sizes = torch.tensor([4, 2, 3, 13])
    nodes, graph = torch.randn(22, 3), torch.arange(4).repeat_interleave(sizes)
    program = trace(Graphs(), Example((nodes, graph, sizes.float()), {}, 4, ragged=True), any_batch=True)
    single = torch.randn(5, 3), torch.zeros(5, dtype=torch.int64), torch.tensor([5.0])
    assert torch.allclose(program.module()(*single), single[0].mean(0, keepdim=True))


class Cache:
    """An object that torch.export does not know, as transformers.cache_utils.DynamicCache."""


class Caching(nn.Module):
    def forward(self, inputs: torch.Tensor) -> Any:
        return {"outputs": inputs, "cache": Cache()}


def test_errors_that_explain_the_internals_of_torch_become_one_line() -> None:
    with pytest.raises(Exception, match="functorch") as raised:
        trace(Caching(), Example((torch.zeros(2, 3),), {}, 2, ragged=False), any_batch=False)
    assert str(_known_reason(raised.value)).startswith("forward returns a Cache, but a program returns only tensors")
    fixed = torch.export.export(nn.Linear(3, 2), (torch.zeros(22, 3),)).module()
    with pytest.raises(Exception, match="Guard failed") as raised:
        fixed(torch.zeros(5, 3))
    assert "sizes of its first samples (" in str(_known_reason(raised.value))
    assert "\n" not in str(_known_reason(raised.value))


def test_a_shared_tensor_is_stored_once(here: Callable[..., int], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    done = train(tmp_path, *TOY, "model=linear", "model._target_=odd_model.TiedTwice", "debug=true")
    file = tmp_path / "elsewhere" / "tied.safetensors"
    assert here("task=export", f"run={done.path}", "checkpoint=best", f"export.output={file}") == 0
    facts, weights = json.loads(file.with_name(f"{file.name}.json").read_text()), load_file(file)
    assert facts["tied"] == {
        "third.weight": "second.weight",
        "again.weight": "second.weight",
        "again.bias": "second.bias",
    }
    whole = weights | {name: weights[kept] for name, kept in facts["tied"].items()}
    assert whole.keys() == done.weights.keys()
    assert all(torch.equal(whole[name], tensor) for name, tensor in done.weights.items())
    assert facts["weights_sha256"] == done.result["weights_sha256"]
    assert facts["metrics"]["val/loss"] == done.result["metrics"]["val/loss"]
    assert facts["checkpoint"] == {"read_as": "best", "step": 3, "epoch": 1}
    assert oct(file.stat().st_mode) == oct(file.with_name(f"{file.name}.json").stat().st_mode)


@pytest.mark.thorough
def test_models_that_cannot_be_exported_are_reported_and_leave_no_file(
    here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    differs, counts = odd(tmp_path / "differs", "OtherWhenExported"), odd(tmp_path / "counts", "Counting")

    def refused(done: Run, *args: str) -> str:
        def files() -> list[Path]:
            return sorted(path for path in tmp_path.rglob("*") if path.is_file())

        before = files()
        capfd.readouterr()
        assert here("task=export", f"run={done.path}", *args) == 2
        assert files() == before
        (line,) = capfd.readouterr().err.splitlines()
        return line

    printed = refused(differs, "export.format=torch_export", "export.output=new/folders/model.pt2")
    assert "export.tolerance=0.0001: the outputs" in printed and "differ from the model's by" in printed
    assert "inputs[inputs > 0]" not in (printed := refused(counts, "export.format=torch_export"))
    assert "the export of the model failed with: " in printed and "odd_model.py:" in printed
    printed = refused(differs, "export.format=torch_export", "export.output=model.onnx")
    assert "must be a file that ends in .pt2" in printed
    (tmp_path / "file").touch()
    assert "export.output=" in (printed := refused(differs, "export.output=file/model.safetensors"))
    assert "cannot create its directory" in printed
    assert "export.tolerance=0.1 has no effect with" in refused(differs, "export.tolerance=0.1")
    assert "other shapes: first.weight" in refused(differs, "data.num_outputs=4")
    monkeypatch.setattr("runner.errors.find_spec", lambda name: None if name == "onnxscript" else name)
    assert "pip install 'experiment-runner[onnx]'" in refused(differs, "export.format=onnx")

    # If the data is missing, weights can be exported, but programs cannot.
    missing = ("data=arrays", "data.inputs.train=none.npy", "model.sample_shape=[10]")
    assert "export.format=torch_export runs the model on samples" in refused(
        differs, "export.format=torch_export", *missing, "model.num_outputs=5"
    )
    assert here("task=export", f"run={differs.path}", *missing, "model.num_outputs=5") == 0
    assert "inputs   not described: data" in capfd.readouterr().out


@pytest.mark.thorough
def test_plain_torch_loads_it_as_documented(here: Callable[..., int], tmp_path: Path) -> None:
    """Ten lines that import only the model's file load the averaged weights of two shards, with the same outputs."""
    args = ("model=convnet", "model.channels=[4,8]", "batch_size=200", "parallel=fsdp")
    done = run(tmp_path, 2, *args, "ema.decay=0.9", "checkpoint.keep_best=1", "epochs=3", "logger=none")
    read = (f"run={done.path}", "checkpoint=best")
    arrays = tmp_path / "arrays"
    predict = ("task=predict", "predict.format=npy", f"predict.output={arrays}", f"outputs={arrays}.of")
    run(tmp_path / "of", 2, *read, *predict)
    assert here("task=export", *read, "export.output=digits.safetensors") == 0
    (page,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "weights.md").read_text(), re.DOTALL)
    assert len([line for line in page.splitlines() if line]) <= 10
    shutil.copytree(ROOT / "models", tmp_path / "models")
    data = Digits(False, [1, 28, 28], 10)
    np.save(tmp_path / "inputs.npy", torch.stack([sample for sample, _ in data]).numpy())
    checked = """
import sys, numpy
inputs = torch.from_numpy(numpy.load("inputs.npy")).to(next(model.parameters()).dtype)
numpy.save("outputs.npy", model(inputs).detach().numpy())
assert not {"runner", "hydra", "data", "conf"} & sys.modules.keys()
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", page + checked]
    went = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert went.returncode == 0, went.stderr
    outputs, predicted = np.load(tmp_path / "outputs.npy"), np.load(arrays / "output.npy")
    assert np.abs(outputs - predicted).max() < 1e-6 and np.abs(predicted).max() > 0.1
    saved = open_checkpoint(done.path / "checkpoints" / "best")
    assert not torch.equal(saved.average()["head.weight"].read(), saved.model()["head.weight"].read())


@pytest.mark.thorough
def test_in_a_world_of_several_ranks_one_process_exports(commands: Commands, tmp_path: Path) -> None:
    done = train(tmp_path, *TOY, "model=toy")
    went = commands.forked_world(2, "task=export", f"run={done.path}")
    assert [each.returncode for each in went] == [0, 0] and sum(each.stdout.count("written") for each in went) == 1
    went = commands.forked_world(2, "task=export", f"run={done.path}", "export.output=here.onnx")
    assert sum(each.stderr.count("must be a file that ends in .safetensors") for each in went) == 1
    assert not (tmp_path / "here.onnx").exists()
