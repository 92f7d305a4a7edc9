"""task=export: what is written is the trained model, and where it is not, nothing is written."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from commands import Commands
from worlds import Run, run

from data.digits import Digits
from runner import ROOT
from runner.fault_tolerance.checkpoint import open_checkpoint
from runner.tasks import exported

OWN = Path(__file__).parents[1] / "parallel" / "own"
HEADS = (f"--config-dir={OWN}", "data=figures", "model=two_heads", "loss=both_heads", "batch_size=20")
TOY = ("data=toy", "data.num_train=60", "data.num_val=20", "batch_size=20")


def train(folder: Path, *words: str, ranks: int = 1) -> Run:
    return run(folder, ranks, *words, "logger=none", "max_steps=3", "optimizer.lr=0.01")


def odd(folder: Path, name: str) -> Run:
    return train(folder, *TOY, "model=linear", f"model._target_=odd_model.{name}")


@pytest.mark.parametrize("kind", ["torch_export", "onnx"])
def test_a_program_takes_the_model_s_own_inputs(
    kind: str, here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Mappings in and out, any number of samples; a run of several ranks, whose launcher does not come into it."""
    done = train(tmp_path, *HEADS, "parallel=ddp", ranks=2)
    recorded = yaml.safe_load((done.path / "overrides.yaml").read_text())
    (done.path / "overrides.yaml").write_text(yaml.safe_dump([*recorded, "launcher=slurm", "launcher.nodes=2"]))
    file = done.path / "export" / f"two_heads-step_3{exported.SUFFIXES[kind]}"
    file.parent.mkdir()
    for name in (file.name, f"{file.name}.data") if kind == "onnx" else (file.name,):
        (file.parent / name).write_text("of an earlier, larger export")
    assert here("task=export", f"run={done.path}", f"export.format={kind}") == 0
    said = capfd.readouterr().out
    assert "batches  of any number of samples" in said and "checked  outputs differ" in said
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


def test_one_memory_is_in_the_file_once(here: Callable[..., int], tmp_path: Path) -> None:
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


def test_what_cannot_be_exported_is_told_and_leaves_nothing(
    here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    differs, counts = odd(tmp_path / "differs", "OtherWhenExported"), odd(tmp_path / "counts", "Counting")

    def refused(done: Run, *words: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        capfd.readouterr()
        assert here("task=export", f"run={done.path}", *words) == 2
        assert sorted(tmp_path.rglob("*")) == before
        (line,) = capfd.readouterr().err.splitlines()
        return line

    said = refused(differs, "export.format=torch_export", "export.output=new/folders/model.pt2")
    assert "differ from the model's by" in said and "export.tolerance=0.0001 is allowed; nothing was kept" in said
    assert "inputs[inputs > 0]" not in (said := refused(counts, "export.format=torch_export"))
    assert "the model cannot be exported so, with: " in said and "odd_model.py:" in said
    assert "must be a file that ends in .pt2" in refused(
        differs, "export.format=torch_export", "export.output=model.onnx"
    )
    assert "export.format=pt must be one of" in refused(differs, "export.format=pt")
    (tmp_path / "file").touch()
    assert "export.output=" in (said := refused(differs, "export.output=file/model.safetensors"))
    assert "its folder cannot be made" in said
    assert "export.tolerance=0.1 has no effect with" in refused(differs, "export.tolerance=0.1")
    assert "holds no checkpoint step_9" in refused(differs, "checkpoint=step_9")
    assert "other shapes: first.weight" in refused(differs, "data.num_outputs=4")
    monkeypatch.setattr(exported, "find_spec", lambda name: None if name == "onnxscript" else name)
    assert "pip install 'experiment-runner[onnx]'" in refused(differs, "export.format=onnx")
    capfd.readouterr()
    assert here("task=train", "export.format=onnx") == 2
    assert "no effect without task=export" in capfd.readouterr().err

    # Without its data, weights are exported all the same, and programs are not.
    gone = ("data=arrays", "data.inputs.train=none.npy", "model.sample_shape=[10]")
    assert "export.format=torch_export tries the model on samples" in refused(
        differs, "export.format=torch_export", *gone, "model.num_outputs=5"
    )
    assert here("task=export", f"run={differs.path}", *gone, "model.num_outputs=5") == 0
    assert "inputs   not described: data" in capfd.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("fp64", 1e-12)])
def test_plain_torch_loads_it_as_the_page_says(
    precision: str, tolerance: float, here: Callable[..., int], tmp_path: Path
) -> None:
    """The best average of four shards, by ten lines that import the class's own file, says what the shards say."""
    words = ("model=convnet", "model.channels=[4,8]", "batch_size=200", "parallel=fsdp", f"precision={precision}")
    done = run(tmp_path, 4, *words, "ema.decay=0.9", "checkpoint.keep_best=1", "epochs=3", "logger=none")
    read = (f"run={done.path}", "checkpoint=best")
    arrays = tmp_path / "arrays"
    run(
        tmp_path / "of",
        4,
        *read,
        "task=predict",
        "predict.format=npy",
        f"predict.output={arrays}",
        f"outputs={arrays}.of",
    )
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
    assert np.abs(outputs - predicted).max() < tolerance and np.abs(predicted).max() > 0.1
    saved = open_checkpoint(done.path / "checkpoints" / "best")
    assert not torch.equal(saved.average()["head.weight"], saved.model()["head.weight"])


@pytest.mark.thorough
def test_in_a_world_of_several_it_is_the_work_of_one(commands: Commands, tmp_path: Path) -> None:
    done = train(tmp_path, *TOY, "model=toy")
    went = commands.torchrun(2, "task=export", f"run={done.path}")
    assert went.returncode == 0 and went.stdout.count("written") == 1, went.stderr
    went = commands.torchrun(2, "task=export", f"run={done.path}", "export.output=here.onnx")
    assert went.stderr.count("must be a file that ends in .safetensors") == 1
    assert not (tmp_path / "here.onnx").exists()
