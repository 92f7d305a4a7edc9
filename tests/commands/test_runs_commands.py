"""`python -m runner runs ...`: lists, labels, stops and deletes runs."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Commands, newest_step, wait_until
from many_runs import SMALL, make_run, make_sweep, owned

import runner
from runner.errors import InputError
from runner.records.ledger import read_ledger, write_lines, write_state

RUN, SWEEP = "run/20260101-000000", "run/sweep-20260101-000000"


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    make_sweep(tmp_path / "outputs" / SWEEP, "finished", "failed", age_s=7200)
    make_run(tmp_path / "outputs" / RUN, "optimizer.lr=0.5", error="Traceback:\nno: really", command=["python", "x"])
    return tmp_path / "outputs"


@pytest.fixture
def runs(here: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a command and returns its status, its output and its messages."""

    def run_command(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = here("runs", *args)
        return status, *capsys.readouterr()

    return run_command


Runs = Callable[..., tuple[int, str, str]]


def test_the_command_imports_neither_torch_nor_numpy(commands: Commands, outputs: Path) -> None:
    code = "import sys; from runner.cli import main; status = main(); assert not {'torch', 'numpy'} & {*sys.modules}"
    done = commands.finish(commands.start("-c", f"{code}; sys.exit(status)", "runs", "list"))
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [[RUN, "finished"], [SWEEP, "failed"]]


def test_rows_are_limited_filtered_and_printed_as_json(runs: Runs, outputs: Path) -> None:
    status, out, err = runs("list", "--limit", "1")
    assert status == 0 and out.splitlines()[1].split()[0] == RUN and len(out.splitlines()) == 2
    assert err == "1 more; --limit 0 lists all\n"
    status, out, err = runs("list", "outputs", "--jobs", "--json", "--state", "failed", "--where", "optimizer.lr=0.2")
    (row,) = json.loads(out)
    assert (
        row.items() >= {"path": f"{outputs}/{SWEEP}/1-lr-0.2", "kind": "run", "state": "failed", "jobs": None}.items()
    )
    assert json.loads(runs("list", "--json", "--name", "sweep")[1])[0]["jobs"] == {"finished": 1, "failed": 1}
    assert runs("list", "--state", "lost") == (0, "", "outputs contains no such run\n")
    assert json.loads(runs("list", "--json", "--state", "lost")[1]) == []


def test_a_run_is_tagged_and_archived(runs: Runs, outputs: Path) -> None:
    assert runs("tag", "2026", "paper", "b.2") == (0, "", "")
    out = runs("show", "last")[1]
    assert "paper b.2" in out and "best 0.9000, last 0.8000" in out and "no: really" in out
    run = runner.open_run(outputs / RUN)
    assert run.tags == ["paper", "b.2"]
    assert "paper b.2" in runs("list", "--tag", "paper")[1] and "sweep" not in runs("list", "--tag", "paper")[1]
    assert runs("tag", "last", "paper", "--remove")[0] == 0 and run.tags == ["b.2"]
    assert runs("archive", "sweep", "last")[0] == 0
    assert runs("list")[1:] == ("", "outputs contains no such run\n")
    assert "(archived)" in runs("list", "--archived")[1]
    assert runs("archive", "--restore", "sweep", "last")[0] == 0
    assert len(runs("list")[1].splitlines()) == 3
    out = runs("show", "sweep")[1]
    assert "failed 1/2" in out and "1-lr-0.2" in out


def test_a_run_is_deleted_after_the_question(runs: Runs, outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, remains in {"": True, "n": True, "y": False}.items():
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        status, out, _ = runs("delete", "2026")
        assert status == 0 and RUN in out and ("nothing was deleted" in out) == remains
        assert (outputs / RUN).exists() == remains
    assert runs("delete", "--yes", "sweep")[0] == 0
    assert list((outputs / "run").iterdir()) == []


@pytest.mark.parametrize("yes", [["--yes"], []])
def test_a_run_in_progress_is_not_deleted(runs: Runs, outputs: Path, yes: list[str]) -> None:
    """Nor is a sweep of which a job was resumed as a single run."""
    before = sorted(outputs.rglob("*"))
    with owned(outputs / RUN) as (process,):
        for names in (["2026"], ["sweep", "2026"]):
            status, out, err = runs("delete", *yes, *names)
            assert (status, out) == (2, "")
            assert f"{outputs}/{RUN} is in progress (process {process.pid} on" in err and "type runs stop" in err
    with owned(outputs / SWEEP / "1-lr-0.2"):
        assert runs("delete", *yes, "sweep")[0] == 2
    with owned(outputs / SWEEP):
        assert runs("delete", *yes, "sweep")[0] == 2
    assert [path for path in before if not path.exists()] == []


def test_forks_of_a_deleted_run_are_named(runs: Runs, outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(outputs / "longer" / "20260102-000000", parent=str(outputs / RUN))
    make_run(outputs / "other" / "20260103-000000", parent=f"{outputs / RUN}1")
    make_run(outputs / "other" / "20260104-000000", parent=str(outputs / SWEEP / "0-lr-0.1"))
    monkeypatch.setattr("builtins.input", lambda question: "n")
    for name, fork in {RUN: "longer/20260102-000000", SWEEP: "other/20260104-000000"}.items():
        status, out, _ = runs("delete", name)
        named = f"runs started from {Path(name).name}, and keep a copy of its checkpoint: {fork}"
        assert status == 0 and named in out.splitlines() and "nothing was deleted" in out
    assert "started from" not in runs("delete", "longer")[1]


def test_a_comparison_in_progress_is_not_deleted(runs: Runs, outputs: Path) -> None:
    """Nor is one of its runs, and nor is the comparison while only a run of it is in progress."""
    cell = make_run(outputs / RUN / "cells" / "ddp-2")
    for locked in (outputs / RUN, cell):
        with owned(locked):
            for path in (outputs / RUN, cell):
                status, _, err = runs("delete", "--yes", str(path))
                assert status == 2 and f"{locked} is in progress" in err
    assert runs("delete", "--yes", str(cell))[0] == 0 and (outputs / RUN).exists()


def test_a_run_in_the_queue_of_slurm_is_not_deleted(
    runs: Runs, outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (outputs / RUN / "slurm").mkdir()
    os.mkfifo(outputs / RUN / "slurm" / "job")
    err = runs("delete", "--yes", RUN)[2]
    assert "slurm/job cannot be read (" in err and "it is a link or another special file" in err
    (outputs / RUN / "slurm" / "job").unlink()
    (outputs / RUN / "slurm" / "job").write_text("7\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "job 7 is in Slurm's queue, but squeue is missing here" in runs("delete", "--yes", RUN)[2]
    squeue = tmp_path / "squeue"
    for queued in ("7", ""):
        squeue.write_text(f"#!/bin/sh\necho {queued}\n")
        squeue.chmod(0o755)
        status, _, err = runs("delete", "--yes", RUN)
        assert (status, "may be in Slurm's queue (job 7); cancel it first: scancel 7" in err) == (
            (2, True) if queued else (0, False)
        )
    assert not (outputs / RUN).exists()


def test_the_functions_do_what_the_commands_do(outputs: Path) -> None:
    run = runner.open_run(outputs / RUN)
    runner.tag(run, "paper", "b.2")
    runner.tag("2026", "paper", remove=True, outputs=outputs)
    runner.archive(run)
    shown = runner.show("last", outputs)
    assert (shown["path"], shown["state"], shown["best"], shown["result"]["model"]) == (
        str(run.path),
        "finished",
        0.9,
        "mlp",
    )
    assert (shown["tags"], shown["archived"]) == (["b.2"], True)
    runner.archive(run, restore=True)
    assert not runner.show(run)["archived"]
    with pytest.raises(InputError, match="is not in progress"):
        runner.stop(run)
    with owned(run.path) as (process,):
        with pytest.raises(InputError, match="is in progress"):
            runner.delete(run)
        assert runner.stop(run) == process.pid
        process.join(120)
    runner.delete(run)
    runner.delete("sweep", outputs)
    assert list((outputs / "run").iterdir()) == []
    with pytest.raises(InputError, match="is no run or sweep in"):
        runner.show(run, outputs)


def test_a_run_that_starts_during_the_question_is_not_deleted(
    runs: Runs, outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with owned(outputs / RUN):
        monkeypatch.setattr("runner.api.manage.check_deletable", lambda *args, **kwargs: None)
        status, _, err = runs("delete", "--yes", "2026")
        assert status == 2 and "has been locked by process" in err and (outputs / RUN / "result.json").exists()


def test_a_run_is_stopped_by_the_signal_that_saves(commands: Commands, runs: Runs, tmp_path: Path) -> None:
    process = commands.fork(*SMALL, "max_steps=1000000", "epochs=1000000")
    wait_until(lambda: newest_step(tmp_path) > 0, process)
    assert "running" in runs("list")[1] and "0." in runs("list")[1]
    status, out, _ = runs("stop", "last")
    assert status == 0 and out.startswith(f"sent SIGTERM to process {process.pid}: ")
    assert commands.finish(process).returncode == 143
    assert runner.show("last", tmp_path / "outputs")["result"]["num_steps"] == 1_000_000  # for the time left
    status, _, err = runs("stop", "last")
    assert status == 2 and "is not in progress (preempted)" in err


def test_a_job_is_stopped_without_its_sweep(runs: Runs, outputs: Path) -> None:
    sweep = make_sweep(outputs / "run" / "sweep-20260101-000009", "running", slots=[0])
    with owned(sweep, sweep / "0-lr-0.1") as (_, job):
        assert runs("stop", str(sweep / "0-lr-0.1"))[0] == 0
        job.join(120)
        assert job.exitcode == -signal.SIGTERM
        assert read_ledger(sweep)[0].stop_requested
        with owned(sweep / "0-lr-0.1"):
            status, _, err = runs("stop", str(sweep / "0-lr-0.1"))
            assert status == 2 and f"is stopping already; runs stop {sweep} stops its sweep" in err


def test_a_job_that_has_not_started_is_stopped(runs: Runs, outputs: Path) -> None:
    """Also in a resumed sweep, in which an earlier failure is due again."""
    sweep = make_sweep(outputs / "run" / "sweep-20260101-000009", "finished", "failed", "waiting", "waiting")
    for number, state in {0: "finished", 1: "failed", 3: "waiting"}.items():  # no process runs the sweep
        assert f"is not in progress ({state})" in runs("stop", f"{sweep}/{number}")[2]
    write_state(sweep, 2, "queued")
    assert "is not in progress (queued); cancel its job in the queue" in runs("stop", f"{sweep}/2")[2]
    with owned(sweep):
        assert "is not in progress (failed)" in runs("stop", f"{sweep}/1")[2]
        status, out, err = runs("stop", f"{sweep.name}/3")
        assert (status, err) == (0, "")
        assert out == f"{sweep}/3-lr-0.4 has not started, and is not going to: -m resume={sweep} runs it\n"
        assert f"is stopping already; runs stop {sweep} stops its sweep" in runs("stop", f"{sweep}/3")[2]
        assert [job.stop_requested for job in read_ledger(sweep)] == [False, False, False, True]
        write_lines(sweep, {"sweep": {"typed": [], "config_dirs": [], "command": [], "shared": {}}, "at": time.time()})
        assert "is not in progress (finished)" in runs("stop", f"{sweep}/0")[2]
        assert runner.stop(sweep / "1-lr-0.2") is None
        assert [job.stop_requested for job in read_ledger(sweep)] == [False, True, False, False]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_process_that_another_user_names_is_not_stopped(runs: Runs, outputs: Path) -> None:
    with owned(outputs / RUN) as (process,):
        os.chown(outputs / RUN / "holder-1.json", 54321, -1)
        status, _, err = runs("stop", "2026")
        assert status == 2 and f"its lock file and process {process.pid} belong to different users" in err
        assert process.is_alive()


def test_a_run_on_another_machine_is_not_stopped(runs: Runs, outputs: Path) -> None:
    owner = {"number": 1, "hosts": ["elsewhere"], "pid": 1, "machine": "another"}
    (outputs / RUN / "holder-1.json").write_text(json.dumps(owner))
    status, _, err = runs("stop", "2026")
    assert status == 2 and "runs on elsewhere; log in there and type: python -m runner runs stop /" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    {
        "runs lst": "runs lst: no such command; did you mean runs list? (list, show, ",
        "runs frobnicate": "runs frobnicate: no such command; choose among: list, show, ",
        "run list": "run list: not KEY=VALUE; did you mean runs list?",
        "run stopp last": "run stopp last: not KEY=VALUE; did you mean runs stop?",
        "list": "list: not KEY=VALUE; did you mean runs list?",
        "delet x --yes": "did you mean runs delete?",
        "runs show nowhere": "nowhere is no run or sweep in",
        "runs list nowhere": "runs list nowhere: no such directory",
        "runs list --state gone": "runs list: argument --state: invalid choice: 'gone'",
        "runs list --wher x=1": "runs: unrecognized arguments: --wher; --help describes the arguments",
        "runs tag 2026": "runs tag: the following arguments are required: WORD",
        "runs tag 2026 tag,two": "tag 'tag,two' must consist of letters, digits",
        "runs tag 2026 x --remove": "has no tag x",
        "runs delete 2026 nowhere": "nowhere is no run or sweep in",
        "runs delete 2026": "runs delete: the question has no answer without a terminal; add --yes",
        f"runs delete --yes {SWEEP}/0": "is a job, which the ledger of its sweep names; delete the sweep",
        f"runs archive {SWEEP}/0": "is a job; archive its sweep",
        "runs stop sweep": "is not in progress (failed)",
    }.items(),
)
def test_wrong_input_is_one_line_and_changes_nothing(
    arguments: str,
    message: str,
    here: Callable[..., int],
    outputs: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_terminal(question: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", no_terminal)
    before = {path: path.read_bytes() if path.is_file() else b"" for path in outputs.rglob("*")}
    assert here(*arguments.split()) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert before == {path: path.read_bytes() if path.is_file() else b"" for path in outputs.rglob("*")}


def test_help_describes_each_command(here: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert here("runs", "--help") == here("runs") == 0
    assert capsys.readouterr().out.count("send the signal that saves a checkpoint") == 2
    assert here("runs", "list", "--help") == 0
    assert "only runs with this recorded value" in capsys.readouterr().out
    assert here("--help") == 0 and "python -m runner runs list" in capsys.readouterr().out
