"""Tests of experiments from Python: equal to the command, and the state of the process is restored."""

import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Commands
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from worlds import run as run_in_world

import runner
from runner.paths import CONF
from runner.records.ledger import lock_sweep

TOY = ["model=toy", "data=toy", "data.num_train=64", "data.num_val=16", "batch_size=16", "threads=1", "logger=none"]
OPTIONS = "_target_: mine.Mine\nsample_shape: ${data.sample_shape}\nnum_outputs: ${data.num_outputs}\n"
MODULE = """\
import os
import signal

import runner
from runner.shipped.models.toy import Toy


class Mine(Toy):
    def forward(self, samples):
        if self.training and len(samples) > 3:  # not in a dry run
            act()
        return super().forward(samples)


def act():
    {act}
"""

# As a notebook's interrupt; a second one would interrupt at once.
ONCE = 'os.path.exists("sent") or (open("sent", "w").close(), signal.raise_signal(signal.SIGINT))'


@pytest.fixture(autouse=True)
def in_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def mine(tmp_path: Path) -> Callable[[str], list[str]]:
    """Return a function that writes a custom model, which executes `act` in each training step, and its overrides."""

    def write(act: str) -> list[str]:
        folder = tmp_path / "mine"
        (folder / "model").mkdir(parents=True, exist_ok=True)
        (folder / "mine.py").write_text(MODULE.format(act=act))
        (folder / "model" / "mine.yaml").write_text(OPTIONS)
        return [*TOY[1:], "model=mine", "epochs=1"]

    return write


def state_of_process() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "path": list(sys.path),
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "logger": [(each.level, each.propagate, list(each.handlers)) for each in [logging.getLogger("runner")]],
        "hydra": (GlobalHydra.instance(), GlobalHydra.instance().hydra),
        "torch": (torch.get_rng_state().tolist(), torch.get_default_dtype(), torch.get_num_threads()),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()),
        "random": (random.getstate(), np.random.get_state()[1].tolist()),
        "main": sys.modules["__main__"].__spec__,
        "threads": threading.active_count(),
    }


def test_train_equals_the_command_and_restores_the_process(here: Callable[..., int]) -> None:
    assert here(*TOY, "epochs=2", "name=command") == 0
    (command,) = runner.runs("outputs/command")
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with initialize_config_dir(str(CONF), version_base="1.4"), torch.no_grad():
            before = state_of_process()
            first = runner.train([*TOY, "epochs=2"])
            again = runner.train(TOY, config_dirs=[]) and runner.train([*TOY, "epochs=2"])
            assert state_of_process() == before
            assert compose("config").epochs == 10  # the caller's Hydra state is intact
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert first.path.parent == Path("outputs/run").absolute() and first.path != again.path
    assert first.result["command"] == [sys.executable, "-m", "runner", *TOY, "epochs=2"]
    shas = {run.result["weights_sha256"] for run in (command, first, again)}
    assert len(shas) == 1 and None not in shas
    assert first.state == "finished" and repr(first).endswith(
        f"finished, val/loss {first.metrics['val/loss'][-1]:.4f}>"
    )
    assert runner.open_run("last").path == again.path


def test_wrong_overrides_raise_the_messages_of_the_command(tmp_path: Path) -> None:
    def message(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
        with pytest.raises(runner.InputError) as caught:
            call(*arguments, **named)
        return str(caught.value)

    both = message(runner.train, ["model=convnt", "sed=1"])
    assert "model=convnt: no such model; did you mean convnet?" in both and "sed=1: no such key" in both
    assert "seed=0,1: a sweep needs runner.sweep" in message(runner.compose, ["seed=0,1"])
    assert "use runner.train(['model=mlp', 'seed=1'])" in message(runner.train, "model=mlp seed=1")
    assert "-m is a flag" in message(runner.train, ["-m", "seed=0,1"])
    assert "config_dirs: nowhere is not a directory" in message(runner.compose, [], config_dirs="nowhere")
    assert "task=compare is not a single run" in message(runner.train, ["task=compare"])
    assert "launcher=slurm also runs on other machines" in message(runner.train, ["launcher=slurm"])
    assert "launcher=slurm queues jobs" in message(runner.sweep, ["launcher=slurm", "seed=0,1"])
    assert not list(tmp_path.iterdir())
    config = runner.compose(["model=mlp", "optimizer.lr=0.5"])
    assert (config.batch_size, config.optimizer["lr"]) == (64, 0.5)


def test_calls_within_a_run_or_outside_of_the_main_thread_are_refused(
    mine: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(runner.JobFailed, match=r"runner.sweep starts a new run, but this"):
        runner.train(mine("runner.sweep([])"), config_dirs="mine")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(runner.InputError, match=r"runner.train starts a new run, but this"):
        runner.train(TOY)
    monkeypatch.undo()
    refused: list[BaseException] = []

    def call() -> None:
        try:
            runner.train(TOY)
        except runner.InputError as error:
            refused.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert "must be called in the main thread" in str(refused[0])


def test_calls_import_custom_files_anew_and_raise_the_outcome_of_the_run(mine: Callable[[str], list[str]]) -> None:
    with pytest.raises(runner.JobFailed, match="lost") as failed:
        runner.train(mine("raise ArithmeticError('lost')"), config_dirs="mine")
    assert runner.open_run(failed.value.directory).state == "failed"
    with pytest.raises(runner.Preempted) as stopped:
        runner.train(mine(ONCE), config_dirs="mine")
    saved = runner.open_run(stopped.value.directory)
    assert saved.state == "preempted" and saved.result["step"] < 4
    mine("pass")
    with pytest.raises(runner.InputError, match="the code of its model, data or training has changed"):
        runner.train([f"resume={saved.path}"])
    resumed = runner.train(["resume_force=true", f"resume={saved.path}"])
    assert resumed.path == saved.path and (resumed.state, resumed.result["step"]) == ("finished", 4)
    assert resumed.result["command"][-1] == f"resume={saved.path}"
    mine("raise ArithmeticError")
    inputs = np.linspace(0, 1, 30).reshape(3, 10)
    assert resumed.predict(inputs).shape == (3, 5)  # by the code of the run
    assert str(saved.path / "mine") not in sys.path


def test_sweep_returns_the_runs_of_its_jobs(mine: Callable[[str], list[str]]) -> None:
    words = [*TOY, "epochs=1", "optimizer.lr=0.1,0.01"]
    jobs = runner.sweep(words)
    assert [job.path.name for job in jobs] == ["0-lr-0.1", "1-lr-0.01"]
    assert jobs[0].result["command"] == [sys.executable, "-m", "runner", "-m", *words]
    table = runner.table(jobs)
    assert table["optimizer.lr"].tolist() == [0.1, 0.01] and table["state"].tolist() == ["finished"] * 2
    assert table["val/loss"].tolist() == [job.metrics["val/loss"][-1] for job in jobs]
    directory = jobs[0].path.parent
    resumed = multiprocessing.get_context("fork").Process(target=lock_sweep, args=(directory,))
    resumed.start()
    resumed.join(60)
    assert resumed.exitcode == 0  # another process can lock the sweep

    with pytest.raises(
        runner.JobFailed, match=r"2 of 2 jobs are not done \(0-seed-0 failed, 1-seed-1 failed\)"
    ) as found:
        runner.sweep([*mine("raise ArithmeticError('lost')"), "seed=0,1"], config_dirs="mine")
    assert [run.state for run in runner.runs(found.value.directory)] == ["failed"] * 2
    with pytest.raises(runner.Preempted) as stopped:
        runner.sweep([*mine("signal.raise_signal(signal.SIGTERM)"), "seed=0,1"], config_dirs="mine")
    assert [run.state for run in runner.runs(stopped.value.directory)] == ["preempted"]


def test_model_of_a_sharded_run_is_complete(tmp_path: Path) -> None:
    words = ("model=toy", "data=toy", "data.num_train=64", "data.num_val=16", "epochs=2", "precision=fp64")
    trained = runner.open_run(run_in_world(tmp_path, 2, *words, "parallel=fsdp", "logger=none").path)
    random_state = torch.get_rng_state()
    model = trained.model()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not model.training and {each.dtype for each in model.parameters()} == {torch.float64}
    inputs = torch.randn(4, 10)
    outputs = trained.predict(inputs.numpy())
    assert not outputs.requires_grad and torch.equal(outputs, model(inputs.double()))
    assert torch.equal(trained.predict((inputs,), checkpoint="last"), trained.model("last")(inputs.double()))
    with pytest.raises(runner.InputError, match=r"checkpoint=step_7: .* has no checkpoint step_7, only step_"):
        trained.model("step_7")


SCRIPT = """\
import os, sys
import data
import runner

assert not {"models", "torch", "hydra", "numpy", "omegaconf"} & set(sys.modules), "import runner is light"
run = runner.train(sys.argv[1:])
import multiprocessing
children = [line for line in os.popen(f"ps --no-headers -o args --ppid {os.getpid()}") if "forkserver" in line]
assert sys.modules["data"] is data and data.__file__ == os.path.abspath("data.py") and "models" not in sys.modules
print(run.result["world_size"], run.state, multiprocessing.active_children(), children)
"""


@pytest.mark.thorough
def test_script_without_a_main_guard_and_with_its_own_module_data_starts_the_rank_once(
    commands: Commands, tmp_path: Path
) -> None:
    (tmp_path / "data.py").write_text("")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = commands.finish(commands.start("script.py", *TOY, "epochs=1", "launcher=spawn", "launcher.nproc_per_node=1"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "1 finished [] []"
    assert len(runner.runs(tmp_path / "outputs")) == 1


def test_every_public_name_can_be_imported() -> None:
    assert runner.__all__ == sorted(runner.__all__)
    assert set(runner.__all__) == set(runner._MODULES) <= set(dir(runner))
    assert all(callable(getattr(runner, name)) for name in runner.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        runner.trian  # type: ignore[attr-defined]  # noqa: B018
