"""Debugging a run: the progress bar leaves the terminal to the debugger, and debug=true makes the run small."""

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
        if self.training and len(inputs) > 3 and self.calls in (3, 5):
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
SHOWN = "0/8"  # the bar's steps
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
    """A command in a pseudo-terminal."""

    def __init__(self, folder: Path, *args: str):
        self.descriptor, terminal = pty.openpty()
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40", "OMP_NUM_THREADS": "1"}
        env |= {"CUDA_VISIBLE_DEVICES": ""}
        for name in ("NO_COLOR", "PYTHONBREAKPOINT"):
            env.pop(name, None)
        command = [sys.executable, "-m", "runner", *args]
        self.process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
        )
        os.close(terminal)
        self.output = ""

    def read(self, for_s: float) -> str:
        """Return the output within that time."""
        output, deadline = "", time.monotonic() + for_s
        while (left := deadline - time.monotonic()) > 0 and select.select([self.descriptor], [], [], left)[0]:
            try:
                data = os.read(self.descriptor, 4096)
            except OSError:  # it has exited
                break
            output += data.decode(errors="replace")
        self.output += output
        return output

    def read_until(self, text: str, timeout_s: float = 120) -> str:
        """Return the output up to the text, and possibly a little more."""
        output, deadline = "", time.monotonic() + timeout_s
        while text not in output:
            assert time.monotonic() < deadline, f"no {text!r} in {self.output!r}"
            more = self.read(0.2)
            assert more or self.process.poll() is None, self.output
            output += more
        return output

    def type(self, line: str) -> None:
        os.write(self.descriptor, f"{line}\n".encode())


@pytest.fixture
def terminal(mine: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*args: str) -> Terminal:
        opened.append(Terminal(mine, *args))
        return opened[-1]

    yield start
    for each in opened:
        if each.process.poll() is None:
            each.process.kill()
        each.process.wait(timeout=60)
        os.close(each.descriptor)


@pytest.mark.thorough
def test_the_bar_leaves_the_terminal_to_the_debugger(mine: Path, terminal: Callable[..., Terminal]) -> None:
    """The bar is drawn ten times a second, but not while the debugger waits."""
    args = ("--config-dir", "mine", "model=stopping", *TOY[1:], "max_steps=8", "backend=gloo")
    typing = terminal(*args)
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
    assert "-> return self.layer(inputs)" in typing.read_until("(Pdb) ") or "-> " in typing.output
    typing.type("c")
    typing.read_until("(Pdb) ")
    typing.type("c")
    typing.read_until("run directory:")
    assert typing.process.wait(timeout=60) == 0
    (path,) = (mine / "outputs" / "run").iterdir()
    assert json.loads((path / "result.json").read_text())["step"] == 8


def test_a_small_run(tmp_path: Path) -> None:
    args = (*TOY, "debug=true", "epochs=2", "loader.num_workers=2", "loader.prefetch=3", "eval_batches=100")
    made = run(tmp_path / "outputs", 1, *args)
    assert made.result["step"] == 6
    assert sorted(made.losses) == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in made.lines if "val/loss" in line] == [3, 6]
    log = (made.path / "log.txt").read_text()
    assert "debug    3 batches an epoch and an evaluation, no loader workers, anomaly detection\n" in log
    config = yaml.safe_load((made.path / "config.yaml").read_text())
    assert (config["debug"], config["loader"]["num_workers"], config["eval_batches"]) == (True, 0, 3)
    assert "debug=true" in yaml.safe_load((made.path / "overrides.yaml").read_text())
    whole = run(tmp_path / "outputs", 1, *TOY, "max_steps=3")
    assert [whole.losses[step] for step in (1, 2, 3)] == [made.losses[step] for step in (1, 2, 3)]  # where it failed
    with pytest.raises(InputError, match="debug=false cannot change when a run is resumed: the run has debug=true"):
        configure(f"resume={made.path}", "debug=false")
    resumed = run(tmp_path / "outputs", 1, f"resume={made.path}", "epochs=3")
    assert resumed.result["step"] == 9


def test_anomaly_detection_names_the_line_that_produces_a_nan(
    mine: Path, here: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    args = ("--config-dir", "mine", "model=rooted", *TOY[1:], "max_steps=2", "backend=gloo", "threads=1")
    assert here(*args, "on_nonfinite=go_on") == 0  # training diverges without a message
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # by which torch names the forward
        assert here(*args, "debug=true", "name=found") == 1
    (path,) = (mine / "outputs" / "found").iterdir()
    assert "returned nan values in its 0th output" in json.loads((path / "result.json").read_text())["error"]
    assert "return torch.sqrt(self.layer(inputs) * 0)" in (path / "log.txt").read_text()
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("launcher=spawn", "launcher.nproc_per_node=1"), "debug=true needs the terminal"),
        (("task=collectives",), "debug=true has no effect on task=collectives; drop it"),
        (("-m", "seed=0,1", "hydra/launcher=slots"), "remove it, or hydra/launcher"),
    ],
)
def test_debug_is_refused_without_a_terminal(
    args: tuple[str, ...],
    message: str,
    tmp_path: Path,
    here: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert here("debug=true", *args) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_debug_is_refused_in_a_world_of_several_ranks(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="debug=true is for one process, but the world has 2; start it by `python -m"):
        run(tmp_path / "outputs", 2, *TOY, "debug=true", "parallel=ddp")
