"""Sweeps and runs that are submitted to a queue: Slurm's commands replaced by scripts, and a custom queue."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from custom_files import write_files
from worlds import only_run

from runner.records.ledger import read_ledger
from runner.sweeps.queues import read_jobs_and_queues

Here = Callable[..., int]  # the fixture of conftest.py
Capture = pytest.CaptureFixture[str]
TINY = ("model=toy", "data=toy", "parallel=ddp", "logger=none")
SWEEP = ("-m", *TINY, "launcher=slurm")

# Accepts as many jobs as the file `accepts` contains, and numbers them from 7. Times out while a file `hangs` exists.
SBATCH = """\
#!/bin/bash
if [[ -e hangs ]]; then echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1; fi
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
    assert printed.out.startswith("#!/bin/bash\n") and printed.out.endswith("\nexit $?\n") and printed.err == ""
    assert f"RUNNER_DIRECTORY={tmp_path}/outputs/run/sweep-STAMP/1-seed-1\n" in printed.out
    assert printed.out.count("#!/bin/bash") == 1 and "#SBATCH --array=0-1\n" in printed.out
    subprocess.run(["bash", "-n"], input=printed.out, text=True, check=True, timeout=120)
    assert list(tmp_path.iterdir()) == []


def test_jobs_that_continue_without_a_node_are_an_array_of_their_own(here: Here, slurm: Path, capfd: Capture) -> None:
    assert here(*SWEEP, "launcher.dry_run=true", "seed=0,1", "parallel=ddp", "elastic_every_steps=null,5") == 0
    first, second = capfd.readouterr().out.split("#!/bin/bash\n")[1:]
    for script, is_elastic in ((first, False), (second, True)):
        assert ("#SBATCH --no-kill\n" in script, "--kill-on-bad-exit=0" in script) == (is_elastic, is_elastic)
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=120)


def test_a_queue_and_something_else_are_refused(here: Here, slurm: Path, capfd: Capture) -> None:
    for launcher, why in (
        (("launcher=slurm", "launcher.dry_run=true,false"), "launcher.dry_run differs between them"),
        (("launcher=slurm,env",), "other jobs have another launcher"),
        (("launcher=slurm", "hydra/launcher=slots"), "hydra/launcher=slots starts jobs itself"),
    ):
        assert here("-m", *TINY, *launcher, "seed=0,1") == 2
        assert f"launcher=slurm queues jobs, but {why}; use only one of the two" in capfd.readouterr().err
    for command in (("task=compare", "launcher=slurm"), ("-m", "task=compare", "launcher=slurm", "seed=0,1")):
        assert here(*command) == 2
        assert "launcher=slurm queues a job, but task=compare starts processes" in capfd.readouterr().err
    assert not (slurm / "outputs").exists()
    assert here(*SWEEP, "seed=0,1") == 0
    before = (only_run(slurm).path / "ledger.jsonl").read_text()
    assert here("-m", "resume=last", "launcher.dry_run=true") == 2
    assert "leave resume= out to print the jobs of a new sweep" in capfd.readouterr().err
    assert (only_run(slurm).path / "ledger.jsonl").read_text() == before and arrays_of(slurm) == ["0-1"]


def test_what_sbatch_refuses_leaves_no_directory(here: Here, slurm: Path, capfd: Capture) -> None:
    (slurm / "accepts").write_text("0")
    for command in ((*TINY, "launcher=slurm"), (*SWEEP, "seed=0,1")):
        assert here(*command) == 2
        printed = capfd.readouterr()
        assert printed.err == "launcher=slurm: sbatch failed: sbatch: error: QOSMaxSubmitJobPerUserLimit\n"
        assert printed.out == "" and list((slurm / "outputs" / "run").iterdir()) == []


@pytest.mark.thorough
def test_a_large_grid_becomes_several_arrays_and_resume_submits_what_was_refused(
    here: Here, slurm: Path, capfd: Capture
) -> None:
    (slurm / "array").write_text("2")
    (slurm / "accepts").write_text("2")
    assert here(*SWEEP, "seed=range(5)", "launcher.parallel_jobs=1") == 1
    sweep = only_run(slurm).path
    printed = capfd.readouterr().err.splitlines()
    assert printed[1].startswith("4 of 5 jobs are queued; python -m runner -m resume=")
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


def test_what_is_submitted_is_kept_if_slurm_does_not_answer_sbatch(here: Here, slurm: Path, capfd: Capture) -> None:
    (slurm / "hangs").touch()
    for command, name in (((*TINY, "launcher=slurm"), "job.sh"), ((*SWEEP, "seed=0,1", "name=sweep"), "jobs-0.sh")):
        assert here(*command) == 1
        path = only_run(slurm, "sweep" if "name=sweep" in command else "run").path
        assert list(path.glob("code/*/code.sha256"))
        assert f"the job may be queued: `squeue --me --format='%F %T %o'` lists it with {path}/slurm/{name}" in (
            capfd.readouterr().err
        )


def test_waiting_for_a_sweep_queries_its_tasks_together(
    here: Here, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("7_0", "7_1"):
        (slurm / "queue" / name).touch()
    changes = [(slurm / "queue" / name).unlink for name in ("7_0", "7_1")]
    # Only the module's own name is replaced, because other threads of this process sleep as well.
    monkeypatch.setattr("runner.launchers.slurm.launcher.time", SimpleNamespace(sleep=lambda seconds: changes.pop(0)()))
    assert here(*SWEEP, "seed=0,1", "launcher.wait=true") == 1  # they have ended without an outcome
    assert changes == [] and set((slurm / "queries").read_text().split()) == {"--jobs=7"}


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_jobs_submitted_later_run_the_code_of_the_first_submission(here: Here, slurm: Path, capfd: Capture) -> None:
    write_files(slurm, {"mine/model/own.yaml": "defaults:\n  - toy\nhidden: 3\n"})
    custom = ("-m", "--config-dir", "mine", "model=own", *SWEEP[2:])
    assert here(*custom, "seed=0,1") == 0
    sweep = only_run(slurm).path
    assert capfd.readouterr().out.splitlines()[1:2] == [f"sweep directory: {sweep}"]
    (slurm / "mine" / "model" / "new.yaml").write_text("")
    assert here("-m", "resume=last", "seed=2") == 0
    out = capfd.readouterr().out
    (copy,) = (sweep / "code").iterdir()
    assert re.search(rf"\ncode: as of [-:T0-9]+; remove {copy} to submit with the current code\n", out), out
    for script in scripts_of(slurm):
        assert f"RUNNER_CODE={copy}\n" in script and f"--config-dir={copy}/own/0-mine" in script
    assert (copy / "own" / "0-mine" / "model" / "own.yaml").exists()
    assert not (copy / "own" / "0-mine" / "model" / "new.yaml").exists()


@pytest.mark.thorough
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


# A queue is one Python file and one YAML file. This one numbers its jobs; a job has ended when its file is missing.
QUEUE = """\
from pathlib import Path

from runner.launchers.contract import Queue


class Numbered(Queue):
    def launch(self, request, rank_info):
        raise NotImplementedError

    def submit_sweep(self, jobs, directory):
        names = [f"job-{Path(request.destination.directory).name}" for request in jobs]
        for name in names:
            Path(name).touch()
        return names

    @classmethod
    def find_ended(cls, names):
        return {name for name in names if not Path(name).exists()}
"""


def test_a_custom_queue_needs_one_class_and_one_yaml_file(here: Here, tmp_path: Path, capfd: Capture) -> None:
    files = {"numbered.py": QUEUE, "launcher/numbered.yaml": "_target_: numbered.Numbered\n"}
    write_files(tmp_path / "mine", files)
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
