"""Following a run with a debugger: the terminal is the debugger's, and debug=true makes the run small."""

import json
import os
import pty
import select
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from commands import Commands
from worlds import configure, run

from runner.errors import InputError

STOPPING = """\
from torch import nn

class Stopping(nn.Module):
    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.layer, self.calls = nn.Linear(sample_shape[0], num_outputs), 0

    def forward(self, inputs):
        self.calls += 1
        if self.training and self.calls in (3, 5):
            answer = 6 * 7
            breakpoint()
        return self.layer(inputs)
"""
NAN = """\
import torch
from torch import nn

class Rooted(nn.Module):
    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.layer = nn.Linear(sample_shape[0], num_outputs)

    def forward(self, inputs):
        return torch.sqrt(self.layer(inputs) * 0)  # whose gradient is infinite, times nought
"""
NODE = "_target_: debugged_{}.{}\nsample_shape: ${{data.sample_shape}}\nnum_outputs: ${{data.num_outputs}}\n"
HIDDEN_CURSOR, SHOWN_CURSOR = "\x1b[?25l", "\x1b[?25h"
SHOWN = "0/8"  # steps, by the bar
TOY = ("model=toy", "data=toy", "logger=none", "batch_size=16")


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    for name, text in (("Stopping", STOPPING), ("Rooted", NAN)):
        (tmp_path / "mine" / f"debugged_{name.lower()}.py").write_text(text)
        (tmp_path / "mine" / "model" / f"{name.lower()}.yaml").write_text(NODE.format(name.lower(), name))
    yield tmp_path
    sys.modules.pop("debugged_rooted", None)


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, folder: Path, *words: str):
        self.own, its = pty.openpty()
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40", "OMP_NUM_THREADS": "1"}
        env |= {"CUDA_VISIBLE_DEVICES": ""}
        for name in ("NO_COLOR", "PYTHONBREAKPOINT"):
            env.pop(name, None)
        command = [sys.executable, "-m", "runner", *words]
        self.process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=its, stdout=its, stderr=its, start_new_session=True
        )
        os.close(its)
        self.said = ""

    def read(self, for_s: float) -> str:
        """What it says within that time."""
        said, deadline = "", time.monotonic() + for_s
        while (left := deadline - time.monotonic()) > 0 and select.select([self.own], [], [], left)[0]:
            try:
                data = os.read(self.own, 4096)
            except OSError:  # it has ended
                break
            said += data.decode(errors="replace")
        self.said += said
        return said

    def read_until(self, text: str, timeout_s: float = 120) -> str:
        """What it says up to the text, and a little more."""
        said, deadline = "", time.monotonic() + timeout_s
        while text not in said:
            assert time.monotonic() < deadline, f"no {text!r} in {self.said!r}"
            more = self.read(0.2)
            assert more or self.process.poll() is None, self.said
            said += more
        return said

    def type(self, line: str) -> None:
        os.write(self.own, f"{line}\n".encode())


@pytest.fixture
def terminal(mine: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*words: str) -> Terminal:
        opened.append(Terminal(mine, *words))
        return opened[-1]

    yield start
    for each in opened:
        if each.process.poll() is None:
            each.process.kill()
        each.process.wait(timeout=60)
        os.close(each.own)


def test_the_bar_leaves_the_terminal_to_the_debugger(mine: Path, terminal: Callable[..., Terminal]) -> None:
    """It is drawn ten times a second; while the debugger waits, nothing may be drawn."""
    words = ("--config-dir", "mine", "model=stopping", *TOY[1:], "max_steps=8", "backend=gloo")
    typing = terminal(*words)
    shown = typing.read_until("(Pdb) ")
    assert SHOWN in shown and shown.rindex(HIDDEN_CURSOR) < shown.rindex(SHOWN_CURSOR), repr(shown)
    assert typing.read(1.0) == ""
    typing.type("p answer")
    assert "42" in typing.read_until("(Pdb) ")
    typing.type("p self.calls")
    answered = typing.read_until("(Pdb) ")
    assert "3" in answered and HIDDEN_CURSOR not in answered  # as the bar does
    assert typing.read(1.0) == ""
    typing.type("n")  # to the next line, and there again
    assert "-> return self.layer(inputs)" in typing.read_until("(Pdb) ") or "-> " in typing.said
    typing.type("c")
    typing.read_until("(Pdb) ")
    typing.type("c")
    typing.read_until("run directory:")
    assert typing.process.wait(timeout=60) == 0
    (path,) = (mine / "outputs" / "run").iterdir()
    assert json.loads((path / "result.json").read_text())["step"] == 8


def test_a_small_run(tmp_path: Path) -> None:
    words = (*TOY, "debug=true", "epochs=2", "loader.num_workers=2", "loader.prefetch=3", "eval_batches=100")
    made = run(tmp_path / "outputs", 1, *words)
    assert made.result["step"] == 6
    assert sorted(made.losses) == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in made.lines if "val/loss" in line] == [3, 6]
    log = (made.path / "log.txt").read_text()
    assert "debug    3 batches an epoch and an evaluation, no loader workers, anomaly detection\n" in log
    config = yaml.safe_load((made.path / "config.yaml").read_text())
    assert (config["debug"], config["loader"]["num_workers"], config["eval_batches"]) == (True, 0, 3)
    assert "debug=true" in yaml.safe_load((made.path / "overrides.yaml").read_text())
    whole = run(tmp_path / "outputs", 1, *TOY, "max_steps=3")
    assert [whole.losses[step] for step in (1, 2, 3)] == [made.losses[step] for step in (1, 2, 3)]  # where it broke
    with pytest.raises(
        InputError, match="debug=false cannot change when a run is resumed, which was made with debug=true"
    ):
        configure(f"resume={made.path}", "debug=false")
    resumed = run(tmp_path / "outputs", 1, f"resume={made.path}", "epochs=3")
    assert resumed.result["step"] == 9


def test_a_nan_is_found_where_it_is_made(mine: Path, here: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    words = ("--config-dir", "mine", "model=rooted", *TOY[1:], "max_steps=2", "backend=gloo", "threads=1")
    assert here(*words, "on_nonfinite=go_on") == 0  # trained to nothing, without a word
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # by which torch tells of the forward
        assert here(*words, "debug=true", "name=found") == 1
    (path,) = (mine / "outputs" / "found").iterdir()
    assert "returned nan values in its 0th output" in json.loads((path / "result.json").read_text())["error"]
    assert "return torch.sqrt(self.layer(inputs) * 0)" in (path / "log.txt").read_text()
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("launcher=spawn", "launcher.nproc_per_node=1"), "debug=true is for the process that has the terminal"),
        (("task=collectives",), "debug=true has no effect on task=collectives; drop it"),
        (("-m", "seed=0,1", "hydra/launcher=slots"), "drop it, or hydra/launcher=slots"),
        (("-m", "seed=0,1", "launcher=torchrun"), "debug=true is for the process that has the terminal"),
        (("-m", "seed=0,1", "launcher=slurm"), "debug=true is for the process that has the terminal"),
    ],
)
def test_it_is_refused_where_no_terminal_is(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    here: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert here("debug=true", *words) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_it_is_refused_in_a_world_of_several(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="debug=true is for one process, but the world has 2; start it by `python -m"):
        run(tmp_path / "outputs", 2, *TOY, "debug=true", "parallel=ddp")


@pytest.mark.thorough
def test_torchrun_says_it_once(commands: Commands) -> None:
    done = commands.torchrun(2, "debug=true", "parallel=ddp")
    assert done.returncode == 1
    assert done.stderr.count("debug=true is for one process, but the world has 2") == 1
    assert list(commands.folder.iterdir()) == []
