"""The Jobs of `launcher=kubernetes`: their YAML, their end, and what is refused before one exists."""

import os
import re
import shutil
import signal
import socket
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import kubernetes_validate
import pytest
import yaml
from commands import Commands, free_port
from kubernetes_api import FORBIDDEN, KubernetesApi

import runner
from runner.distributed.failures.signals import install_handlers
from runner.errors import InputError
from runner.launchers.kubernetes import followed_job
from runner.launchers.kubernetes.followed_job import FollowedJob
from runner.launchers.kubernetes.kubectl import Api, ApiError

Here = Callable[..., int]
Capture = pytest.CaptureFixture[str]
TINY = (
    "model=mlp",
    "parallel=ddp",
    "outputs=/runs",
    "launcher=kubernetes",
    "launcher.image=IMAGE",
    "launcher.volumes={runs:/runs}",
)
NAMED = (*TINY, "run_id=baseline")
ALL_OPTIONS = (
    "launcher.gpus_per_node=8", "launcher.cpus_per_node=96", "launcher.memory_per_node=64Gi", "launcher.env={A:1}",
    "launcher.secrets=[wandb]", "launcher.node_selector={a/b:c}", "launcher.labels={a/queue:gpu}",
    "launcher.tolerations=[{key:nvidia.com/gpu,operator:Exists}]", "launcher.service_account=trainer",
    "launcher.pod={priorityClassName:low,volumes:[{name:more,hostPath:{path:/mnt}}]}",
    "launcher.container={volumeMounts:[{name:more,mountPath:/mnt}],resources:{limits:{rdma/hca:1}}}",
)  # fmt: skip

# A kubectl whose cluster is a directory with a file for each object. It sends a signal to its parent's process group at
# the verbs in SIGNALS, as Ctrl-C does in a terminal.
KUBECTL = r"""#!/bin/sh
cd FOLDER
send() {
    case "SIGNALS" in *$1*) mkdir sent-$1 2>/dev/null && kill -s SIGNAL -- -$PPID && sleep 0.5 ;; esac
}
case "$*" in
config*) ;;
create*/services*) tee service ;;
create*/jobs*) tee job; send create ;;
get*/pods/*/log*) printf '2026-01-01T00:00:02Z 10%%\r20%%\r\n2026-01-01T00:00:03Z \377\f\n2026-01-01T00:00:04Z be' ;;
get*/pods*) echo '{"items": []}' ;;
get*/jobs/*) send get; cat job || { echo 'Error from server (NotFound): no Job' >&2; exit 1; } ;;
delete*) [ ! -e kept ] || { echo 'Error from server (Forbidden): not yours' >&2; exit 1; }; send delete; rm job ;;
esac
"""


def write_kubectl(folder: Path, signals: str = "never", number: signal.Signals = signal.SIGINT) -> str:
    """Write the command to `folder`, and return a PATH that finds it first."""
    script = KUBECTL.replace("FOLDER", str(folder)).replace("SIGNALS", signals)
    (folder / "kubectl").write_text(script.replace("SIGNAL", number.name.removeprefix("SIG")))
    (folder / "kubectl").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture
def api(commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    api = KubernetesApi(commands, tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(followed_job, "POLL_S", 0.1)
    try:
        yield api
    finally:
        api.stop()


def printed(here: Here, capfd: Capture, *args: str, oldest: str = "1.29") -> list[dict[str, Any]]:
    """Return the objects that launcher.dry_run prints, checked with the oldest and newest versions of Kubernetes."""
    assert here(*TINY, "launcher.dry_run=true", *args) == 0
    objects = list(yaml.safe_load_all(capfd.readouterr().out))
    for each in objects:
        for version in (oldest, "1.34"):
            kubernetes_validate.validate(each, version, strict=True)
    return objects


def test_the_job_needs_no_cluster_to_be_printed(
    here: Here, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    options = ("launcher.nodes=2", "launcher.nproc_per_node=8", *ALL_OPTIONS)
    service, job = printed(here, capfd, "run_id=Base_line", *options, "seed=3")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == [
        "python", "-um", "runner", "model=mlp", "parallel=ddp", "outputs=/runs", "seed=3",
        "run_id=Base_line", "launcher=torchrun",
        "launcher.nodes=2", "launcher.nproc_per_node=8", "launcher.max_restarts=3", "launcher.join_timeout_s=600",
        "launcher.master_addr=base-line-0.experiment-runner", "launcher.master_port=29500",
        "launcher.node_rank=$(JOB_COMPLETION_INDEX)",
    ]  # fmt: skip
    pod = job["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/dev/shm", "/runs", "/mnt"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "rdma/hca": 1}
    assert not any(tmp_path.iterdir())


def test_the_command_is_neither_expanded_nor_bound_to_this_machine(here: Here, tmp_path: Path, capfd: Capture) -> None:
    (tmp_path / "mine").mkdir()
    (job,) = printed(here, capfd, "--config-dir=mine", "task=collectives", "seed=${oc.env:SEED,3}")
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[3:5] == ["--config-dir=mine", "model=mlp"]
    assert "seed=$${oc.env:SEED,3}" in command
    assert not any(word.startswith(("run_id=", "launcher.master", "launcher.node_rank")) for word in command)


def test_pods_that_may_be_missing_have_no_fixed_ranks(here: Here, capfd: Capture) -> None:
    _, job = printed(here, capfd, "launcher.nodes=1:3", "run_id=first", oldest="1.31")
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 3
    assert job["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert "launcher.nodes=1:3" in command and "launcher.master_addr=first-0.experiment-runner" in command
    assert not any(word.startswith("launcher.node_rank") for word in command)


def test_the_end_of_the_job_is_that_of_the_command(here: Here, api: KubernetesApi, capfd: Capture) -> None:
    """Without the run: the pods run the commands true and false."""
    good, bad = (*NAMED, "launcher.python=/bin/true", "launcher.nodes=2"), (*NAMED, "launcher.python=/bin/false")
    assert here(*bad) == 1
    assert "Job baseline has failed: Container runner for pod" in capfd.readouterr().err
    assert here(*bad) == 1  # it is replaced
    assert here(*good) == 0
    assert capfd.readouterr().out.endswith("created Job baseline in namespace default\n")
    assert here(*good) == 0
    assert capfd.readouterr().out == "Job baseline in namespace default is finished\n"
    assert api.services.keys() == {"experiment-runner"}
    assert here(*good, "launcher.wait=false", "seed=1") == 0
    assert "created Job baseline" in capfd.readouterr().out
    del api.jobs["baseline"].body["metadata"]["labels"]
    assert here(*good) == 2
    assert "Job baseline in namespace default has another command" in capfd.readouterr().err


@pytest.mark.fault("a cluster of Kubernetes that refuses a Job, or does not respond", outcome="refused")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((f"launcher.namespace={FORBIDDEN}",), f'is forbidden: User "you" cannot create it in "{FORBIDDEN}"'),
        (("launcher.namespace=nowhere",), 'namespaces "nowhere" not found'),
        (("launcher.context=nowhere",), "launcher.context=nowhere: "),
        (("launcher.pod={nodeNmae:a}",), "nodeNmae"),
        (("server=",), "launcher=kubernetes: The connection to the server 127.0.0.1:"),
        (("silent=",), "launcher=kubernetes: "),
        (("PATH=",), "launcher=kubernetes needs kubectl, which is not on this machine"),
        (("outputs=outputs",), "outputs=outputs must be in a volume of the pods"),
        (("task=plan",), "run_id=baseline has no effect on task=plan"),
        (("-m", "seed=1,2", "run_id=", "launcher.namespace=nowhere"), 'namespaces "nowhere" not found'),
        (("-m", "hydra/sweeper=optuna", "optimizer.lr=interval(0.1,0.2)"), "launcher=kubernetes queues jobs, but"),
        (("-m", "task=collectives", "backend.timeout_s=8,9", "run_id="), "a sweep only trains"),
        (("-m", "seed=1,2", "outputs=kubeconfig/runs"), "kubeconfig is no writable directory"),
        (("run_id=sweep/0-a",), "run_id=sweep/0-a must name a job of a sweep, but "),
        (("run_id=" + "a" * 62,), "is too long for the names of pods; type at most 59 characters"),
    ],
)
def test_what_is_refused_leaves_nothing(
    words: tuple[str, ...], message: str, here: Here, api: KubernetesApi, tmp_path: Path, capfd: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    before = {*tmp_path.iterdir()}
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, and never answers
        if words[0] in ("server=", "silent="):
            port = free_port() if words[0] == "server=" else silent.getsockname()[1]
            config = yaml.safe_load((tmp_path / "kubeconfig").read_text())
            config["clusters"][0]["cluster"]["server"] = f"http://127.0.0.1:{port}"
            (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
        elif words[0] == "PATH=":
            monkeypatch.setenv("PATH", "")
        kept = [word for word in words if word not in ("server=", "silent=", "PATH=")]
        replaced = [word.partition("=")[0] for word in kept]
        status = here(*[word for word in NAMED if word.partition("=")[0] not in replaced], *kept)
    errors = capfd.readouterr().err
    assert status == 2 and message in errors and len(errors.splitlines()) <= 3, errors
    assert {*tmp_path.iterdir()} == before and not api.jobs


def test_outputs_need_not_exist_on_this_machine(here: Here, tmp_path: Path, capfd: Capture) -> None:
    (tmp_path / "file").touch()
    words = [word.replace("/runs", f"{tmp_path}/file/runs") for word in NAMED]
    assert here(*words, "launcher.dry_run=true") == 0
    assert here(f"outputs={tmp_path}/file/runs") == 2
    assert "must be writable" in capfd.readouterr().err


def test_a_call_from_python_and_another_task_are_refused(here: Here, capfd: Capture) -> None:
    with pytest.raises(InputError, match="launcher=kubernetes also runs on other machines; run it in a shell"):
        runner.train(NAMED)
    assert here(*TINY, "task=plan") == 2
    assert "launcher=kubernetes: task=plan runs on this machine; leave the launcher out" in capfd.readouterr().err


@pytest.mark.fault("Ctrl-C while a Job of Kubernetes is created, followed and deleted", outcome="refused")
@pytest.mark.parametrize(("signals", "status"), [("create", 143), ("get", 143), ("get, delete", 130)])
def test_ctrl_c_deletes_the_job_at_any_time(signals: str, status: int, commands: Commands, tmp_path: Path) -> None:
    env = {"PATH": write_kubectl(tmp_path, signals)}
    done = commands.forked(*NAMED, "launcher.nodes=2", env=env, prepare=install_handlers)
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stdout == "created Job baseline in namespace default\n"
    assert done.stderr == "\ndeleting Job baseline; a second Ctrl-C does not wait for it\n"
    assert not (tmp_path / "job").exists() and (tmp_path / "service").exists()


@pytest.mark.fault("a Job of Kubernetes that cannot be deleted after Ctrl-C", outcome="refused")
def test_a_job_that_cannot_be_deleted_is_named(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    done = commands.forked(*NAMED, env={"PATH": write_kubectl(tmp_path, "get")}, prepare=install_handlers)
    assert done.returncode == 1
    assert done.stderr.splitlines()[2:] == [
        "error: Error from server (Forbidden): not yours",
        "Job baseline continues; `kubectl delete job baseline` ends it",
    ]


@pytest.mark.parametrize(
    ("words", "again"),
    [
        (NAMED, "the same command follows it"),
        (TINY, r"the same command with run_id=\d{8}-\d{6} follows it"),
        ((*TINY, "task=collectives"), r"`kubectl logs --follow job/\d{8}-\d{6}` follows it"),
    ],
)
def test_a_job_that_continues_can_be_followed(
    words: tuple[str, ...], again: str, commands: Commands, tmp_path: Path
) -> None:
    env = {"PATH": write_kubectl(tmp_path, "get", signal.SIGTERM)}
    done = commands.forked(*words, env=env, prepare=install_handlers)
    assert done.returncode == 130
    assert re.search(rf"^Job \S+ continues; {again}, `kubectl delete job \S+` ends it$", done.stderr, re.MULTILINE)
    assert (tmp_path / "job").exists()


def test_a_log_may_contain_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", write_kubectl(tmp_path))
    lines = ["2026-01-01T00:00:02Z 10%\r20%\r", "2026-01-01T00:00:03Z \N{REPLACEMENT CHARACTER}\f"]
    assert Api(None, "default").log("pod-a", "") == lines


def test_values_are_text_in_the_job(here: Here, capfd: Capture) -> None:
    values = "{a:true,b:false,c:0,d:'',e:null,f:1.5}"
    options = [f"launcher.{name}={values}" for name in ("labels", "env", "node_selector")]
    (job,) = printed(here, capfd, *options)
    texts = {"a": "true", "b": "false", "c": "0", "d": "", "f": "1.5"}
    pod = job["spec"]["template"]
    assert texts.items() <= job["metadata"]["labels"].items() and "e" not in pod["metadata"]["labels"]
    assert pod["spec"]["nodeSelector"] == texts
    assert {each["name"]: each["value"] for each in pod["spec"]["containers"][0]["env"]} == texts


class Answers:
    """The answers about a Job that ends after its log has grown, in the place of an `Api`."""

    poll = -1
    logs: ClassVar = {
        "pod-a": ["2026-01-01T01:02:03.2Z first", "unable to retrieve logs", "2026-01-01T01:02:03.3Z 5%\r10%\r"],
        "pod-b": ["2026-01-01T01:02:03.5Z first"],
    }

    def get(self, resource: str) -> dict[str, Any]:
        self.poll += 1
        if self.poll == 3:
            raise ApiError("The connection to the server was refused")
        ended = [{"type": "Complete", "status": "True"}] if self.poll == 4 else []
        return {"status": {"conditions": [{"type": "Suspended", "status": "False"}, *ended]}}

    def pods(self, job: str) -> list[dict[str, Any]]:
        name = "pod-a" if self.poll < 3 else "pod-b"
        reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
        status = {"conditions": [reason, reason]} if self.poll == 0 else {}
        annotations = {"batch.kubernetes.io/job-completion-index": "0"}
        return [{"metadata": {"name": name, "annotations": annotations}, "status": status}]

    def log(self, pod: str, since: str) -> list[str]:
        if self.poll == 0:
            raise ApiError("container is waiting to start", "BadRequest")
        if since and not since.startswith("2026-"):
            raise ApiError("invalid value for sinceTime", "BadRequest")
        return self.logs[pod][: self.poll + 1]


def test_each_line_of_the_first_pod_is_printed_once(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_job, "POLL_S", 0.0)
    assert FollowedJob(Answers(), "baseline").wait() == ("Complete", "")
    out, err = capfd.readouterr()
    assert out == "first\n10%\nfirst\n"
    assert err == textwrap.dedent("""\
        a pod waits: Unschedulable: 0/3 nodes
        the log of pod-a: unable to retrieve logs
        kubectl: The connection to the server was refused
        """)
