"""Commands as users type them: their files, their output and their exit status."""

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml
from commands import Commands, is_loopback, listening, wait_until
from many_runs import make_run, make_sweep
from worlds import Run, only_run, run

from runner.config.schema import KEYS
from runner.records.run_record import read_run

# 32 steps of two samples: enough for the throughput, which is measured after the first 20
STEPS = ("data=toy", "data.num_train=64", "data.num_val=16", "batch_size=2", "epochs=1")
TINY = ("model=toy", *STEPS)
FILES = {"config.yaml", "overrides.yaml", "result.json", "metrics.jsonl", "log.txt", "attempts.jsonl"}
FILES |= {
    f"checkpoints/step_32/{name}" for name in ("manifest.json", "progress.json", "rank_0.safetensors", "state.json")
}
# A custom model: the toy with additional actions in its training steps.
MODULE = """\
import os
import signal
import time

from runner.shipped.models.toy import Toy


class Model(Toy):
    def __init__(self, sample_shape, num_outputs, hidden=10, fails=True):
        super().__init__(sample_shape, num_outputs, hidden)
        self.fails = fails
        self.calls = 0

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        self.calls = state

    def forward(self, samples):
        self.calls += self.training
        if self.training:
            self.act(os.environ.get("RANK", "1"))
        return super().forward(samples)

    def act(self, rank):
"""
RAISES = """\
        if self.calls == 3 and self.fails and rank == "1":
            raise ArithmeticError("lost on rank 1")
"""
WAITS = """\
        if self.calls == 5:
            handler = signal.getsignal(signal.SIGTERM)
            if callable(handler):
                signal.signal(signal.SIGTERM, lambda *args: (handler(*args), open(f"received-{rank}", "w").close()))
            open(f"ready-{rank}", "w").close()
            while not os.path.exists("go"):
                time.sleep(0.02)
"""
FORKS = """\
        if self.calls == 3 and os.fork() == 0:
            os.closerange(0, 3)
            time.sleep(600)
            os._exit(0)
"""
OPTIONS = "_target_: mine.Model\nsample_shape: ${data.sample_shape}\nnum_outputs: ${data.num_outputs}\nfails: true\n"


@pytest.fixture
def mine(tmp_path: Path) -> Callable[[str], tuple[str, ...]]:
    """Return a function that writes the model to a custom directory and returns the overrides that choose it."""

    def write(act: str) -> tuple[str, ...]:
        (tmp_path / "mine" / "model").mkdir(parents=True)
        (tmp_path / "mine" / "mine.py").write_text(MODULE + act)
        (tmp_path / "mine" / "model" / "mine.yaml").write_text(OPTIONS)
        return ("--config-dir", "mine", *STEPS, "model=mine", "logger=none")

    return write


def test_a_run_writes_its_directory_and_nothing_else(commands: Commands, tmp_path: Path) -> None:
    done = commands.runner(*TINY)
    assert (done.returncode, done.stderr) == (0, "")
    one = only_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    events = [name for name in files(one.path) if name.startswith("events.out.tfevents.")]
    assert len(events) == 1 and files(one.path) - set(events) == FILES
    assert done.stdout == (one.path / "log.txt").read_text()
    assert f"run directory: {one.path}\n" in done.stdout

    assert read_run(one.path).as_result() == one.result  # all fields, with values of their types
    assert None not in [one.result[name] for name in ("monitor", "best", "num_steps", "samples_per_second", "seconds")]
    assert (one.result["state"], one.result["step"], one.result["epoch"]) == ("finished", 32, 1)
    assert one.result["command"][-len(TINY) - 2 :] == ["-m", "runner", *TINY]
    assert one.result["metrics"].keys() == {"train/loss", "val/loss"}
    assert re.fullmatch("[0-9a-f]{64}", one.result["weights_sha256"])
    assert one.result["git"].keys() == {"commit", "dirty"} and "torch" in one.result["versions"]
    assert yaml.safe_load((one.path / "overrides.yaml").read_text()) == list(TINY)
    recorded = yaml.safe_load((one.path / "config.yaml").read_text())
    assert recorded.keys() == set(KEYS) and recorded["model"]["sample_shape"] == [10]
    assert sorted(one.losses) == list(range(1, 33))
    evaluation = {key: value for key, value in one.lines[-1].items() if key != "val_checksums"}
    assert evaluation == {"step": 32, "epoch": 1, "val/loss": one.result["metrics"]["val/loss"]}


@pytest.mark.thorough
def test_spawn_uses_loopback_leaves_no_process_and_returns_metrics(
    commands: Commands, tmp_path: Path, mine: Callable[..., Sequence[str]]
) -> None:
    process = commands.fork("-m", *mine(WAITS), "parallel=ddp", "launcher=spawn", "seed=0,1")
    wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)), process)
    assert len(commands.living(process)) >= 3
    addresses = listening(commands.living(process))
    assert addresses and all(map(is_loopback, addresses)), addresses
    (tmp_path / "go").touch()
    done = commands.finish(process)
    assert (done.returncode, done.stderr) == (0, "")
    wait_until(lambda: commands.living(process) == [])  # multiprocessing's servers exit after it
    # The table contains what the launcher returned, result.json what rank 0 computed.
    rows = table(done.stdout)
    jobs = sweep_jobs(tmp_path)
    assert len(jobs) == len(rows) == 2
    for path in jobs:
        assert files(path) == FILES
        result = Run(path).result
        assert result["world_size"] == 2
        assert rows[path.name] == ["finished", f"{result['metrics']['val/loss']:.4f}"]


@pytest.mark.thorough
@pytest.mark.fault("a model that forks a process that does not exit", outcome="went_on")
def test_a_forked_process_does_not_keep_the_fork_server_running(
    commands: Commands, mine: Callable[..., Sequence[str]]
) -> None:
    process = commands.start("-m", "runner", *mine(FORKS), "launcher=spawn", "launcher.nproc_per_node=1")
    assert process.wait(300) == 0  # multiprocessing's resource tracker exits after the forked process

    def servers() -> list[int]:
        return [pid for pid in commands.living(process) if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    assert len(commands.living(process)) > 0
    wait_until(lambda: len(servers()) <= 1)  # a forked process has the command line of the server
    commands.kill(process)


@pytest.mark.fault("one rank raises", outcome="refused")
@pytest.mark.parametrize("launched", ["forked", pytest.param("spawn", marks=pytest.mark.soak)])
def test_a_rank_that_raises_fails_the_run_with_its_traceback(
    launched: str, commands: Commands, tmp_path: Path, mine: Callable[..., Sequence[str]]
) -> None:
    args = (*mine(RAISES), "parallel=ddp")
    spawn = launched == "spawn"
    ended = [commands.runner(*args, "launcher=spawn")] if spawn else commands.forked_world(2, *args)
    output = "".join(done.stdout + done.stderr for done in ended)
    assert {done.returncode for done in ended} == {1}
    assert output.count("ArithmeticError: lost on rank 1\n") == 1
    assert output.count("in act") == output.count("error: rank") == 1  # and no error of rank 0, which lost a peer
    result = only_run(tmp_path).result
    assert (result["state"], result["step"]) == ("failed", 2)
    assert result["error"].startswith("rank 1 on ") and result["error"].endswith("lost on rank 1\n")


@pytest.mark.fault("SIGTERM to the command", outcome="survived")
def test_a_preempted_run_resumes_to_the_same_weights(
    commands: Commands, tmp_path: Path, mine: Callable[..., Sequence[str]]
) -> None:
    whole = run(tmp_path / "whole", 1, *TINY, "backend=gloo", "logger=none")

    process = commands.fork(*mine(WAITS), "loader.num_workers=1")
    wait_until((tmp_path / "ready-1").exists, process)
    assert only_run(tmp_path).result["state"] == "running"
    assert listening(commands.living(process)) == []
    process.send_signal(signal.SIGTERM)
    wait_until((tmp_path / "received-1").exists, process)
    (tmp_path / "go").touch()
    stopped = commands.finish(process)
    assert stopped.returncode == 143, stopped.stderr
    one = only_run(tmp_path)
    assert one.result["state"] == "preempted"
    assert 5 <= one.result["step"] < 32 and one.result["epoch"] == 0
    assert f"continue with resume={one.path}\n" in stopped.stdout

    resumed = commands.forked("resume=last")
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert only_run(tmp_path).path == one.path
    assert one.result["state"] == "finished"
    assert one.result["weights_sha256"] == whole.result["weights_sha256"]
    assert one.losses == whole.losses


def in_one_process(commands: Commands, *args: str) -> CompletedProcess[str]:
    return commands.forked(*args)


def on_two_ranks(commands: Commands, *args: str) -> CompletedProcess[str]:
    return commands.forked_world(2, *args, "parallel=ddp")[0]


@pytest.mark.parametrize("launched", [in_one_process, pytest.param(on_two_ranks, marks=pytest.mark.soak)])
def test_a_sweep_runs_all_of_its_jobs(
    launched: Callable[..., CompletedProcess[str]], commands: Commands, tmp_path: Path
) -> None:
    done = launched(commands, "-m", *STEPS, "logger=none", "name=grid", "model=toy,linear", "optimizer.lr=0.1,0.01")
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = sweep_jobs(tmp_path, "grid")
    models = ("toy", "linear")
    labels = [f"{n}-model-{m}_lr-{lr}" for n, (m, lr) in enumerate((m, lr) for m in models for lr in ("0.1", "0.01"))]
    assert [path.name for path in jobs] == labels
    for path, model in zip(jobs, ("toy", "toy", "linear", "linear"), strict=True):
        assert files(path) == FILES
        result = Run(path).result
        assert (result["state"], result["model"], result["step"]) == ("finished", model, 32)
    assert len({Run(path).result["weights_sha256"] for path in jobs}) == 4
    assert table(done.stdout).keys() == set(labels)
    assert done.stdout.endswith(f"4 of 4 jobs finished: {jobs[0].parent}\n")


@pytest.mark.parametrize("launched", [in_one_process, pytest.param(on_two_ranks, marks=pytest.mark.soak)])
def test_a_job_that_raises_does_not_affect_the_next_jobs(
    launched: Callable[..., CompletedProcess[str]],
    commands: Commands,
    tmp_path: Path,
    mine: Callable[..., Sequence[str]],
) -> None:
    done = launched(commands, "-m", *mine(RAISES), "model.fails=true,false", "seed=0,1")
    assert done.returncode == 1
    states = [Run(path).result["state"] for path in sweep_jobs(tmp_path)]
    assert states == ["failed", "failed", "finished", "finished"]
    rows = table(done.stdout)
    assert [cells[0] for cells in rows.values()] == states
    assert rows["0-fails-True_seed-0"][1:] == ["ArithmeticError:", "lost", "on", "rank", "1"]
    assert "2 of 4 jobs finished" in done.stdout


@pytest.mark.parametrize("args", [("--cfg", "job"), ("--help", "all")], ids=lambda args: args[0])
def test_help_and_cfg_do_not_import_torch(args: tuple[str, ...], commands: Commands, tmp_path: Path) -> None:
    done = commands.finish(commands.start("-X", "importtime", "-m", "runner", *args))
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "hydra" in imported  # the list is one
    assert not imported & {"torch", "torchvision", "numpy", "sklearn", "optuna", "tensorboard"}
    assert "convnet" in done.stdout.lower()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("env", [{}, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("model=convnt", "model=convnt: no such model; did you mean convnet? ("),
        ("optimizer.lrr=1", "optimizer.lrr=1: no such key; did you mean optimizer.lr?"),
        ("epochs=0", "epochs=0 must be at least 1"),
        ("-m model=toy,convnt", "model=convnt: no such model; did you mean convnet? ("),
        ("run=nowhere task=evaluate", "run=nowhere is no directory"),
    ],
)
def test_mistyped_names_are_refused_before_torch_is_imported(
    args: str, message: str, env: Mapping[str, str], commands: Commands
) -> None:
    """Rank 0 of a world prints the message before it imports torch to meet the others."""
    code = """\
import sys
sys.modules["torch"] = None  # so that an import fails
from runner.cli import main
sys.exit(main())
"""
    done = commands.finish(commands.start("-c", code, *args.split(), env=env))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1


def test_cfg_shows_what_a_run_would_use_and_refuses_what_a_run_would_refuse(commands: Commands) -> None:
    done = commands.forked("--cfg", "job", "--resolve", "model=toy", "data=toy", "optimizer.lr=0.3")
    shown = yaml.safe_load(done.stdout)
    assert shown.keys() == set(KEYS)
    assert shown["model"]["sample_shape"] == [10] and shown["optimizer"]["lr"] == 0.3
    done = commands.forked("--cfg", "job", "model=convnt")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "model=convnt: no such model; did you mean convnet? (" + done.stderr.partition("(")[2]


@pytest.fixture
def complete(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], set[str]]:
    """Return a function that queries the completions of a line as the function of `-sc install=bash` does."""

    def query(line: str) -> set[str]:
        monkeypatch.setenv("COMP_LINE", line)
        monkeypatch.setenv("COMP_POINT", str(len(line)))
        done = commands.forked("-sc", "query=bash")
        assert (done.returncode, done.stderr) == (0, "")
        return set(done.stdout.split())

    return query


def test_the_shell_completes_groups_options_and_keys(complete: Callable[[str], set[str]]) -> None:
    assert {"model=toy", "model=convnet"} <= complete("runner model=")
    assert complete("runner optimizer.l") == {"optimizer.lr="}


def test_the_shell_completes_the_commands_for_runs(complete: Callable[[str], set[str]], tmp_path: Path) -> None:
    sweep = "run/sweep-20260101-000000"
    make_sweep(tmp_path / "outputs" / sweep, "finished")
    make_run(tmp_path / "elsewhere" / "other" / "20260102-000000")
    assert complete("runner runs ") == {"list", "show", "pull", "tag", "archive", "stop", "delete"}
    for line, expected in {
        "runner runs st": {"stop"},
        "runner runs tag --r": {"--remove"},
        "runner runs list --state f": {"failed", "finished"},
        "runner runs list ": set(),  # a directory, which the shell completes
        "runner runs tag --remove ": {"last", sweep},
        f"runner runs stop {sweep}/": {f"{sweep}/0-lr-0.1"},
        "runner runs delete --outputs elsewhere o": {"other/20260102-000000"},
    }.items():
        assert complete(line) == expected, line


def sweep_jobs(folder: Path, name: str = "run") -> list[Path]:
    (sweep,) = (folder / "outputs" / name).iterdir()
    assert sweep.name.startswith("sweep-") and (sweep / "ledger.jsonl").is_file()
    return sorted(path for path in sweep.glob("[0-9]*") if path.is_dir())


def table(output: str) -> dict[str, list[str]]:
    """Return the rows of a sweep's table by the job's label, without empty cells."""
    lines = output[output.index("\njob  ") :].strip().splitlines()[1:]
    return {cells[0]: cells[1:] for cells in map(str.split, lines[: lines.index("")])}


def files(folder: Path) -> set[str]:
    # A clone with uncommitted changes has a git.diff as well.
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return found - {"git.diff"}
