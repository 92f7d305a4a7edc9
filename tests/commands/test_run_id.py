"""`run_id=`: the same command starts a run or a sweep, resumes it, and finds it finished."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Commands, wait_until

import runner
from runner.records.attempts import read_attempts
from runner.records.ledger import read_ledger

SMALL = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=200", "logger=none", "threads=1")
COMMAND = (*SMALL, "run_id=first", "max_steps=4")
LONG = (*SMALL, "epochs=1000", "max_steps=2000", "checkpoint.every_steps=20")


def result(run: Path) -> dict[str, object]:
    return dict(json.loads((run / "result.json").read_text()))


def times(run: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in run.rglob("*")}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "outputs" / "run" / "first"


def test_a_finished_run_is_left_alone(run: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert here(*COMMAND) == 0
    before = times(run)
    capsys.readouterr()
    assert here(*COMMAND, "parallel=allreduce", "log_every=2") == 0  # keys that may change freely
    assert capsys.readouterr().out == f"run_id=first is finished: {run}\n"
    assert times(run) == before


def test_a_finished_run_is_returned_to_a_caller(run: Path, here: Callable[..., int]) -> None:
    assert here(*COMMAND) == 0
    before = times(run)
    for launcher in ("env", "spawn"):
        found = runner.train([*COMMAND, f"launcher={launcher}"])
        assert found.path == run
    assert times(run) == before


def test_all_ranks_find_that_the_run_is_finished(commands: Commands, run: Path) -> None:
    ranks = (*COMMAND, "parallel=ddp", "backend=gloo")
    assert [done.returncode for done in commands.forked_world(2, *ranks)] == [0, 0]
    before = times(run)
    repeated = commands.forked_world(2, *ranks)
    assert [(done.returncode, done.stdout) for done in repeated] == [(0, f"run_id=first is finished: {run}\n"), (0, "")]
    spawned = commands.forked(*COMMAND, "parallel=ddp", "launcher=spawn")
    assert (spawned.returncode, spawned.stdout) == (0, f"run_id=first is finished: {run}\n")
    assert times(run) == before


@pytest.mark.fault("kill -9 of a command that `run_id=` lets one repeat", outcome="survived")
def test_a_killed_run_is_resumed_by_its_own_command(commands: Commands, run: Path) -> None:
    words = (*SMALL, "epochs=1000", "max_steps=300", "checkpoint.every_steps=20")
    assert commands.forked(*words, "run_id=whole").returncode == 0
    process = commands.fork(*words, "run_id=first")
    wait_until(lambda: any((run / "checkpoints").glob("step_[1-9]*0")), process)
    commands.kill(process)
    assert result(run)["state"] == "running"
    assert commands.forked(*words, "run_id=first").returncode == 0
    assert result(run)["weights_sha256"] == result(run.with_name("whole"))["weights_sha256"]
    assert [attempt.number for attempt in read_attempts(run)] == [1, 2]
    assert {path.name for path in run.parent.iterdir()} == {"whole", "first"}


@pytest.mark.fault("two commands with the same `run_id=` at the same moment", outcome="refused")
def test_of_two_simultaneous_commands_one_runs(commands: Commands, run: Path) -> None:
    words = (*LONG, "run_id=first")
    both = [commands.fork(*words) for _ in range(2)]
    wait_until(lambda: any(process.poll() is not None for process in both))
    first, second = sorted(both, key=lambda process: process.poll() is None)
    done = commands.finish(first)
    assert done.returncode == 2 and f"{run} has been locked by process {second.pid} on" in done.stderr
    wait_until(lambda: (run / "checkpoints" / "step_20").exists(), second)
    assert commands.forked(*words).returncode == 2  # also one that finds a recorded run
    second.terminate()
    assert commands.finish(second).returncode == 143
    assert [attempt.state for attempt in read_attempts(run)] == ["preempted"]


def test_a_run_with_another_configuration_is_refused(
    run: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(*COMMAND) == 0
    before = times(run)
    for words, message in {
        ("optimizer.lr=0.5", "seed=1"): "optimizer.lr is 0.5, and was 0.05, seed is 1, and was 0; type another run_id",
        ("max_steps=9",): "max_steps is 9, and was 4; type another run_id, or add resume_force=true to resume it",
        ("model=convnet",): "model is ConvNet, and was MLP",
    }.items():
        capsys.readouterr()
        assert here(*[word for word in COMMAND if not word.startswith(words[0].partition("=")[0])], *words) == 2
        error = capsys.readouterr().err
        assert "run_id=first names a run with another configuration: " in error and message in error
        assert len(error.splitlines()) <= 3
    assert times(run) == before
    forced = (*SMALL, "run_id=first", "max_steps=6")
    assert here(*forced, "resume_force=true") == 0 and result(run)["step"] == 6
    assert "resume_force" not in (run / "overrides.yaml").read_text()
    assert here(*forced) == 0  # the run has these values now
    assert f"run_id=first is finished: {run}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run_id=a/b/c",), "run_id=a/b must be 1 to 64 letters"),
        (("run_id=a/b",), "run_id=a/b must name a job of a sweep, but "),
        (("run_id=a,b",), "run_id=a,b: a run or a sweep has one run_id"),
        (("-m", "run_id=a,b", "seed=1,2"), "run_id=a,b: a run or a sweep has one run_id"),
        (("run_id=first", "task=plan"), "run_id=first has no effect on task=plan"),
        (("-m", "run_id=first", "seed=1,2"), "run_id=first is a run; leave out -m"),
        (("run_id=grid",), "run_id=grid is a sweep; add -m"),
        (("resume=outputs/run/first", "run_id=other"), "run_id=other has no effect on resume=outputs/run/first"),
    ],
)
def test_a_wrong_run_id_is_refused(
    words: tuple[str, ...], message: str, run: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    run.mkdir(parents=True)
    (run / "overrides.yaml").write_text("[]\n")
    run.with_name("grid").mkdir()
    (run.with_name("grid") / "ledger.jsonl").write_text("")
    assert here(*words) == 2
    assert message in capsys.readouterr().err


def test_a_task_that_reads_the_run_has_a_directory_of_its_own(run: Path, here: Callable[..., int]) -> None:
    assert here(*COMMAND) == 0
    before = times(run)
    assert here("task=evaluate", f"run={run}") == 0
    fork = (f"fork={run}", "max_steps=40", "checkpoint.keep=1", "run_id=longer")  # drops the checkpoint of its start
    assert here(*fork) == 0
    assert here(*fork) == 0
    assert times(run) == before
    longer = run.with_name("longer")
    assert len([*run.parent.iterdir()]) == 3 and result(longer)["step"] == 40
    (longer / "result.json").write_text(json.dumps({**result(longer), "state": "preempted"}))
    assert here(*fork) == 0 and len([*read_attempts(longer)]) == 2


@pytest.mark.fault("kill -9 of a sweep that `run_id=` lets one repeat", outcome="survived")
def test_a_sweep_is_resumed_by_its_own_command(commands: Commands, tmp_path: Path) -> None:
    words = ("-m", *SMALL, "run_id=grid", "max_steps=3", "seed=1,2,3")
    sweep = tmp_path / "outputs" / "run" / "grid"
    process = commands.fork(*words)
    wait_until(lambda: (sweep / "ledger.jsonl").exists() and bool(read_ledger(sweep)[0].metrics), process)
    commands.kill(process)
    for _ in range(2):
        assert commands.forked(*words).returncode == 0
    jobs = read_ledger(sweep)
    assert [(job.label, job.state) for job in jobs] == [(f"{n}-seed-{n + 1}", "finished") for n in range(3)]
    assert jobs[0].num_starts == 1 and [path.name for path in sweep.parent.iterdir()] == ["grid"]
    assert "run_id" not in (jobs[0].directory / "overrides.yaml").read_text()
    assert commands.forked(*(word.replace("1,2,3", "1,2,3,4") for word in words)).returncode == 0
    assert len(read_ledger(sweep)) == 4
    assert commands.forked(*words, "optimizer.lr=0.5").returncode == 2
