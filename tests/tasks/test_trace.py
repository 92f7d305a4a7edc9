"""task=diff with diff.trace=true: the module, step, rank and samples at which two repeated runs differ."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from commands import Commands
from custom_files import write_files
from worlds import Run, only_run, run, run_world

from runner.config.custom_dirs import fresh_imports
from runner.records.logged_numbers import default_tolerance
from runner.tasks import diff
from runner.tasks.trace import find_difference

FILES = {
    "model/net.yaml": "_target_: net.Net\n",
    "data/points.yaml": "_target_: points.Points\nsample_shape: [4]\nnum_outputs: 3\nshift: 0.0\n",
    "callbacks/shift.yaml": "shift:\n  _target_: shift.Shift\n",
    "points.py": """\
import torch
from torch.utils.data import TensorDataset


class Points(TensorDataset):
    def __init__(self, train: bool, shift: float = 0.0):
        points = torch.randn(48, 4, generator=torch.Generator().manual_seed(int(train)))
        points[31] += shift
        super().__init__(points, torch.arange(48) % 3)
""",
    "shift.py": """\
import torch
from runner import Callback

LAYERS = []


class Shift(Callback):  # on rank 1, in the forward and backward of step 7
    step = 0

    def on_start(self, run):
        self.step, self.rank = run.first_step + 1, run.rank

    def before_forward(self):
        self.was = LAYERS[0].weight.detach().clone()
        if self.step == 7 and self.rank == 1:
            with torch.no_grad():
                LAYERS[0].weight[0, 0] += 1e-6

    def allows_update(self, update):
        with torch.no_grad():
            LAYERS[0].weight.copy_(self.was)
        self.step += 1
        return True
""",
    "net.py": """\
import torch
from torch import nn

from shift import LAYERS


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs):
        context.save_for_backward(inputs)
        return inputs.sin()

    @staticmethod
    def backward(context, gradient):
        return gradient * context.saved_tensors[0].cos()


class Activation(nn.Module):
    def forward(self, inputs):
        return Sine.apply(inputs)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), Activation(), nn.Linear(8, 3))
        LAYERS[:] = [self.layers[1]]

    def forward(self, inputs):
        return self.layers(inputs)

    def stages(self):
        return [*self.layers]
""",
}
TINY = ("model=net", "data=points", "precision=fp64", "batch_size=12", "epochs=3", "logger=none")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a custom directory. The ranks that task=diff starts are forked."""

    def launch_forked(request: diff.Request, rank_info: object) -> None:
        run_world(request, request.config.launcher["nproc_per_node"], tmp_path)

    monkeypatch.setattr(diff, "launch", launch_forked)
    write_files(tmp_path / "mine", FILES)
    with fresh_imports():
        yield tmp_path / "mine"
    with fresh_imports():  # other tests have modules of the same names
        pass


def traced(here: Callable[..., int], capsys: pytest.CaptureFixture[str], one: Run, other: Run, *words: str) -> str:
    """Return what task=diff prints about the traces of two runs that differ."""
    capsys.readouterr()
    status = here("task=diff", f"run='{one.path}'", f"diff.with='{other.path}'", "diff.trace=true", *words)
    printed = capsys.readouterr()
    assert status == 1, printed
    return printed.out


@pytest.mark.fault("a weight that differs on one rank", outcome="refused")
def test_a_weight_that_differs_on_one_rank_is_named(
    here: Callable[..., int], capsys: pytest.CaptureFixture[str], mine: Path, tmp_path: Path
) -> None:
    one = run(tmp_path / "outputs", 1, f"--config-dir={mine}", *TINY)
    other = run(tmp_path / "outputs", 2, f"--config-dir={mine}", *TINY, "parallel=ddp", "callbacks=shift")
    shutil.rmtree(one.path / "code")
    moved = mine.rename(tmp_path / "moved")
    out = traced(here, capsys, one, other, f"--config-dir={moved}", "code=current")
    assert "steps 6 to 7, repeated from the checkpoints step_4\n" in out, out
    line = out.splitlines()[-1]
    assert line.startswith("trace    step 7: layers.1 differs for samples "), out
    assert ", on rank 0 in A and rank 1 in B; the largest difference is " in line


@pytest.mark.thorough
@pytest.mark.fault("a wrong sign in the backward of a module", outcome="refused")
def test_a_wrong_backward_is_named(
    here: Callable[..., int], capsys: pytest.CaptureFixture[str], mine: Path, tmp_path: Path, commands: Commands
) -> None:
    words = ("--config-dir=mine", *TINY, "threads=1")
    assert commands.forked(*words, "name=one").returncode == 0
    (mine / "net.py").write_text(FILES["net.py"].replace("return gradient * context", "return -gradient * context"))
    for done in commands.forked_world(2, *words, "name=other", "parallel=fsdp", "micro_batches=2"):
        assert done.returncode == 0, done.stderr
    one, other = only_run(tmp_path, "one"), only_run(tmp_path, "other")
    out = traced(here, capsys, one, other)
    assert f"differs  code: {mine}/net.py: compare {one.path}" in out
    assert (
        "trace    step 1: the gradient of layers.1.weight differs; it is computed in the backward of layers.1, " in out
    )
    assert "layers.2, layers.3; the largest difference is " in out


@pytest.mark.fault("a changed sample", outcome="refused")
@pytest.mark.parametrize(
    "mode", [pytest.param("ps", marks=pytest.mark.thorough), pytest.param("pipeline", marks=pytest.mark.soak)]
)
def test_a_changed_sample_is_named(
    here: Callable[..., int], capsys: pytest.CaptureFixture[str], mine: Path, tmp_path: Path, mode: str
) -> None:
    one = run(tmp_path / "outputs", 1, f"--config-dir={mine}", *TINY)
    other = run(tmp_path / "outputs", 2, f"--config-dir={mine}", *TINY, f"parallel={mode}", "data.shift=1e-3")
    out = traced(here, capsys, one, other)
    assert ": tensor .0 of the batch differs for sample 31, on rank 0 in A and rank " in out


@pytest.mark.thorough
def test_runs_in_different_modes_agree(here: Callable[..., int], mine: Path, tmp_path: Path) -> None:
    worlds = ((1, ()), (2, ("parallel=ddp",)), (2, ("parallel=fsdp", "micro_batches=2")))
    runs = [run(tmp_path / "outputs", size, f"--config-dir={mine}", *TINY, *words) for size, words in worlds]
    assert here("task=diff", f"run='{runs[0].path}'", f"diff.with='{runs[1].path}'") == 0
    directories = []
    for (size, _), each in zip(worlds, runs, strict=True):
        repeated = run(tmp_path / "outputs", size, "task=trace", f"run='{each.path}'", "task.last=2", "logger=none")
        directories.append(repeated.path / "trace")
    for other in directories[1:]:
        assert find_difference((directories[0], other), range(1, 3), default_tolerance(["fp64"])) == ("", [])
        assert "differs for samples " in find_difference((directories[0], other), range(1, 3), -1.0)[0]


def test_steps_before_the_start_of_a_fork_are_not_compared(tmp_path: Path) -> None:
    directories = tmp_path / "whole", tmp_path / "fork"
    for directory, first, value in ((directories[0], 1, 0.0), (directories[1], 2, 1.0)):
        directory.mkdir()
        rows = {"layer": [(0, torch.full((1, 2), value))]}
        record = {"loss": {"samples": [[5]], "modules": ["layer"], "rows": rows, "gradients": {}}}
        for step in range(first, 3):
            torch.save(record, directory / f"{step}.0")
    assert find_difference(directories, range(1, 3), 1e-6)[0].startswith("step 2: layer differs for sample 5, ")
