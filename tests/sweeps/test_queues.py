"""Sweeps and runs that are submitted to a queue: Slurm's commands replaced by scripts, and a custom queue."""

import json
import os
import re
import shlex
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import free_port
from worlds import only_run

from runner.records.ledger import read_ledger
from runner.sweeps.queues import read_jobs_and_queues

Here = Callable[..., int]  # the fixture of conftest.py
Capture = pytest.CaptureFixture[str]
TINY = ("model=toy", "data=toy", "parallel=ddp", "logger=none")
SWEEP = ("-m", *TINY, "launcher=slurm")

# Accepts as many jobs as the file `accepts` says, and numbers them from 7.
SBATCH = """\
#!/bin/bash
job=$(($(ls scripts | wc -l) + 7))
if ((job - 7 >= $(cat accepts))); then echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; fi
cp "${@: -1}" "scripts/$job.sh"
echo "$job"
"""
SCONTROL = """\
#!/bin/bash
echo "MaxArraySize            = $(cat array)"
"""
# Lists the jobs and the tasks of arrays that are files of the directory `queue`.
SQUEUE = """\
#!/bin/bash
echo "${@: -1}" >> queries
cd queue
ls
if [[ -z $(ls) ]]; then echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; fi
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a Slurm that consists of three scripts and runs no job."""
    (tmp_path / "bin").mkdir()
    for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL), ("squeue", SQUEUE)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    for name, text in (("accepts", "100"), ("array", "1001")):
        (tmp_path / name).write_text(text)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "queue").mkdir()
    return tmp_path


def names_in_queue(sweep: Path) -> list[str | None]:
    return [job.queued_as for job in read_ledger(sweep)]


def scripts_of(directory: Path) -> list[str]:
    return [path.read_text() for path in sorted((directory / "scripts").iterdir())]


def arrays_of(directory: Path) -> list[str]:
    return re.findall(r"--array=(\S+)", "".join(scripts_of(directory)))


def test_dry_run_of_a_sweep_prints_one_script_and_writes_nothing(here: Here, tmp_path: Path, capfd: Capture) -> None:
    assert here(*SWEEP, "launcher.dry_run=true", "launcher.wait=true", "seed=0,1") == 0
    printed = capfd.readouterr()
    assert printed.out.startswith("#!/bin/bash\n") and printed.out.endswith('\nexit "$status"\n') and printed.err == ""
    assert f"RUNNER_DIRECTORY={tmp_path}/outputs/run/sweep-STAMP/1-seed-1\n" in printed.out
    assert printed.out.count("#!/bin/bash") == 1 and "#SBATCH --array=0-1\n" in printed.out
    subprocess.run(["bash", "-n"], input=printed.out, text=True, check=True, timeout=120)
    assert list(tmp_path.iterdir()) == []


def test_dry_run_is_refused_for_some_of_the_jobs_and_for_a_resumed_sweep(
    here: Here, slurm: Path, capfd: Capture
) -> None:
    assert here(*SWEEP, "launcher.dry_run=true,false", "seed=0,1") == 2
    assert "launcher.dry_run=true: 2 of 4 jobs would be printed and the others run" in capfd.readouterr().err
    assert not (slurm / "outputs").exists()
    assert here(*SWEEP, "seed=0,1") == 0
    before = (only_run(slurm).path / "ledger.jsonl").read_text()
    assert here("-m", "resume=last", "launcher.dry_run=true") == 2
    assert "leave resume= out to print those of a new sweep" in capfd.readouterr().err
    assert (only_run(slurm).path / "ledger.jsonl").read_text() == before and arrays_of(slurm) == ["0-1"]


@pytest.mark.parametrize("command", [(*TINY, "launcher=slurm"), (*SWEEP, "seed=0,1")], ids=["run", "sweep"])
def test_what_sbatch_refuses_leaves_no_directory(
    command: tuple[str, ...], here: Here, slurm: Path, capfd: Capture
) -> None:
    (slurm / "accepts").write_text("0")
    assert here(*command) == 2
    printed = capfd.readouterr()
    assert printed.err == "launcher=slurm: sbatch failed: sbatch: error: QOSMaxSubmitJobPerUserLimit\n"
    assert printed.out == "" and list((slurm / "outputs" / "run").iterdir()) == []


def test_a_large_grid_becomes_several_arrays_and_resume_submits_what_was_refused(
    here: Here, slurm: Path, capfd: Capture
) -> None:
    (slurm / "array").write_text("2")
    (slurm / "accepts").write_text("2")
    assert here(*SWEEP, "seed=range(5)", "launcher.parallel_jobs=1") == 1
    sweep = only_run(slurm).path
    printed = capfd.readouterr().err.splitlines()
    assert printed[1].startswith("4 of 5 jobs are queued, 1 are not; python -m runner -m resume=")
    assert names_in_queue(sweep) == ["7_0", "7_1", "8_0", "8_1", None]
    assert arrays_of(slurm) == ["0-1%1", "0-1%1"]
    assert "#SBATCH --dependency=afterany:7\n" in scripts_of(slurm)[1]  # otherwise two jobs would run at once

    for job in ("7_0", "7_1", "8_0", "8_1"):
        (slurm / "queue" / job).touch()
    assert here("-m", "resume=last") == 2  # the queue still refuses the last job, and the ledger does not change
    assert [job.state for job in read_ledger(sweep)] == ["queued"] * 4 + ["waiting"]
    (slurm / "accepts").write_text("3")
    assert here("-m", "resume=last") == 0
    assert names_in_queue(sweep) == ["7_0", "7_1", "8_0", "8_1", "9"]


def test_waiting_for_a_sweep_queries_its_tasks_together(
    here: Here, slurm: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    for name in ("7_0", "7_1"):
        (slurm / "queue" / name).touch()
    changes = [(slurm / "queue" / name).unlink for name in ("7_0", "7_1")]
    # Only the module's own name is replaced, because other threads of this process sleep as well.
    monkeypatch.setattr("runner.launchers.slurm.launcher.time", SimpleNamespace(sleep=lambda seconds: changes.pop(0)()))
    assert here(*SWEEP, "seed=0,1", "launcher.wait=true") == 1  # they have ended without an outcome
    assert changes == [] and set((slurm / "queries").read_text().split()) == {"--jobs=7"}

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    (slurm / "queue" / "8_1").touch()
    monkeypatch.setattr("runner.launchers.slurm.launcher.time", SimpleNamespace(sleep=interrupt))
    with pytest.raises(SystemExit, match="130"):
        here(*SWEEP, "name=left", "seed=0,1", "launcher.wait=true")
    assert capfd.readouterr().err.endswith("job 8 remains in the queue; `scancel 8` ends it\n")


def test_a_queue_is_refused_with_slots_and_for_a_task_that_starts_processes(
    here: Here, slurm: Path, capfd: Capture
) -> None:
    assert here(*SWEEP, "seed=0,1", "hydra/launcher=slots") == 2
    error = capfd.readouterr().err
    assert error == "hydra/launcher=slots runs jobs on this machine, but launcher=slurm queues them; remove one\n"
    for command in (("task=compare", "launcher=slurm"), ("-m", "task=compare", "launcher=slurm", "seed=0,1")):
        assert here(*command, "launcher.dry_run=true") == here(*command) == 2
        printed = capfd.readouterr()
        first, second = printed.err.splitlines()
        assert first == second and first.startswith("launcher=slurm queues a job, but task=compare starts processes")
        assert printed.out == ""
    assert not (slurm / "outputs").exists()


def test_a_job_that_left_the_queue_without_an_outcome_has_failed_and_is_queued_again(
    here: Here, slurm: Path, capfd: Capture
) -> None:
    assert here(*SWEEP, "seed=range(6)") == 0
    sweep = only_run(slurm).path
    # Job 0 ended before it started, job 1 in the middle, job 2 has recorded its error; the others wait.
    for number in (3, 4, 5):
        (slurm / "queue" / f"7_{number}").touch()
    results: list[dict[str, Any]] = [{"state": "running"}, {"state": "failed", "error": "too hot"}]
    for job, result in zip(read_ledger(sweep)[1:3], results, strict=True):
        job.directory.mkdir()
        (job.directory / "result.json").write_text(json.dumps({"error": None, "metrics": {}} | result))

    capfd.readouterr()
    (slurm / "queries").unlink(missing_ok=True)
    assert here("task=report", "run=last") == 0
    markdown = " ".join((sweep / "report.md").read_text().split())
    assert (slurm / "queries").read_text().split() == ["--jobs=7"]  # one query for all tasks
    for name in ("7_0", "7_1"):
        log = sweep / "slurm" / f"{name}.log"
        assert f"job {name} left its queue before its run recorded an outcome; its log is {log}" in markdown, markdown
    assert "too hot" in markdown and "7_2" not in markdown and "7_3" not in markdown
    assert [job.state for job in read_ledger(sweep)][3:] == ["queued"] * 3

    assert here("-m", "resume=last") == 0
    assert "0 jobs are done, 3 in the queue, 3 unfinished, 0 new" in capfd.readouterr().out
    assert names_in_queue(sweep) == ["8_0", "8_1", "8_2", "7_3", "7_4", "7_5"]


def test_jobs_submitted_later_run_the_code_of_the_first_submission(here: Here, slurm: Path, capfd: Capture) -> None:
    (slurm / "mine" / "model").mkdir(parents=True)
    (slurm / "mine" / "model" / "own.yaml").write_text("defaults:\n  - toy\nhidden: 3\n")
    custom = ("-m", "--config-dir", "mine", "model=own", *SWEEP[2:])
    assert here(*custom, "seed=0,1") == 0
    sweep = only_run(slurm).path
    assert capfd.readouterr().out.splitlines()[1:2] == [f"sweep directory: {sweep}"]
    (slurm / "mine" / "model" / "new.yaml").write_text("")
    assert here("-m", "resume=last", "seed=2") == 0
    out = capfd.readouterr().out
    assert re.search(r"\ncode: as of [-:T0-9]+; these files have changed since: mine/model/new.yaml\n", out), out
    (archive,) = slurm.rglob("code-*.tar")
    for script in scripts_of(slurm):
        assert f"archive={archive}\n" in script
        assert re.search(rf"--config-dir={sweep}/\S+/slurm/code/own/0-mine", script)
    with tarfile.open(archive) as file:
        assert "own/0-mine/model/own.yaml" in file.getnames() and "own/0-mine/model/new.yaml" not in file.getnames()

    archive.write_bytes(archive.read_bytes()[:-1])
    assert here("-m", "resume=last", "seed=3") == 2
    assert f"{archive} is damaged" in capfd.readouterr().err
    assert here(*custom, "seed=0,1", "name=live", "launcher.code=live") == 0
    live = only_run(slurm, "live").path
    (state,) = (live / "slurm").glob("code-*.json")
    assert f"export RUNNER_SUBMITTED={state}\n" in (live / "slurm" / "jobs-0.sh").read_text()
    assert not list(live.glob("code-*.tar"))


def test_the_ledger_stands_if_slurm_cannot_be_queried(
    here: Here, slurm: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    assert here(*SWEEP, "seed=0,1") == 0
    (slurm / "bin" / "squeue").write_text("#!/bin/bash\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    assert [job.state for job in read_jobs_and_queues(only_run(slurm).path)] == ["queued"] * 2
    monkeypatch.setenv("PATH", "/nowhere")
    assert [job.state for job in read_jobs_and_queues(only_run(slurm).path)] == ["queued"] * 2
    assert here("-m", "resume=last") == 2
    assert "job 7 is in Slurm's queue, but squeue is missing here" in capfd.readouterr().err


def run_in_job(here: Here, monkeypatch: pytest.MonkeyPatch, directory: Path, *arguments: str) -> dict[str, Any]:
    """Run the command as torchrun starts it inside a job. Return the run's result.json."""
    directory.mkdir(parents=True, exist_ok=True)
    with monkeypatch.context() as job:
        rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for name, value in {**rank, "RUNNER_DIRECTORY": str(directory)}.items():
            job.setenv(name, value)
        assert here(*arguments) == 0
    return json.loads((directory / "result.json").read_text())


def test_a_run_of_slurm_is_reported_here_and_rerun_in_the_queue(
    here: Here, slurm: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    first = slurm / "outputs" / "run" / "first"
    arguments = ("model=toy", "data=toy", "max_steps=2", "logger=none", "threads=1", "launcher=slurm")
    assert run_in_job(here, monkeypatch, first, *arguments, "launcher.nproc_per_node=1")["state"] == "finished"
    capfd.readouterr()
    assert here("task=report", f"run={first}") == 0
    assert "launcher=slurm launcher.nproc_per_node=1" in capfd.readouterr().out  # in the command of the best run

    assert here("task=rerun", f"run={first}") == 0
    (script,) = scripts_of(slurm)
    overrides = re.search(r"^overrides=\((.*)\)$", script, re.MULTILINE)
    again = Path(re.search(r"run directory: (.*)", capfd.readouterr().out)[1])  # type: ignore[index]
    assert overrides is not None
    result = run_in_job(here, monkeypatch, again, *shlex.split(overrides[1]))
    assert result["task"] == "rerun" and result["metrics"]["rerun/same_weights"] == 1.0

    assert here("task=rerun", f"run={first}", "launcher.nproc_per_node=2", "parallel=ddp") == 2
    assert "had 1 ranks and cannot be repeated to the bit" in capfd.readouterr().err  # before it waits in the queue
    assert here("task=rerun", f"run={first}", "launcher=env") == 0
    assert len(scripts_of(slurm)) == 1


# A queue is one Python file and one YAML file. This one numbers its jobs; a job has ended when its file is missing.
QUEUE = """\
from pathlib import Path

from runner.launchers.protocol import Queue


class Numbered(Queue):
    def launch(self, config, request, rank_info):
        raise NotImplementedError

    def submit_sweep(self, jobs, directory):
        names = [f"job-{Path(request.directory).name}" for _, request in jobs]
        for name in names:
            Path(name).touch()
        return names

    @classmethod
    def find_ended(cls, names):
        return {name for name in names if not Path(name).exists()}
"""


def test_a_custom_queue_needs_one_class_and_one_yaml_file(here: Here, tmp_path: Path, capfd: Capture) -> None:
    (tmp_path / "mine" / "launcher").mkdir(parents=True)
    (tmp_path / "mine" / "numbered.py").write_text(QUEUE)
    (tmp_path / "mine" / "launcher" / "numbered.yaml").write_text("_target_: numbered.Numbered\n")
    custom = ("--config-dir", "mine")
    assert here("-m", *custom, "model=toy", "data=toy", "launcher=numbered", "seed=0,1") == 0
    sweep = only_run(tmp_path).path
    assert [(job.state, job.queued_as) for job in read_ledger(sweep)] == [
        ("queued", "job-0-seed-0"),
        ("queued", "job-1-seed-1"),
    ]
    (tmp_path / "job-0-seed-0").unlink()
    assert here(*custom, "task=report", f"run={sweep}") == 0
    why = "job job-0-seed-0 left its queue before its run recorded an outcome"
    assert why in " ".join((sweep / "report.md").read_text().split())
    assert here("task=report", f"run={sweep}") == 0  # without --config-dir, nothing that the ledger names is imported
    assert why not in " ".join((sweep / "report.md").read_text().split())
    capfd.readouterr()
    assert here("-m", "resume=last") == 0
    assert "0 jobs are done, 1 in the queue, 1 unfinished, 0 new" in capfd.readouterr().out
    assert [job.num_starts for job in read_ledger(sweep)] == [2, 1]
