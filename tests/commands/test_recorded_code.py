"""A custom model whose code changes after training: the imports and messages of each command."""

import json
import os
import shutil
from pathlib import Path

import pytest
from commands import Commands
from custom_files import write_files
from worlds import only_run

import runner

NET = """\
from torch import nn

from layers.activation import make_activation


class Net(nn.Module):
    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(sample_shape[0], 4), make_activation(), nn.Linear(4, num_outputs))

    def forward(self, inputs):
        return self.layers(inputs)
"""
ACTIVATION = "from torch import nn\n\n\ndef make_activation():\n    return nn.{}()\n"
NODE = "_target_: net.Net\nsample_shape: ${data.sample_shape}\nnum_outputs: ${data.num_outputs}\n"
CALLBACK = "from runner import Callback\n\n\nclass Quiet(Callback):\n    pass\n"
TINY = ("--config-dir=mine", "model=own", "callbacks=quiet", "data=toy", "epochs=2", "logger=none", "threads=1")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Return a custom directory whose model imports a package, next to a callback."""
    files = {
        "model/own.yaml": NODE,
        "callbacks/quiet.yaml": "quiet:\n  _target_: quiet.Quiet\n",
        "quiet.py": CALLBACK,
        "net.py": NET,
        "layers/activation.py": ACTIVATION.format("GELU"),
    }
    write_files(tmp_path / "mine", files)
    return tmp_path / "mine"


@pytest.fixture
def trained(commands: Commands, mine: Path, tmp_path: Path) -> Path:
    """Return a run whose activation function has been replaced after the training."""
    done = commands.forked(*TINY)
    assert done.returncode == 0, done.stderr
    (mine / "layers" / "activation.py").write_text(ACTIVATION.format("Sigmoid"))
    return only_run(tmp_path).path


def metrics_of(folder: Path, name: str) -> dict[str, float]:
    return only_run(folder, name).result["metrics"]


def test_tasks_import_the_copy_and_name_the_changed_files(
    commands: Commands, trained: Path, mine: Path, tmp_path: Path
) -> None:
    code = json.loads((trained / "result.json").read_text())["code"]
    copy = trained / "code" / code["hash"]
    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*.py")) == [
        "layers/activation.py",
        "net.py",
        "quiet.py",
    ]
    was = metrics_of(tmp_path, "run")["val/loss"]
    changed = str(mine / "layers" / "activation.py")
    for name, words, line in (
        ("copy", (), f"code     as recorded in {copy}; the current code differs: {changed}"),
        ("spawned", ("launcher=spawn", "launcher.nproc_per_node=1"), "as recorded in"),
        ("now", ("code=current",), f"code     current, which differs from {copy}: {changed}"),
    ):
        done = commands.forked("task=evaluate", f"run={trained}", f"name={name}", *words)
        assert done.returncode == 0 and line in done.stdout, done.stdout + done.stderr
        assert (metrics_of(tmp_path, name)["val/loss"] == was) == (name != "now")
    assert only_run(tmp_path, "copy").result["code"]["hash"] == code["hash"]

    done = commands.forked("task=rerun", f"run={trained}", "name=again")
    assert f"differs code: {changed}: compare {copy} with {tmp_path}/outputs/again/" in done.stdout, done.stderr
    assert "the logged numbers differ at step 1: train/" in done.stdout
    assert metrics_of(tmp_path, "again")["rerun/same_weights"] == 0.0
    done = commands.forked("task=rerun", f"run={trained}", "name=exact", "code=recorded")
    assert "differs code" not in done.stdout and metrics_of(tmp_path, "exact")["rerun/same_weights"] == 1.0


def test_a_run_with_changed_code_is_resumed_only_by_force(commands: Commands, trained: Path, mine: Path) -> None:
    (mine / "quiet.py").write_text(CALLBACK + "\n# changed, which does not affect the numbers\n")
    before = (trained / "result.json").read_text()
    done = commands.forked("resume=last", "epochs=3")
    assert done.returncode == 2 and (trained / "result.json").read_text() == before
    assert "the code of its model, data or training has changed: " in done.stderr
    assert "layers/activation.py; restore it from" in done.stderr and "quiet.py" not in done.stderr
    done = commands.forked("resume=last", "epochs=3", "resume_force=true")
    assert done.returncode == 0, done.stderr
    assert f"{mine}/layers/activation.py, {mine}/quiet.py\n" in done.stdout
    assert len(list((trained / "code").iterdir())) == 2  # of both attempts
    assert commands.forked("resume=last", "epochs=4").returncode == 0  # nothing has changed since the last attempt


@pytest.mark.thorough
def test_a_sweep_shares_one_copy_and_its_report_shows_other_code(
    commands: Commands, mine: Path, tmp_path: Path
) -> None:
    assert commands.forked("-m", *TINY, "seed=0,1").returncode == 0
    (sweep,) = (tmp_path / "outputs" / "run").iterdir()
    assert len(list((sweep / "code").iterdir())) == 1 and not list(sweep.glob("*/code"))
    (mine / "layers" / "activation.py").write_text(ACTIVATION.format("Sigmoid"))
    done = commands.forked("-m", "resume=last", "seed=2")
    assert done.returncode == 2 and "layers/activation.py; restore it from" in done.stderr, done.stderr
    done = commands.forked("-m", "resume=last", "seed=2", "resume_force=true")
    assert done.returncode == 0, done.stdout + done.stderr
    hashes = [json.loads((job / "result.json").read_text())["code"]["hash"] for job in sorted(sweep.glob("[0-9]*"))]
    assert len(set(hashes)) == 2
    report = commands.forked("task=report", "run=last")
    assert report.returncode == 0 and f"{hashes[0]}, {hashes[2]}" in report.stdout, report.stdout
    # The jobs of a sweep share their imports, so a sweep cannot evaluate runs of different code.
    runs = ",".join(str(job) for job in sorted(sweep.glob("[0-9]*")))
    done = commands.forked("-m", "task=evaluate", f"run={runs}")
    assert done.returncode == 2 and "the runs have different custom code; run a command for each" in done.stderr


def test_the_model_of_a_run_is_loaded_from_the_copy(trained: Path, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def activation(code: str) -> str:
        return type(runner.open_run(trained).model(code=code).layers[1]).__name__

    assert runner.open_run(trained).changed_code == [str(mine / "layers" / "activation.py")]
    assert [activation(code) for code in ("recorded", "current", "recorded")] == ["GELU", "Sigmoid", "GELU"]
    shutil.rmtree(mine)
    assert activation("recorded") == "GELU"
    with pytest.raises(runner.InputError, match=r"config-dir=.* no longer exists"):
        activation("current")
    with pytest.raises(runner.InputError, match="code=old must be recorded or current"):
        activation("old")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(runner.InputError, match="would run --config-dir="):
        activation("recorded")


def test_code_that_cannot_be_imported_is_refused(commands: Commands, trained: Path, tmp_path: Path) -> None:
    done = commands.forked(*TINY, "code=current")
    assert done.returncode == 2 and "code=current has no effect without run" in done.stderr
    shutil.rmtree(trained / "code")
    done = commands.forked("task=evaluate", f"run={trained}", "name=other")
    assert done.returncode == 2 and not (tmp_path / "outputs" / "other").exists()
    assert done.stderr.endswith("the copy of the run's code is missing; restore it, or add code=current\n")
    assert commands.forked("task=evaluate", f"run={trained}", "name=other", "code=current").returncode == 0
