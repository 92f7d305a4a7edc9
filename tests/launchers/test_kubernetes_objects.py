"""The Jobs of `launcher=kubernetes`: their YAML, their end, and what is refused before one exists."""

import shutil
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
from runner.errors import InputError
from runner.launchers.kubernetes import followed_job
from runner.launchers.kubernetes.followed_job import FollowedJob
from runner.launchers.kubernetes.kubectl import ApiError

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
        (("-m", "seed=1,2"), "launcher=kubernetes starts single runs; for several, type a command for each"),
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


class Answers:
    """The answers about a Job that ends after its log has grown, in the place of an `Api`."""

    poll = -1
    logs: ClassVar = {"pod-a": ["1.2Z first", "1.3Z second"], "pod-b": ["1.5Z first"]}

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
        return self.logs[pod][: self.poll]


def test_each_line_of_the_first_pod_is_printed_once(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_job, "POLL_S", 0.0)
    assert FollowedJob(Answers(), "baseline").wait() == ("Complete", "")
    out, err = capfd.readouterr()
    assert out == "first\nsecond\nfirst\n"
    assert err == textwrap.dedent("""\
        a pod waits: Unschedulable: 0/3 nodes
        kubectl: The connection to the server was refused
        """)
