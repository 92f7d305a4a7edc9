"""`python -m runner runs ...`: lists, labels, stops and deletes runs."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Commands, newest_step, wait_until
from many_runs import SMALL, make_run, make_sweep, owned

import runner
from runner.records.ledger import read_ledger

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


def test_a_run_is_tagged_noted_and_archived(runs: Runs, outputs: Path) -> None:
    assert runs("tag", "2026", "paper", "b.2") == runs("note", "last", "the baseline") == (0, "", "")
    out = runs("show", "last")[1]
    assert "paper b.2" in out and "the baseline" in out and "best 0.9000, last 0.8000" in out and "no: really" in out
    run = runner.open_run(outputs / RUN)
    assert (run.tags, run.note) == (["paper", "b.2"], "the baseline")
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


def test_a_run_that_starts_during_the_question_is_not_deleted(
    runs: Runs, outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with owned(outputs / RUN):
        monkeypatch.setattr("runner.api.run_commands._check_idle", lambda *args, **kwargs: None)
        status, _, err = runs("delete", "--yes", "2026")
        assert status == 2 and "has been locked by process" in err and (outputs / RUN / "result.json").exists()


def test_a_run_is_stopped_by_the_signal_that_saves(commands: Commands, runs: Runs, tmp_path: Path) -> None:
    process = commands.start("-m", "runner", *SMALL, "max_steps=1000000", "epochs=1000000")
    wait_until(lambda: newest_step(tmp_path) > 0, process)
    assert "running" in runs("list")[1] and "0." in runs("list")[1]
    status, out, _ = runs("stop", "last")
    assert status == 0 and out.startswith(f"sent SIGTERM to process {process.pid}: ")
    assert commands.finish(process).returncode == 143
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
            assert status == 2 and f"is stopping already; `runs stop {sweep}` stops its sweep" in err


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_process_that_another_user_names_is_not_stopped(runs: Runs, outputs: Path) -> None:
    with owned(outputs / RUN) as (process,):
        os.chown(outputs / RUN / "holder-1.json", 54321, -1)
        status, _, err = runs("stop", "2026")
        assert status == 2 and f"its lock file and process {process.pid} belong to different users" in err
        assert process.is_alive()


def test_a_run_on_another_machine_is_not_stopped(runs: Runs, outputs: Path) -> None:
    owner = {"number": 1, "host": "elsewhere", "pid": 1, "machine": "another"}
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
