"""A custom model that defines its stages, trained with parallel=pipeline from the command line."""

import json
import re
from pathlib import Path

import pytest
from commands import Commands

pytestmark = pytest.mark.thorough

CODE = """
import os
import signal
from math import prod

from torch import nn


class Chain(nn.Module):
    def __init__(self, sample_shape: list[int], num_outputs: int, width: int = 16, lives: int = -1):
        super().__init__()
        self.first = nn.Linear(prod(sample_shape), width)
        self.second = nn.Linear(width, num_outputs)
        self.lives = lives
        self.second.register_forward_hook(self.count)

    def count(self, *_):
        self.lives -= 1
        if self.lives == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def forward(self, inputs):
        return self.second(self.first(inputs.flatten(1)).relu())

    def stages(self):
        return [nn.Sequential(nn.Flatten(), self.first, nn.ReLU()), self.second]
"""
CONFIG = """# two linear layers
_target_: chain.Chain
sample_shape: ${data.sample_shape}
num_outputs: ${data.num_outputs}
width: 16  # size of the hidden layer
lives: -1  # calls of the second layer that its process outlives
"""
OVERRIDES = ("model=chain", "data.sample_shape=[1,8,8]", "max_steps=30", "backend.timeout_s=20", "logger=none")
PIPELINE = ("parallel=pipeline", "launcher=spawn", "launcher.nproc_per_node=2", "precision=fp64")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    own = tmp_path / "own"
    (own / "model").mkdir(parents=True)
    (own / "chain.py").write_text(CODE)
    (own / "model" / "chain.yaml").write_text(CONFIG)
    return own


def test_custom_stages_are_pipelined(folder: Path, commands: Commands) -> None:
    done = commands.runner("--config-dir", str(folder), *OVERRIDES, *PIPELINE)
    assert done.returncode == 0, done.stderr
    assert "pipeline rank 0: stages 0 of 2, 86.0% of the parameters" in done.stdout
    assert "pipeline rank 1: stages 1 of 2, 14.0% of the parameters" in done.stdout
    one = commands.forked("--config-dir", str(folder), *OVERRIDES, "precision=fp64", "name=one")
    assert one.returncode == 0, one.stderr
    piped, whole = (
        json.loads(path.read_text())["metrics"] for path in sorted(folder.parent.glob("outputs/*/*/*.json"))
    )
    assert piped == pytest.approx(whole, rel=1e-9)


@pytest.mark.fault("kill -9 of a rank that is not restarted", outcome="refused")
def test_a_killed_rank_is_reported_by_its_launcher(folder: Path, commands: Commands) -> None:
    done = commands.runner("--config-dir", str(folder), *OVERRIDES, *PIPELINE, "model.lives=60")
    assert done.returncode == 1
    assert re.fullmatch(r"rank 1 on \S+ died: SIGKILL\n", done.stderr)
    assert done.stdout.count("Traceback") == 1  # rank 0 detects that it is missing
