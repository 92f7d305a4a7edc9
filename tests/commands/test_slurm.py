"""launcher=slurm and srun on a real Slurm of two nodes."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import leftovers
import pytest
from commands import Commands, wait_until, with_variable, youngest_rank
from custom_files import write_files
from machine_runs import check_equal
from slurm_cluster import Cluster, missing_requirement
from worlds import Run, run

from runner.checkpoints.layout import list_checkpoints
from runner.records.ledger import read_ledger

pytestmark = pytest.mark.thorough

TINY = ("model=mlp", "parallel=ddp", "threads=1", "logger=none", "name=job")
TWO_BY_TWO = ("launcher=slurm", "launcher.nodes=2", "launcher.nproc_per_node=2")
SRUN = ("srun", "-N2", "-n4", "--overcommit")

# A custom model that is slow until a file `fast` exists, and blocks while a file `stuck` exists.
SLOW = """\
import os
import time

from runner.shipped.models.mlp import MLP


class Slow(MLP):
    def forward(self, samples):
        if self.training and not os.path.exists("fast"):
            time.sleep(0.3)
        while os.path.exists("stuck"):
            time.sleep(0.1)
        return super().forward(samples)
"""
DOUBLED = """\
from runner.shipped.models.mlp import MLP


class Doubled(MLP):
    def forward(self, samples):
        return super().forward(samples) * FACTOR
"""
ALONE = ": 1 rank continued after step"
LONG = ("epochs=12", "eval_every=12", "checkpoint.every_steps=5")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing_requirement():
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def write_model(directory: Path, name: str, code: str) -> list[str]:
    """Write a custom model that derives from mlp. Return TINY with this model."""
    options = f"defaults:\n  - mlp\n_target_: {name}.{name.capitalize()}\n"
    write_files(directory / "mine", {f"{name}.py": code, f"model/{name}.yaml": options})
    return ["--config-dir", "mine", f"model={name}", *TINY[1:]]


def submit(cluster: Cluster, commands: Commands, *arguments: str) -> CompletedProcess[str]:
    return commands.forked(*arguments, env=cluster.env)


def submitted(done: CompletedProcess[str]) -> tuple[str, Run]:
    """Return the job's id and its run from the output of the command."""
    assert done.returncode == 0, done.stdout + done.stderr
    match = re.match(r"submitted job (\d+)\nrun directory: (.+)\n", done.stdout)
    assert match, done.stdout
    return match[1], Run(Path(match[2]))


def submitted_sweep(done: CompletedProcess[str]) -> tuple[str, Path]:
    """Return the id of the array and the directory of the sweep from the output of the command."""
    match = re.search(r"submitted \d+ jobs as job (\d+)\nsweep directory: (.+)\n", done.stdout)
    assert done.returncode == 0 and match, done.stdout + done.stderr
    return match[1], Path(match[2])


def log_of(directory: Path) -> str:
    return "".join(path.read_text() for path in (directory / "slurm").glob("*.log"))


def newest_step(one: Run) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    checkpoints = list_checkpoints(one.path / "checkpoints")
    return int(checkpoints[-1].name.removeprefix("step_")) if checkpoints else 0


def test_sbatch_and_srun_give_the_same_weights(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    here = run(tmp_path / "here", 4, *TINY, "epochs=1", "backend=gloo")

    # The prefix clears the environment, as a container may.
    env = cluster.env | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    bare = "launcher.prefix='env -i PATH=$PATH'"
    waited = commands.forked(*TINY, "epochs=1", *TWO_BY_TWO, "launcher.wait=true", bare, env=env)
    _, one = submitted(waited)
    assert one.result["state"] == "finished" and one.result["world_size"] == 4
    assert one.result["weights_sha256"] == here.result["weights_sha256"]
    assert "4 processes (slurm)" in waited.stdout and "finished: val/accuracy" in waited.stdout
    assert (one.path / "log.txt").read_text() in waited.stdout

    step = (*SRUN, "--chdir", str(tmp_path), "python", "-m", "runner")
    direct = cluster.run(commands, *step, *TINY[:-1], "epochs=1", "name=srun")
    assert direct.returncode == 0, direct.stdout + direct.stderr
    assert "4 processes (srun)" in direct.stdout
    (path,) = (tmp_path / "outputs" / "srun").iterdir()
    assert Run(path).result["weights_sha256"] == here.result["weights_sha256"]


def test_invalid_input_is_reported_once_under_srun(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    step = ("srun", "-N2", "-n2", "--chdir", str(tmp_path), "python", "-m", "runner")
    done = cluster.run(commands, *step, "model=convnt")
    assert done.stderr.count("model=convnt: ") == done.stderr.count("did you mean convnet?") == 1
    assert not (tmp_path / "outputs").exists()
    refused = cluster.run(commands, *step, *TINY, "launcher=spawn")
    assert refused.stderr.count("launcher=spawn starts processes itself, but srun has started this one as rank 0") == 1


@pytest.mark.fault("a Slurm job out of time, and preempted", outcome="survived")
def test_a_job_continues_after_its_time_limit_and_after_a_preemption(
    cluster: Cluster, commands: Commands, tmp_path: Path
) -> None:
    """The weights are those of an uninterrupted run, although the custom model has been broken meanwhile."""
    whole = run(tmp_path / "here", 4, *TINY, *LONG, "backend=gloo")
    limit = ("launcher.time=1", "launcher.signal_s=20", "launcher.cpus_per_node=8")
    arguments = (*write_model(tmp_path, "slow", SLOW), *LONG, *TWO_BY_TWO, *limit)
    job, one = submitted(submit(cluster, commands, *arguments))
    requeued = one.path / "slurm" / "requeued.json"
    wait_until(requeued.exists, timeout_s=300)
    assert cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=30").returncode == 0  # for the next starts
    (tmp_path / "mine" / "slow.py").write_text("raise ImportError('not the code of this job')\n")
    step_at_limit = json.loads(requeued.read_text())["step"]
    wait_until(lambda: newest_step(one) > step_at_limit, timeout_s=300)
    # A job of higher priority needs the nodes: Slurm signals the ranks, but not the script.
    urgent = cluster.call("sbatch", "--parsable", "-p", "urgent", "-N2", "-c8", "--output=/dev/null", "--wrap=sleep 1")
    wait_until(lambda: json.loads(requeued.read_text())["step"] > step_at_limit)
    (tmp_path / "fast").touch()
    cluster.wait_for(urgent.stdout.strip(), ["COMPLETED"])
    cluster.wait_for(job, ["COMPLETED"], timeout_s=300)
    log = log_of(one.path)
    assert log.count("goes back into the queue") >= 2 and "Traceback" not in log
    assert one.result["state"] == "finished"
    assert [path.name for path in (tmp_path / "outputs" / "job").iterdir()] == [one.path.name]
    assert one.result["weights_sha256"] == whole.result["weights_sha256"]
    assert sorted(one.losses) == list(range(1, one.result["step"] + 1))


class Elastic:
    """A job of a rank on each of two nodes, whose steps are slow, and an undisturbed run."""

    def __init__(self, cluster: Cluster, commands: Commands, folder: Path, *options: str):
        steps = ("epochs=60", "eval_every=60", "precision=fp64", "log_every=1")
        self.whole = run(folder / "here", 1, *TINY, *steps, "backend=gloo")
        elastic = ("elastic_every_steps=2", "backend.timeout_s=6", "checkpoint.every_steps=5")
        nodes = ("launcher=slurm", "launcher.nodes=2", "launcher.nproc_per_node=1")
        arguments = (*write_model(folder, "slow", SLOW), *steps, *elastic, *nodes, *options)
        self.job, self.run = submitted(submit(cluster, commands, *arguments))
        wait_until(lambda: newest_step(self.run) > 0, timeout_s=300)

    def kill_rank(self, node: int) -> None:
        processes = with_variable("RUNNER_DIRECTORY", str(self.run.path))
        os.kill(youngest_rank(processes, "runner.launchers.slurm.agent", str(node)), signal.SIGKILL)

    def wait_for(self, text: str, number: int = 1) -> None:
        """Wait until the log has this text `number` times."""
        wait_until(lambda: log_of(self.run.path).count(text) >= number)


@pytest.mark.fault("kill -9 of a rank of a Slurm job", outcome="went_on")
@pytest.mark.fault("the failure of a node of a Slurm job, except that of its script", outcome="went_on")
def test_a_job_continues_without_a_lost_rank_and_a_failed_node(
    cluster: Cluster, commands: Commands, tmp_path: Path
) -> None:
    elastic = Elastic(cluster, commands, tmp_path, "launcher.max_restarts=1")
    elastic.kill_rank(0)
    elastic.wait_for("joined: 2 ranks continued after step")
    num_before = log_of(elastic.run.path).count(ALONE)
    shared = leftovers.mapped(leftovers.shared_memory(), f"SLURM_JOB_ID={elastic.job}")
    assert cluster.call("scontrol", "update", "NodeName=n2", "State=down", "Reason=test").returncode == 0
    elastic.wait_for(ALONE, num_before + 1)
    (tmp_path / "fast").touch()
    cluster.wait_for(elastic.job, ["COMPLETED"])
    assert "ExitCode=0:0" in cluster.call("scontrol", "show", "job", elastic.job).stdout
    assert "resuming" not in log_of(elastic.run.path)
    check_equal(elastic.run, elastic.whole)
    for name in leftovers.unused(shared):  # the node that failed would have lost it
        (leftovers.SHARED / name).unlink(missing_ok=True)


@pytest.mark.fault("a Slurm job out of time after the loss of all ranks of its first node", outcome="went_on")
def test_a_job_that_has_lost_ranks_saves_and_is_requeued(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    """The agent of the first node has no ranks left, and serves the store until those of the other node have saved."""
    elastic = Elastic(cluster, commands, tmp_path)
    elastic.kill_rank(0)
    elastic.wait_for(ALONE)
    cluster.call("scancel", "--signal=USR1", "--batch", elastic.job)
    wait_until((elastic.run.path / "slurm" / "requeued.json").exists)
    assert elastic.run.result["state"] == "preempted" and newest_step(elastic.run) == elastic.run.result["step"]
    (tmp_path / "fast").touch()
    cluster.wait_for(elastic.job, ["COMPLETED"])
    assert elastic.run.result["world_size"] == 2
    check_equal(elastic.run, elastic.whole)


def test_a_queued_job_runs_the_code_of_its_submission_or_of_its_start(
    cluster: Cluster, commands: Commands, tmp_path: Path
) -> None:
    """The custom model changes while three jobs wait: with frozen code, with live code, and with a damaged copy."""
    arguments = write_model(tmp_path, "doubled", DOUBLED.replace("FACTOR", "1"))[:-1]
    queued = ("max_steps=5", "epochs=1", "launcher=slurm", "launcher.nproc_per_node=1", "launcher.sbatch={hold:true}")
    options = {"frozen": (), "live": ("launcher.code=live",), "damaged": ()}
    jobs = {
        name: submitted(submit(cluster, commands, *arguments, *queued, *own, f"name={name}"))
        for name, own in options.items()
    }
    (tmp_path / "mine" / "doubled.py").write_text(DOUBLED.replace("FACTOR", "2"))
    (copy,) = (jobs["damaged"][1].path / "code").iterdir()
    (copy / "installed" / "runner" / "cli.py").write_text("")
    for job, _ in jobs.values():
        cluster.call("scontrol", "release", job)
    ends = {name: cluster.wait_for(job, ["COMPLETED", "FAILED"]) for name, (job, _) in jobs.items()}
    logs = {name: log_of(one.path) for name, (_, one) in jobs.items()}
    assert ends == {"frozen": "COMPLETED", "live": "COMPLETED", "damaged": "FAILED"}, logs

    plain = run(tmp_path / "here", 1, "model=mlp", "threads=1", "logger=none", "max_steps=5", "epochs=1")
    frozen, live, damaged = (jobs[name][1] for name in options)
    assert frozen.result["weights_sha256"] == plain.result["weights_sha256"] != live.result["weights_sha256"]
    assert frozen.result["code"]["submitted"] and "code     as of " in logs["frozen"]
    assert live.result["code"]["submitted"] is None and live.result["code"]["hash"] != frozen.result["code"]["hash"]
    assert f"{copy} is missing, or has changed" in damaged.result["error"] and damaged.result["state"] == "failed"
    assert frozen.result["code"]["copy"] == next((frozen.path / "code").iterdir()).name  # evaluated from the same copy
    for one in (frozen, live):  # a later command composes with the original directory
        assert f"--config-dir={tmp_path}/mine" in (one.path / "overrides.yaml").read_text()


@pytest.mark.fault("a Slurm job that cannot save in time", outcome="survived")
def test_a_task_that_cannot_save_in_time_resumes_from_its_checkpoint(
    cluster: Cluster, commands: Commands, tmp_path: Path
) -> None:
    """The other task of the array is not requeued, although Slurm may apply the last task's number to all tasks."""
    sweep = ("-m", *write_model(tmp_path, "slow", SLOW), *LONG, "seed=0,1", "launcher=slurm", "launcher.signal_s=5")
    array, path = submitted_sweep(submit(cluster, commands, *sweep))
    jobs = [Run(job.directory) for job in read_ledger(path)]
    wait_until(lambda: all(newest_step(one) > 0 for one in jobs))
    (tmp_path / "stuck").touch()
    cluster.call("scancel", "--signal=USR1", "--batch", f"{array}_1")
    wait_until((jobs[1].path / "slurm" / "requeued.json").exists)
    (tmp_path / "fast").touch()
    (tmp_path / "stuck").unlink()
    wait_until(lambda: all(job.state == "finished" for job in read_ledger(path)), timeout_s=300)
    assert not (jobs[0].path / "slurm" / "requeued.json").exists()
    log = log_of(path)
    assert "saved after step" not in log and log.count("resuming after step") == 1
    alone = run(tmp_path / "here", 2, *TINY, *LONG, "seed=1", "backend=gloo")
    assert jobs[1].result["weights_sha256"] == alone.result["weights_sha256"]


def test_a_cancelled_job_is_not_requeued_and_can_be_submitted_again(
    cluster: Cluster, commands: Commands, tmp_path: Path
) -> None:
    long = (*write_model(tmp_path, "slow", SLOW), "epochs=1000", "checkpoint.every_steps=5", "launcher=slurm")
    job, one = submitted(submit(cluster, commands, *long))
    wait_until(lambda: newest_step(one) > 0, timeout_s=300)
    refused = submit(cluster, commands, f"resume={one.path}")
    assert refused.returncode == 2
    assert refused.stderr == f"{one.path} belongs to job {job}, which is in the queue; `scancel {job}` ends it\n"
    script = one.path / "slurm" / "job.sh"  # by which a job is found whose sbatch did not return its id
    assert str(script) in cluster.call("squeue", "--me", "--noheader", "--format=%o").stdout.splitlines()
    cluster.call("scancel", job)
    cluster.wait_for(job, ["CANCELLED"])
    wait_until(lambda: "stopped after step" in log_of(one.path))
    assert cluster.state_of(job) == "CANCELLED" and "goes back" not in log_of(one.path)
    again, same = submitted(submit(cluster, commands, f"resume={one.path}", "launcher.setup=['exit 3']"))
    assert (again != job, same) == (True, one)


@pytest.mark.fault("a Slurm job that dies in setup", outcome="refused")
@pytest.mark.parametrize(
    ("cause", "status", "error"),
    [
        ("launcher.setup=['exit 3']", 3, "the job ended with status 3 before its run was started, at: exit 3"),
        ("launcher.setup=['false']", 1, "the job ended with status 1 before its run was started, at: false"),
        ("data=image_folder data.root=nowhere", 2, "data.root=nowhere"),  # only the job reads the data
    ],
)
def test_a_job_that_fails_before_its_first_step_reports_why(
    cause: str, status: int, error: str, cluster: Cluster, commands: Commands
) -> None:
    overrides = cause.split(" ") if cause.startswith("data=") else [cause]
    done = submit(cluster, commands, *TINY, "launcher=slurm", *overrides, "launcher.wait=true")
    assert done.returncode == status, done.stdout + done.stderr
    assert f"ended FAILED, status {status}; its log is" in done.stderr and error in done.stdout
    match = re.search(r"run directory: (.+)\n", done.stdout)
    assert match, done.stdout
    if cause.startswith("launcher"):
        result = Run(Path(match[1])).result
        assert result["state"] == "failed" and result["error"].endswith(error)


def test_a_sweep_is_one_array_whose_outcomes_a_later_command_reads(
    cluster: Cluster, commands: Commands, tmp_path: Path
) -> None:
    sweep = ("-m", *TINY, "epochs=1", "seed=0,1,2", "launcher=slurm", "launcher.parallel_jobs=2")
    _, path = submitted_sweep(submit(cluster, commands, *sweep))
    assert "#SBATCH --array=0-2%2\n" in (path / "slurm" / "jobs-0.sh").read_text()
    assert {job.state for job in read_ledger(path)} <= {"queued", "running", "finished"}

    again = submit(cluster, commands, "-m", f"resume={path}")
    assert "in the queue, 0 unfinished, 0 new" in again.stdout or "3 jobs are done" in again.stdout, again.stdout
    wait_until(lambda: all(job.state == "finished" for job in read_ledger(path)), timeout_s=300)
    report = commands.forked("task=report", f"run={path}")
    assert report.returncode == 0 and re.search(r"\b3\b", report.stdout), report.stdout + report.stderr
    hashes = {Run(job.directory).result["weights_sha256"] for job in read_ledger(path)}
    assert len(hashes) == 3
    alone = run(tmp_path / "here", 2, *TINY, "epochs=1", "seed=1", "backend=gloo")
    assert alone.result["weights_sha256"] in hashes


def test_a_job_of_two_nodes_chooses_its_mode(cluster: Cluster, commands: Commands) -> None:
    one_each = ("launcher=slurm", "launcher.nodes=2", "launcher.nproc_per_node=1", "launcher.wait=true")
    words = (TINY[0], "parallel=auto", "parallel.candidates=1", "max_steps=3", *TINY[2:], *one_each)
    _, one = submitted(submit(cluster, commands, *words))
    choice = json.loads((one.path / "auto.json").read_text())
    assert (one.result["state"], one.result["parallel"], one.result["world_size"]) == ("finished", choice["mode"], 2)
