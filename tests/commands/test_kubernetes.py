"""Runs as Jobs of Kubernetes: evicted and killed pods, repeated commands, and what the API refuses."""

import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess, Popen

import pytest
from commands import Commands, newest_step, wait_until
from custom_files import SLOW, SLOWLY, write_files
from kubernetes_api import Job, KubernetesApi
from machine_runs import check_equal
from worlds import Run, run

from runner.records.attempts import read_attempts
from runner.records.ledger import read_ledger

pytestmark = pytest.mark.thorough

TINY = ("model=mlp", "parallel=ddp", "threads=1", "logger=none", "backend=gloo")
LONG = (*TINY, "epochs=1000", "max_steps=120", *SLOWLY, "backend.timeout_s=8", "checkpoint.every_steps=20")
FAILING = {
    "mine/failing.py": """\
        from pathlib import Path

        from runner import Callback


        class Failing(Callback):
            def after_step(self, now):
                if now.step == 10 and not Path("fixed").exists():
                    raise RuntimeError("not yet")
        """,
}


class Cluster:
    """A cluster for one test, whose pods run in the directory of its commands."""

    def __init__(self, commands: Commands, api: KubernetesApi):
        self.commands, self.api, self.runs = commands, api, commands.folder / "outputs" / "run"

    def start(self, *args: str, env: dict[str, str] | None = None) -> Popen[str]:
        outputs = self.commands.folder / "outputs"
        launcher = (
            "launcher=kubernetes", "launcher.image=IMAGE", f"launcher.volumes={{runs:{outputs}}}",
            f"launcher.python={sys.executable}", "launcher.nproc_per_node=1",
        )  # fmt: skip
        nodes = () if any(word.startswith("launcher.nodes=") for word in args) else ("launcher.nodes=2",)
        words = ("-m", "runner", *launcher, *nodes, f"outputs={outputs}", *args)
        return self.commands.start(*words, env={**self.api.env, **(env or {})})

    def finish(self, *args: str, env: dict[str, str] | None = None) -> CompletedProcess[str]:
        return self.commands.finish(self.start(*args, env=env))

    def run(self, run_id: str) -> Run:
        return Run(self.runs / run_id)

    def wait_for_checkpoint(self, process: Popen[str]) -> Job:
        """Return the only Job, once it has saved a checkpoint."""
        wait_until(lambda: newest_step(self.commands.folder) >= 20, process)
        (job,) = self.api.jobs.values()
        return job


def read_output(process: Popen[str]) -> list[str]:
    """Return the list to which a thread appends the lines that the command prints."""
    lines: list[str] = []
    assert process.stdout is not None
    threading.Thread(target=lambda out: lines.extend(map(str.rstrip, out)), args=(process.stdout,), daemon=True).start()
    return lines


@pytest.fixture
def cluster(commands: Commands, tmp_path: Path) -> Iterator[Cluster]:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    api = KubernetesApi(commands, tmp_path)
    try:
        yield Cluster(commands, api)
    finally:
        api.stop()


def test_two_pods_produce_the_weights_of_one_machine(cluster: Cluster, tmp_path: Path) -> None:
    here = run(tmp_path / "here", 2, *TINY, "epochs=1")
    done = cluster.finish(*TINY, "epochs=1", "run_id=baseline")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "created Job baseline in namespace default" in done.stdout
    assert done.stdout.count("finished: val/accuracy") == 1 and "2 processes (torchrun)" in done.stdout
    assert cluster.run("baseline").result["weights_sha256"] == here.result["weights_sha256"]
    again = cluster.finish(*TINY, "epochs=1", "run_id=baseline")
    assert (again.returncode, again.stdout.strip()) == (0, f"run_id=baseline is finished: {cluster.runs / 'baseline'}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of LONG on this machine, without its delays."""
    return run(tmp_path_factory.mktemp("whole"), 2, *[word for word in LONG if word not in SLOWLY])


@pytest.mark.fault("a pod of Kubernetes is evicted", outcome="survived")
@pytest.mark.fault("a pod of Kubernetes is killed", outcome="survived")
@pytest.mark.parametrize(
    ("act", "index", "statuses"),
    [
        (Job.evict, 0, [143, 143, 0, 0]),  # the ranks agree to stop
        (Job.evict, 1, [143, 143, 0, 0]),
        (Job.kill, 0, [75, -9, 0, 0]),  # it has the rendezvous
        (Job.kill, 1, [-9, 0, 0]),  # the other pod waits for it
    ],
)
def test_a_lost_pod_is_started_again(
    act: Callable[[Job, int], None], index: int, statuses: list[int], cluster: Cluster, whole: Run, tmp_path: Path
) -> None:
    write_files(tmp_path, SLOW)
    process = cluster.start(*LONG, "run_id=baseline")
    job = cluster.wait_for_checkpoint(process)
    act(job, index)
    (tmp_path / "has-acted").touch()
    done = cluster.commands.finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted((pod.process.returncode for pod in job.pods), reverse=True) == sorted(statuses, reverse=True)
    found = cluster.run("baseline")
    assert found.result["weights_sha256"] == whole.result["weights_sha256"]
    assert len([*read_attempts(found.path)]) == 2 and "resuming after step" in done.stdout


@pytest.mark.fault("a pod of Kubernetes is killed, and the others need not wait for it", outcome="went_on")
def test_the_other_pods_continue_in_place(cluster: Cluster, tmp_path: Path) -> None:
    words = (*LONG, "precision=fp64", "log_every=1")
    whole = run(tmp_path / "whole", 1, *[word for word in words if word not in SLOWLY])
    write_files(tmp_path, SLOW)
    process = cluster.start(*words, "run_id=baseline", "elastic_every_steps=2")
    job = cluster.wait_for_checkpoint(process)
    job.kill(1)
    log = cluster.run("baseline").path / "log.txt"
    wait_until(lambda: "joined: 2 ranks continued after step" in log.read_text(), process)
    (tmp_path / "has-acted").touch()
    done = cluster.commands.finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(pod.process.returncode for pod in job.pods) == [-9, 0, 0]
    assert "resuming" not in done.stdout
    check_equal(cluster.run("baseline"), whole)


def test_a_run_finishes_without_a_pod_that_is_never_scheduled(cluster: Cluster) -> None:
    cluster.api.num_schedulable = 1
    done = cluster.finish(
        *TINY, "epochs=1", "run_id=baseline", "launcher.nodes=1:2", "launcher.join_timeout_s=5"
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert cluster.run("baseline").result["world_size"] == 1


@pytest.mark.fault("Ctrl-C of a command that follows a Job of Kubernetes", outcome="survived")
@pytest.mark.fault("kill -9 of a command that follows a Job of Kubernetes", outcome="survived")
def test_the_same_command_follows_the_job(cluster: Cluster, tmp_path: Path) -> None:
    write_files(tmp_path, SLOW)
    words = [word.replace("max_steps=120", "max_steps=1000") for word in LONG]  # while three other commands start
    process = cluster.start(*words, "run_id=baseline")
    job = cluster.wait_for_checkpoint(process)
    process.kill()
    process.wait(timeout=60)
    second = cluster.start(*words, "run_id=baseline", "launcher.grace_s=60")
    others = {
        cluster.start(*words, "run_id=baseline", "optimizer.lr=0.01"): "optimizer.lr is 0.01, and was 0.05",
        cluster.start(
            *words, "run_id=baseline", "log_every=2"
        ): "Job baseline in namespace default has another command",
    }
    for other, message in others.items():
        refused = cluster.commands.finish(other)
        assert refused.returncode == 2 and message in refused.stderr
    reader = read_output(second)
    wait_until(lambda: any("epoch" in line for line in reader), second)
    assert reader[0] == "Job baseline in namespace default exists already"
    os.killpg(second.pid, signal.SIGINT)
    assert second.wait(timeout=180) == 143
    assert {pod.process.poll() for pod in job.pods} == {143}
    result = cluster.run("baseline").result
    assert result["state"] == "preempted" and newest_step(tmp_path) == result["step"] < 1000
    (tmp_path / "has-acted").touch()
    created = cluster.finish(*words, "run_id=baseline", "launcher.wait=false")
    assert created.returncode == 0 and "created Job baseline" in created.stdout
    job = cluster.api.jobs["baseline"]
    wait_until(lambda: bool(job.conditions))
    assert cluster.run("baseline").result["state"] == "finished"


def test_a_failed_run_ends_the_job_and_its_command_starts_it_again(cluster: Cluster, tmp_path: Path) -> None:
    write_files(tmp_path, FAILING)
    words = (
        *TINY,
        "max_steps=30",
        "--config-dir=mine",
        "+callbacks.failing._target_=failing.Failing",
        "launcher.max_restarts=0",
        "launcher.nodes=1",
    )
    other = cluster.start(*words, "run_id=other", "data.root=nowhere", "data=image_folder")
    failed = cluster.finish(*words, "run_id=baseline")
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "RuntimeError: not yet" in failed.stdout
    assert re.search("error: Job baseline has failed: .* exit code 1 matching FailJob", failed.stderr), failed.stderr
    refused = cluster.commands.finish(other)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "exit code 2" in refused.stderr and "nowhere" in refused.stdout
    (tmp_path / "fixed").touch()
    done = cluster.finish(*words, "run_id=baseline")
    assert done.returncode == 0, done.stdout + done.stderr
    assert cluster.run("baseline").result["state"] == "finished"


@pytest.mark.fault("kill -9 of a command that has queued a sweep on Kubernetes", outcome="survived")
def test_a_sweep_replaces_failed_jobs_and_adds_others(cluster: Cluster, tmp_path: Path) -> None:
    write_files(tmp_path, FAILING)
    words = (*TINY, "max_steps=12", "--config-dir=mine", "+callbacks.failing._target_=failing.Failing")
    launcher = ("launcher.nodes=1", "launcher.max_restarts=0")
    killed = cluster.start("-m", *words, *launcher, "seed=1")
    wait_until(lambda: any(job.conditions for job in cluster.api.jobs.values()), killed)
    killed.kill()
    killed.wait(timeout=60)
    (sweep,) = cluster.runs.iterdir()
    assert [*cluster.api.jobs] == [f"run-{sweep.name}-0"]
    assert read_ledger(sweep)[0].queued_as in (None, f"tests/default/run-{sweep.name}-0")
    (tmp_path / "fixed").touch()
    done = cluster.finish("-m", "resume=last", *launcher, "seed=1,2")
    assert done.returncode == 0 and "2 of 2 jobs finished" in done.stdout, done.stdout + done.stderr
    jobs = read_ledger(sweep)
    assert [(job.label, job.state) for job in jobs] == [("0", "finished"), ("1-seed-2", "finished")]
    assert [len([*read_attempts(job.directory)]) for job in jobs] == [2, 1]
    again = cluster.finish(*words, *launcher, "seed=1", f"run_id={sweep.name}/0")
    assert again.returncode == 0 and f"run_id={sweep.name}/0 is finished" in again.stdout, again.stdout + again.stderr
    here = run(tmp_path / "here", 1, *TINY, "max_steps=12", "seed=1")
    assert Run(jobs[0].directory).result["weights_sha256"] == here.result["weights_sha256"]
