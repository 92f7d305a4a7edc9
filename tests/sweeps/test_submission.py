"""What Slurm is handed, and what it has lost: sweeps as arrays, tasks that are more than one run. No job runs here."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import free_port

from runner.runs.ledger import read_ledger
from runner.sweeps.queue_state import read_standing

Here = Callable[..., int]  # the fixture of conftest.py
TINY = ("-m", "model=toy", "data=toy", "parallel=ddp", "logger=none", "launcher=slurm")

# Takes as many jobs as `takes` says, in the order of their numbers from 7 on.
SBATCH = """\
#!/bin/bash
job=$(($(ls scripts | wc -l) + 7))
if ((job - 7 >= $(cat takes))); then echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; fi
cp "${@: -1}" "scripts/$job.sh"
echo "$job"
"""
# Knows the jobs and the tasks of arrays that are in the folder `queue`, and says of those that they wait or run.
SCONTROL = """\
#!/bin/bash
if [[ $* == "show config" ]]; then echo "MaxArraySize            = $(cat array)"; exit; fi
echo "${@: -1}" >> asked
shopt -s nullglob
for task in "queue/${@: -1}"_*; do echo "ArrayTaskId=${task#*_} JobState=$(cat "$task") ExitCode=0:0"; known=yes; done
if [[ -e queue/${@: -1} ]]; then echo "JobId=${@: -1} JobState=$(cat "queue/${@: -1}") ExitCode=0:0"; known=yes; fi
if [[ -z $known ]]; then echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; fi
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a Slurm of two scripts takes jobs and runs none."""
    for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL)):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    for name, text in (("takes", "100"), ("array", "1001")):
        (tmp_path / name).write_text(text)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "queue").mkdir()
    return tmp_path


def sweep_of(folder: Path) -> Path:
    (sweep,) = (folder / "outputs" / "run").iterdir()
    return sweep


def arrays_of(folder: Path) -> list[str]:
    return re.findall(r"--array=(\S+)", "".join(path.read_text() for path in sorted((folder / "scripts").iterdir())))


def test_a_sweep_that_is_shown_is_a_script_and_nothing_else(
    here: Here, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert here(*TINY, "launcher.dry_run=true", "launcher.wait=true", "seed=0,1") == 0
    said = capfd.readouterr()
    assert said.out.startswith("#!/bin/bash\n") and said.out.endswith('\nexit "$status"\n') and said.err == ""
    assert f"RUNNER_DIRECTORY={tmp_path}/outputs/run/sweep-STAMP/1-seed-1\n" in said.out
    assert said.out.count("#!/bin/bash") == 1 and "#SBATCH --array=0-1\n" in said.out
    subprocess.run(["bash", "-n"], input=said.out, text=True, check=True, timeout=120)
    assert list(tmp_path.iterdir()) == []


def test_it_is_shown_whole_and_new(here: Here, slurm: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert here(*TINY, "launcher.dry_run=true,false", "seed=0,1") == 2
    assert "of 4 jobs 2 would be shown and the others run" in capfd.readouterr().err
    assert not (slurm / "outputs").exists()
    assert here(*TINY, "seed=0,1") == 0
    before = (sweep_of(slurm) / "ledger.jsonl").read_text()
    assert here("-m", "resume=last", "launcher.dry_run=true") == 2
    assert "show a new sweep, without resume=" in capfd.readouterr().err
    assert (sweep_of(slurm) / "ledger.jsonl").read_text() == before and arrays_of(slurm) == ["0-1"]


def test_a_sweep_that_sbatch_refuses_leaves_nothing(here: Here, slurm: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (slurm / "takes").write_text("0")
    assert here(*TINY, "seed=0,1") == 2
    said = capfd.readouterr()
    assert said.err == "launcher=slurm: sbatch says: sbatch: error: QOSMaxSubmitJobPerUserLimit\n" and said.out == ""
    assert list((slurm / "outputs" / "run").iterdir()) == []


def test_a_grid_larger_than_an_array_is_several_and_what_was_refused_is_submitted_later(
    here: Here, slurm: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (slurm / "array").write_text("2")
    (slurm / "takes").write_text("2")
    assert here(*TINY, "seed=range(5)", "launcher.parallel_jobs=1") == 1
    said = capfd.readouterr().err.splitlines()
    assert said[1].startswith("4 of 5 jobs are queued, 1 are not; python -m runner -m resume=")
    assert [job.queued_as for job in read_ledger(sweep_of(slurm))] == ["7_0", "7_1", "8_0", "8_1", None]
    assert arrays_of(slurm) == ["0-1%1", "0-1%1"]
    assert "#SBATCH --dependency=afterany:7\n" in (slurm / "scripts" / "8.sh").read_text()  # or two would run at once

    for job in ("7_0", "7_1", "8_0", "8_1"):
        (slurm / "queue" / job).write_text("PENDING")
    assert here("-m", "resume=last") == 2  # it still takes no more: what it was stays as it was
    assert [job.state for job in read_ledger(sweep_of(slurm))] == ["queued"] * 4 + ["waiting"]
    (slurm / "takes").write_text("3")
    assert here("-m", "resume=last") == 0
    assert [job.queued_as for job in read_ledger(sweep_of(slurm))] == ["7_0", "7_1", "8_0", "8_1", "9"]


def test_a_sweep_that_is_waited_for_is_asked_about_at_once(
    here: Here, slurm: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (slurm / "queue" / "7_0-1").write_text("RUNNING")
    changes = [lambda: (slurm / "queue" / "7_0-1").rename(slurm / "queue" / "7_1"), (slurm / "queue" / "7_1").unlink]
    # The module's own name alone: other threads of this process sleep as well.
    monkeypatch.setattr("runner.launchers.slurm.launcher.time", SimpleNamespace(sleep=lambda seconds: changes.pop(0)()))
    assert here(*TINY, "seed=0,1", "launcher.wait=true") == 1  # they have ended, and no run has said how
    assert changes == [] and set((slurm / "asked").read_text().split()) == {"7"}  # the tasks by none of their own names

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    (slurm / "queue" / "8_0-1").write_text("RUNNING")
    monkeypatch.setattr("runner.launchers.slurm.launcher.time", SimpleNamespace(sleep=interrupt))
    with pytest.raises(SystemExit, match="130"):
        here(*TINY, "name=left", "seed=0,1", "launcher.wait=true")
    assert capfd.readouterr().err.endswith("job 8 keeps running; `scancel 8` ends it\n")


def test_what_starts_jobs_twice_is_refused(here: Here, slurm: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert here(*TINY, "seed=0,1", "hydra/launcher=slots") == 2
    assert "queues them; drop one" in capfd.readouterr().err
    assert not (slurm / "outputs").exists()


def test_a_job_that_slurm_has_lost_has_failed_and_is_queued_again(
    here: Here, slurm: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert here(*TINY, "seed=range(6)") == 0
    sweep = sweep_of(slurm)
    # Of six one is lost before it began, one in the middle, one has told why; the others wait.
    for task, state in (("0", "FAILED"), ("3-5%2", "PENDING")):
        (slurm / "queue" / f"7_{task}").write_text(state)
    for job, result in zip(
        read_ledger(sweep)[1:3], ({"state": "running"}, {"state": "failed", "error": "too hot"}), strict=True
    ):
        job.directory.mkdir()
        (job.directory / "result.json").write_text(json.dumps({"error": None, "metrics": {}} | result))

    capfd.readouterr()
    (slurm / "asked").unlink(missing_ok=True)
    assert here("task=report", "run=last") == 0
    markdown = " ".join((sweep / "report.md").read_text().split())
    assert (slurm / "asked").read_text().split() == ["7"]  # of all tasks at once
    for number in (0, 1):
        log = sweep / "slurm" / f"7_{number}.log"
        assert f"Slurm's job 7_{number} ended before the run could say why; its log is {log}" in markdown, markdown
    assert "too hot" in markdown and "7_2" not in markdown and "7_3" not in markdown
    assert [job.state for job in read_ledger(sweep)][3:] == ["queued"] * 3

    assert here("-m", "resume=last") == 0
    assert "0 jobs are done, 3 in the queue, 3 unfinished, 0 new" in capfd.readouterr().out
    assert [job.queued_as for job in read_ledger(sweep)] == ["8_0", "8_1", "8_2", "7_3", "7_4", "7_5"]


def test_what_is_submitted_later_runs_the_code_of_the_first_submission(
    here: Here, slurm: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (slurm / "mine" / "model").mkdir(parents=True)
    (slurm / "mine" / "model" / "own.yaml").write_text("defaults:\n  - toy\nhidden: 3\n")
    own = ("-m", "--config-dir", "mine", "model=own", *TINY[2:])
    assert here(*own, "seed=0,1") == 0
    sweep = sweep_of(slurm)
    assert capfd.readouterr().out.splitlines()[1:2] == [f"sweep directory: {sweep}"]
    (slurm / "mine" / "model" / "new.yaml").write_text("")
    assert here("-m", "resume=last", "seed=2") == 0
    said = capfd.readouterr().out
    assert re.search(r"\ncode: as of [-:T0-9]+, since when these have changed: mine/model/new.yaml\n", said), said
    scripts = [path.read_text() for path in sorted((slurm / "scripts").iterdir())]
    for script in scripts:
        assert f"code={sweep}/code\n" in script and f"--config-dir={sweep}/code/own/0-mine" in script
    assert not list(sweep.glob("*/code")) and (sweep / "code" / "own" / "0-mine" / "model" / "own.yaml").exists()

    (sweep / "code" / "SHA256SUMS").unlink()
    assert here("-m", "resume=last", "seed=3") == 2
    assert f"{sweep}/code/SHA256SUMS is not what was kept" in capfd.readouterr().err
    assert here(*own, "seed=0,1", "name=live", "launcher.code=live") == 0
    (live,) = (slurm / "outputs" / "live").iterdir()
    (state,) = (live / "slurm").glob("code-*.json")
    assert f"export RUNNER_SUBMITTED={state}\n" in (live / "slurm" / "jobs-0.sh").read_text()
    assert not (live / "code").exists()


def test_without_slurm_or_its_answer_the_ledger_stands(
    here: Here, slurm: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert here(*TINY, "seed=0,1") == 0
    (slurm / "bin" / "scontrol").write_text("#!/bin/bash\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    assert [job.state for job in read_standing(sweep_of(slurm))] == ["queued"] * 2
    monkeypatch.setenv("PATH", "/nowhere")
    assert [job.state for job in read_standing(sweep_of(slurm))] == ["queued"] * 2
    assert here("-m", "resume=last") == 2
    assert "job 7 is in Slurm's queue; type this where scontrol is" in capfd.readouterr().err


def test_a_task_that_starts_processes_itself_is_not_queued(
    here: Here, slurm: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for words in (("task=compare", "launcher=slurm"), ("-m", "task=compare", "launcher=slurm", "seed=0,1")):
        assert here(*words, "launcher.dry_run=true") == here(*words) == 2
        said = capfd.readouterr()
        assert (
            said.err.startswith("launcher=slurm queues a job, but task=compare starts processes of its own")
            and said.err.count("\n") == 2
            and said.out == ""
        )
    assert not (slurm / "outputs").exists()


def run_inside(here: Here, monkeypatch: pytest.MonkeyPatch, directory: Path, *words: str) -> dict[str, Any]:
    """The words as Slurm's job has torchrun start them. Returns what result.json says then."""
    directory.mkdir(parents=True, exist_ok=True)
    with monkeypatch.context() as job:
        rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for name, value in {**rank, "RUNNER_DIRECTORY": str(directory)}.items():
            job.setenv(name, value)
        assert here(*words) == 0
    return json.loads((directory / "result.json").read_text())


def test_a_run_of_slurms_is_reported_here_and_made_again_there(
    here: Here, slurm: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first = slurm / "outputs" / "run" / "first"
    words = ("model=toy", "data=toy", "max_steps=2", "logger=none", "threads=1")
    own = ("launcher=slurm", "launcher.nproc_per_node=1")
    assert run_inside(here, monkeypatch, first, *words, *own)["state"] == "finished"
    capfd.readouterr()
    assert here("task=report", f"run={first}") == 0
    assert "launcher=slurm launcher.nproc_per_node=1" in capfd.readouterr().out  # in the command of the best

    assert here("task=rerun", f"run={first}") == 0
    (script,) = (slurm / "scripts").iterdir()
    typed = re.search(r"^overrides=\((.*)\)$", script.read_text(), re.MULTILINE)
    again = Path(re.search(r"run directory: (.*)", capfd.readouterr().out)[1])  # type: ignore[index]
    assert typed is not None
    result = run_inside(here, monkeypatch, again, *shlex.split(typed[1]))
    assert result["task"] == "rerun" and result["metrics"]["rerun/same_weights"] == 1.0

    assert here("task=rerun", f"run={first}", "launcher.nproc_per_node=2", "parallel=ddp") == 2
    assert "ran in a world of 1, and this one is of 2" in capfd.readouterr().err  # told before it waits in the queue
    assert here("task=rerun", f"run={first}", "launcher=env") == 0
    assert len(list((slurm / "scripts").iterdir())) == 1
