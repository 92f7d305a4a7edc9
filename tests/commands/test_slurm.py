"""launcher=slurm and srun on a real Slurm of two nodes: submitted, waited for, cancelled, requeued, refused."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from commands import Commands, wait_until
from slurm_cluster import Cluster, why_not
from worlds import Run, run

from runner.runs.ledger import read_ledger
from runner.runs.train_state import available

pytestmark = pytest.mark.thorough

TINY = ("model=mlp", "parallel=ddp", "threads=1", "logger=none", "name=job")
TWO_BY_TWO = ("launcher=slurm", "launcher.nodes=2", "launcher.nproc_per_node=2")

# A user's own model, which takes its time until a file says otherwise, and all time while another is there.
SLOW = """\
import os
import time

from models.mlp import MLP


class Slow(MLP):
    def forward(self, samples):
        if self.training and not os.path.exists("fast"):
            time.sleep(0.3)
        while os.path.exists("stuck"):
            time.sleep(0.1)
        return super().forward(samples)
"""
OPTIONS = "defaults:\n  - mlp\n_target_: slow.Slow\n"
LONG = ("epochs=20", "eval_every=20", "checkpoint.every_steps=5")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def submitted(done: CompletedProcess[str]) -> tuple[str, Run]:
    """The job's id and its run, of what the command said."""
    assert done.returncode == 0, done.stdout + done.stderr
    match = re.match(r"submitted job (\d+)\nrun directory: (.+)\n", done.stdout)
    assert match, done.stdout
    return match[1], Run(Path(match[2]))


def slow_model(folder: Path) -> list[str]:
    """TINY with the slow model, which is in the folder then, where the job runs."""
    (folder / "slow" / "model").mkdir(parents=True)
    (folder / "slow" / "slow.py").write_text(SLOW)
    (folder / "slow" / "model" / "slow.yaml").write_text(OPTIONS)
    return ["--config-dir", "slow", "model=slow", *TINY[1:]]


def log_of(one: Run) -> str:
    return "".join(path.read_text() for path in (one.path / "slurm").glob("*.log"))


def test_the_same_weights_by_sbatch_and_by_srun(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    here = run(tmp_path / "here", 4, *TINY, "epochs=1", "backend=gloo")

    # In what keeps the environment out, as a container may.
    env = cluster.env | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    bare = "launcher.prefix='env -i PATH=$PATH'"
    process = commands.start("-m", "runner", *TINY, "epochs=1", *TWO_BY_TWO, "launcher.wait=true", bare, env=env)
    waited = commands.finish(process)
    _, one = submitted(waited)
    assert one.result["state"] == "finished" and one.result["world_size"] == 4
    assert one.result["weights_sha256"] == here.result["weights_sha256"]
    assert "4 processes (torchrun)" in waited.stdout and "finished: val/accuracy" in waited.stdout
    assert (one.path / "log.txt").read_text() in waited.stdout

    step = ("srun", "-N2", "-n4", "--overcommit", "--chdir", str(tmp_path), "python", "-m", "runner")
    direct = cluster.run(commands, *step, *TINY[:-1], "epochs=1", "name=srun")
    assert direct.returncode == 0, direct.stdout + direct.stderr
    assert "4 processes (srun)" in direct.stdout
    (path,) = (tmp_path / "outputs" / "srun").iterdir()
    assert Run(path).result["weights_sha256"] == here.result["weights_sha256"]


def test_wrong_input_is_told_once_under_srun(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    step = ("srun", "-N2", "-n4", "--overcommit", "--chdir", str(tmp_path), "python", "-m", "runner")
    done = cluster.run(commands, *step, "model=convnt")
    assert done.stderr.count("model=convnt: no such model; did you mean convnet?") == 1
    assert not (tmp_path / "outputs").exists()
    refused = cluster.run(commands, *step, *TINY, "launcher=spawn")
    assert refused.stderr.count("launcher=spawn starts processes itself, but srun has started this one as rank 0") == 1


@pytest.mark.fault("a Slurm job out of time, and preempted", outcome="survived")
def test_a_job_that_is_told_to_stop_goes_on_by_itself(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    """Twice: by its time limit, and for a job of more priority. It ends with the weights of a run left alone.

    The model that it was submitted with is gone by then.
    """
    whole = run(tmp_path / "here", 4, *TINY, *LONG, "backend=gloo")
    limit = ("launcher.time=1", "launcher.signal_s=5", "launcher.cpus_per_node=8")
    process = commands.start("-m", "runner", *slow_model(tmp_path), *LONG, *TWO_BY_TWO, *limit, env=cluster.env)
    job, one = submitted(commands.finish(process))
    requeued = one.path / "slurm" / "requeued.json"
    wait_until(requeued.exists, timeout_s=300)
    (tmp_path / "slow" / "slow.py").write_text("raise ImportError('not of this job')\n")
    by_limit = json.loads(requeued.read_text())["step"]
    wait_until(lambda: newest(one) > by_limit, timeout_s=300)
    # The nodes are wanted: Slurm tells the ranks, and not the script.
    urgent = cluster.ask("sbatch", "--parsable", "-p", "urgent", "-N2", "-c8", "--output=/dev/null", "--wrap=sleep 1")
    wait_until(lambda: json.loads(requeued.read_text())["step"] > by_limit)
    (tmp_path / "fast").touch()
    cluster.wait_for(urgent.stdout.strip(), ["COMPLETED"])
    cluster.wait_for(job, ["COMPLETED"], timeout_s=300)
    log = log_of(one)
    assert log.count("goes back into the queue") >= 2 and "Traceback" not in log
    assert one.result["state"] == "finished"
    assert [path.name for path in (tmp_path / "outputs" / "job").iterdir()] == [one.path.name]
    assert one.result["weights_sha256"] == whole.result["weights_sha256"]
    assert sorted(one.losses) == list(range(1, one.result["step"] + 1))


def test_a_queued_job_runs_the_code_of_its_submission_or_says_that_it_is_another(
    cluster: Cluster, commands: Commands, tmp_path: Path
) -> None:
    """Three jobs wait while the user's model is changed: one keeps the code, one does not, and one has lost it."""
    (tmp_path / "mine" / "model").mkdir(parents=True)
    code = (
        "from models.mlp import MLP\n\n\nclass Own(MLP):\n    def forward(self, x):\n        return super().forward(x)"
    )
    (tmp_path / "mine" / "own.py").write_text(f"{code}\n")
    (tmp_path / "mine" / "model" / "own.yaml").write_text(OPTIONS.replace("slow.Slow", "own.Own"))
    words = ("-m", "runner", "--config-dir", "mine", "model=own", "threads=1", "logger=none", "max_steps=5", "epochs=1")
    held = ("launcher=slurm", "launcher.nproc_per_node=1", "launcher.sbatch={hold:true}")
    options = {"frozen": (), "live": ("launcher.code=live",), "damaged": ()}
    started = {
        name: commands.start(*words, *held, *own, f"name={name}", env=cluster.env) for name, own in options.items()
    }
    jobs = {name: submitted(commands.finish(process)) for name, process in started.items()}
    (tmp_path / "mine" / "own.py").write_text(f"{code} * 2\n")
    (jobs["damaged"][1].path / "code" / "own" / "0-mine" / "own.py").write_text(f"{code} * 3\n")
    for job, _ in jobs.values():
        cluster.ask("scontrol", "release", job)
    ends = {name: cluster.wait_for(job, ["COMPLETED", "FAILED"]) for name, (job, _) in jobs.items()}
    assert ends == {"frozen": "COMPLETED", "live": "COMPLETED", "damaged": "FAILED"}, [
        log_of(one) for _, one in jobs.values()
    ]

    plain = run(tmp_path / "here", 1, "model=mlp", "threads=1", "logger=none", "max_steps=5", "epochs=1")
    frozen, live, damaged = (jobs[name][1] for name in options)
    assert frozen.result["weights_sha256"] == plain.result["weights_sha256"] != live.result["weights_sha256"]
    assert frozen.result["code"]["code"] == "frozen" and f"kept in {frozen.path}/code\n" in log_of(frozen)
    assert live.result["code"] | {"code": "live", "changed": ["mine/own.py"]} == live.result["code"]
    assert re.search(r"^warning: the code is another than when .*: mine/own.py$", log_of(live), re.MULTILINE)
    assert "own/0-mine/own.py: FAILED" in damaged.result["error"] and damaged.result["state"] == "failed"
    for one in (frozen, live):  # which is what a later command composes
        assert f"--config-dir={tmp_path}/mine" in (one.path / "overrides.yaml").read_text()


@pytest.mark.fault("a Slurm job that cannot save in time", outcome="survived")
def test_a_task_of_an_array_that_cannot_save_in_time_goes_on_from_its_checkpoint(
    cluster: Cluster, commands: Commands, tmp_path: Path
) -> None:
    """And the other task stays as it is, though Slurm may take the number of an array's last one for all of them."""
    sweep = ("-m", *slow_model(tmp_path), *LONG, "seed=0,1", "launcher=slurm", "launcher.signal_s=5")
    done = commands.finish(commands.start("-m", "runner", *sweep, env=cluster.env))
    match = re.search(r"submitted 2 jobs as job (\d+)\nsweep directory: (.+)\n", done.stdout)
    assert match, done.stdout + done.stderr
    path = Path(match[2])
    jobs = [Run(job.directory) for job in read_ledger(path)]
    wait_until(lambda: all(newest(one) > 0 for one in jobs))
    (tmp_path / "stuck").touch()
    cluster.ask("scancel", "--signal=USR1", "--batch", f"{match[1]}_1")
    wait_until((jobs[1].path / "slurm" / "requeued.json").exists)
    (tmp_path / "fast").touch()
    (tmp_path / "stuck").unlink()
    wait_until(lambda: all(job.state == "finished" for job in read_ledger(path)), timeout_s=300)
    assert not (jobs[0].path / "slurm" / "requeued.json").exists()
    log = "".join(file.read_text() for file in (path / "slurm").glob("*.log"))
    assert "saved after step" not in log and log.count("resuming after step") == 1
    alone = run(tmp_path / "here", 2, *TINY, *LONG, "seed=1", "backend=gloo")
    assert jobs[1].result["weights_sha256"] == alone.result["weights_sha256"]


def test_a_job_that_is_cancelled_ends_though_it_has_saved(cluster: Cluster, commands: Commands) -> None:
    """And the run can be queued again then, and not while it is in the queue."""
    long = ("epochs=100000", "log_every=100", "launcher=slurm")
    job, one = submitted(commands.finish(commands.start("-m", "runner", *TINY, *long, env=cluster.env)))
    wait_until(lambda: newest(one) > 0)
    refused = commands.runner(f"resume={one.path}", env=cluster.env)
    assert refused.returncode == 2
    assert refused.stderr == f"{one.path} is that of job {job}, which is in the queue; `scancel {job}` ends it\n"
    cluster.ask("scancel", job)
    cluster.wait_for(job, ["CANCELLED"])
    wait_until(lambda: "stopped after step" in log_of(one))
    assert cluster.state_of(job) == "CANCELLED" and "goes back" not in log_of(one)
    again, same = submitted(commands.runner(f"resume={one.path}", "launcher.setup=['exit 3']", env=cluster.env))
    assert (again != job, same) == (True, one)


@pytest.mark.fault("a Slurm job that dies in setup", outcome="refused")
@pytest.mark.parametrize(
    ("setup", "status", "at"),
    [("launcher.setup=['exit 3']", 3, "exit 3"), ("launcher.venv=/no/venv", 1, 'source "/no/venv/bin/activate"')],
)
def test_a_job_that_ends_before_its_run_begins_has_its_status_and_says_why(
    setup: str, status: int, at: str, cluster: Cluster, commands: Commands
) -> None:
    words = (*TINY, "launcher=slurm", setup, "launcher.wait=true")
    done = commands.finish(commands.start("-m", "runner", *words, env=cluster.env))
    assert done.returncode == status, done.stdout + done.stderr
    assert f"ended FAILED, status {status}; its log is" in done.stderr
    match = re.search(r"run directory: (.+)\n", done.stdout)
    assert match, done.stdout
    why = f"the job ended with status {status} before its run was started, at: {at}"
    assert {"state": "failed", "error": why}.items() <= Run(Path(match[1])).result.items()
    assert why in done.stdout


def newest(one: Run) -> int:
    """The step of the newest checkpoint, or 0."""
    checkpoints = available(one.path / "checkpoints")
    return int(checkpoints[-1].name.removeprefix("step_")) if checkpoints else 0


def test_a_job_that_fails_has_its_status(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    # Only the job reads the data, and so finds out that there is none.
    wrong = (*TINY[1:], "data=image_folder", "data.root=nowhere", "launcher=slurm", "launcher.wait=true")
    process = commands.start("-m", "runner", *wrong, env=cluster.env)
    done = commands.finish(process)
    assert done.returncode == 1
    assert "ended FAILED, status 1; its log is" in done.stderr
    assert "data.root=nowhere" in done.stdout


FAILS = """\
import os

from models.mlp import MLP


class Fails(MLP):
    steps = 0

    def forward(self, samples):
        self.steps += self.training
        if self.steps > (13 if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 2 else 3):
            raise RuntimeError("no step after this one")
        return super().forward(samples)
"""


def test_a_job_is_started_again_as_long_as_it_gets_on(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "fails.py").write_text(FAILS)
    (tmp_path / "mine" / "model" / "fails.yaml").write_text("defaults:\n  - mlp\n_target_: fails.Fails\n")
    words = ("--config-dir=mine", "model=fails", *TINY[1:], "launcher=slurm", "launcher.nproc_per_node=2")
    often = ("launcher.max_restarts=1", "launcher.wait=true", "max_steps=60", "checkpoint.every_steps=10")
    done = commands.finish(commands.start("-m", "runner", *words, *often, env=cluster.env))
    assert done.returncode == 1
    (path,) = (tmp_path / "outputs" / "job").iterdir()
    log = log_of(Run(path))
    assert log.count("resuming after step 10") == log.count("resuming after step 23") == 1, log  # an epoch has 23
    assert log.count(": started again, from step ") == 2
    assert log.count("not started again: it has failed twice in the same way, and got no further than step 23") == 1
    assert log.count("Traceback") == log.count("no step after this one\n") == 3  # by the ranks, and by no agent
    assert Run(path).result["state"] == "failed"
    assert len((path / "attempts.jsonl").read_text().splitlines()) == 3


def test_what_sbatch_refuses_is_told_and_nothing_is_left(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    process = commands.start("-m", "runner", *TINY, "launcher=slurm", "launcher.partition=big", env=cluster.env)
    done = commands.finish(process)
    assert done.returncode == 2
    assert "invalid partition specified: big" in done.stderr
    assert list((tmp_path / "outputs" / "job").iterdir()) == []


def test_a_sweep_is_one_array_which_a_later_command_collects(
    cluster: Cluster, commands: Commands, tmp_path: Path
) -> None:
    sweep = ("-m", *TINY, "epochs=1", "seed=0,1,2", "launcher=slurm", "launcher.parallel_jobs=2")
    done = commands.finish(commands.start("-m", "runner", *sweep, env=cluster.env))
    assert done.returncode == 0, done.stdout + done.stderr
    match = re.search(r"submitted 3 jobs as job (\d+)\nsweep directory: (.+)\n", done.stdout)
    assert match, done.stdout
    path = Path(match[2])
    assert "#SBATCH --array=0-2%2\n" in (path / "slurm" / "jobs-0.sh").read_text()
    assert {job.state for job in read_ledger(path)} <= {"queued", "running", "finished"}

    again = commands.finish(commands.start("-m", "runner", "-m", f"resume={path}", env=cluster.env))
    assert "in the queue, 0 unfinished, 0 new" in again.stdout or "3 jobs are done" in again.stdout, again.stdout
    wait_until(lambda: all(job.state == "finished" for job in read_ledger(path)), timeout_s=300)
    report = commands.runner("task=report", f"run={path}")
    assert report.returncode == 0 and re.search(r"\b3\b", report.stdout), report.stdout + report.stderr
    hashes = {Run(job.directory).result["weights_sha256"] for job in read_ledger(path)}
    assert len(hashes) == 3
    alone = run(tmp_path / "here", 2, *TINY, "epochs=1", "seed=1", "backend=gloo")
    assert alone.result["weights_sha256"] in hashes
