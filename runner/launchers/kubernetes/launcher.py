"""launcher=kubernetes: a run as an Indexed Job, which kubectl creates and follows, and a sweep as one Job per run."""

import json
import re
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from runner.config.diagnostics.import_target import locate
from runner.config.request import Request
from runner.distributed.environment import RankInfo
from runner.distributed.failures.signals import INTERRUPTED, Stopped, interruptible, signals_deferred
from runner.errors import InputError, JobFailed, Preempted, print_messages
from runner.launchers.contract import Queue
from runner.launchers.env import check_gpus, check_options
from runner.launchers.kubernetes.followed_job import POLL_S, FollowedJob, end_of, wait_until_deleted
from runner.launchers.kubernetes.kubectl import OWNER, Api, ApiError, connect
from runner.launchers.kubernetes.manifest import (
    RESERVED,
    SERVICE,
    Object,
    command_of,
    merged,
    render_job,
    render_pod,
)
from runner.launchers.torchrun import Torchrun
from runner.records.run_record import DONE, find_run
from runner.records.start_time import STAMP

MAX_NAME = 63  # of a name in DNS


@dataclass
class Kubernetes(Queue):
    """launcher=kubernetes; conf/launcher/kubernetes.yaml documents the options."""

    image: str | None = None
    nodes: int | str = 1
    nproc_per_node: int = 2
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    memory_per_node: str | None = None
    volumes: Mapping[str, str] | None = None
    env: Mapping[str, Any] | None = None
    secrets: Sequence[str] = ()
    node_selector: Mapping[str, Any] | None = None
    tolerations: Sequence[Mapping[str, Any]] = ()
    labels: Mapping[str, Any] | None = None
    service_account: str | None = None
    namespace: str | None = None
    context: str | None = None
    python: str = "python"
    pod: Mapping[str, Any] | None = None
    container: Mapping[str, Any] | None = None
    grace_s: int = 120
    dry_run: bool = False
    wait: bool = True
    max_restarts: int = 3
    join_timeout_s: float = 600.0

    is_remote = True
    is_elastic = True

    def __post_init__(self) -> None:
        counts = ("gpus_per_node", "cpus_per_node", "grace_s")
        check_options(self.join_timeout_s, self.max_restarts, **{name: getattr(self, name) for name in counts})
        # The agents in the pods have the other options.
        agent = Torchrun(self.nproc_per_node, self.nodes, master_addr="pod-0")
        self.world_size, self._num_pods = agent.world_size, agent.max_nodes
        if not self.image:
            raise ValueError(
                "launcher.image=null must name a container image with the runner; add launcher.image=IMAGE"
            )
        check_gpus(self.nproc_per_node, self.gpus_per_node)
        self._submitted: list[str] = []  # the names of the sweep's jobs
        for option, keys in RESERVED.items():
            for key in keys:
                if key in (getattr(self, option) or {}):
                    raise ValueError(f"launcher.{option}.{key}: the launcher sets this key; leave it out")

    def launch(self, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Print or create the Job. With `wait`, follow it, and return the run's metrics if this machine sees them."""
        config, given = request.config, request.destination.directory
        parent = Path(config.outputs).absolute() / config.name
        directory = Path(given).absolute() if given else parent / (config.run_id or time.strftime(STAMP))
        if not directory.is_relative_to(parent):
            raise InputError(f"launcher=kubernetes resumes only runs in {parent}, not {given}")
        run_id = str(directory.relative_to(parent))
        arguments = self._arguments(request, run_id)
        job = self._render(config.name, run_id, arguments)
        _check_outputs(config.outputs, job)
        if self.dry_run:
            self._print(job)
            return {}
        if given or config.run_id:
            again = "the same command"
        elif f"run_id={run_id}" in arguments:
            again = f"the same command with run_id={run_id}"
        else:
            again = f"`kubectl logs --follow job/{job['metadata']['name']}`"
        self._run(connect(self.context, self.namespace), job, again)
        run = find_run(directory)
        return run.metrics if run.state in DONE else {}

    def submit_sweep(self, jobs: Sequence[Request], directory: Path) -> list[str]:
        """Print or create the Jobs. Return their names as CONTEXT/NAMESPACE/JOB; [] if they are printed."""
        num_before = len(self._submitted)
        for request in jobs:
            run_id = f"{directory.name}/{Path(str(request.destination.directory)).name}"
            job = self._render(request.config.name, run_id, self._arguments(request, run_id))
            _check_outputs(request.config.outputs, job)
            if self.dry_run:
                self._print(job)
                continue
            try:
                with interruptible():
                    self._submit(connect(self.context, self.namespace), job)
            except ApiError as error:
                raise InputError(f"launcher=kubernetes: {error}") from None
            except (KeyboardInterrupt, Stopped):
                _leave_running(self._submitted)
        return self._submitted[num_before:]

    def _submit(self, api: Api, job: Object) -> None:
        """Create a Job of a sweep, and add its name to those of the submitted ones."""
        name = f"{api.context or ''}/{api.namespace}/{job['metadata']['name']}"
        self._create_service(api)
        while name not in self._submitted:
            with signals_deferred():  # so that a created Job is among them when they raise Stopped
                created = _create_job(api, job)
                if created:
                    self._submitted.append(name)
            if not created and self._find(api, job, keeps_complete=False):
                self._submitted.append(name)

    @classmethod
    def find_ended(cls, names: Sequence[str]) -> set[str]:
        try:
            return _find_ended(names)
        except ApiError:
            return set()

    def max_jobs(self) -> int:
        """Return 1, so that each Job is recorded as soon as it exists."""
        return 1

    def wait_for_sweep(self) -> bool:
        """With launcher.wait, return when all Jobs of the sweep have ended. Return True if the method waited."""
        left, printed = set(self._submitted), set[str]()
        try:
            with interruptible():
                while self.wait and left:
                    try:
                        left -= _find_ended([*left])
                    except ApiError as error:
                        if str(error) not in printed:
                            print_messages([f"kubectl: {error}"])
                        printed.add(str(error))
                    time.sleep(POLL_S)
        except (KeyboardInterrupt, Stopped):
            _leave_running(left)
        return self.wait

    def _run(self, api: Api, job: Object, again: str) -> None:
        """Return once the Job is complete, or exists without `wait`. Raise JobFailed, and Preempted after Ctrl-C.

        again: the command that follows the Job if it continues after a signal.
        """
        name = job["metadata"]["name"]
        found: Object | None = None
        followed = FollowedJob(api, name)
        try:
            with interruptible():
                self._create_service(api)
                while found is None:
                    with signals_deferred():  # so that `found` is known when they raise Stopped
                        found = _create_job(api, job)
                    found = found or self._find(api, job)
                if end_of(found):
                    print(f"Job {name} in namespace {api.namespace} is finished", flush=True)
                elif self.wait:
                    _check_end(name, followed.wait())
        except ApiError as error:
            raise InputError(f"launcher=kubernetes: {error}") from None
        except Stopped as stopped:
            if found is None:
                raise Preempted(str(stopped)) from None
            _stop(api, name, followed, str(stopped), again)

    def _create_service(self, api: Api) -> None:
        if self._num_pods > 1:
            _create(api, "services", SERVICE)

    def _find(self, api: Api, job: Object, keeps_complete: bool = True) -> Object | None:
        """Return the existing Job of this name. Return None after the deletion of one that must be replaced.

        keeps_complete: a complete Job with the same command need not be replaced.
        """
        name = job["metadata"]["name"]
        found = api.get(f"jobs/{name}")
        labels, end = found["metadata"].get("labels", {}), end_of(found)
        is_deleted = "deletionTimestamp" in found["metadata"]
        is_same = _container_of(found).get("command") == _container_of(job)["command"]
        if not OWNER.items() <= labels.items() or not (is_same or is_deleted or end):
            raise InputError(
                f"launcher=kubernetes: Job {name} in namespace {api.namespace} has another command; type another "
                f"run_id, or end it by `kubectl delete job {name}`"
            )
        if not is_deleted and (end is None or (keeps_complete and is_same and end[0] == "Complete")):
            if end is None:
                print(f"Job {name} in namespace {api.namespace} exists already", flush=True)
            return found
        if not is_deleted:
            api.delete(f"jobs/{name}")
        wait_until_deleted(api, name, self.grace_s)
        return None

    def _arguments(self, request: Request, run_id: str) -> list[str]:
        """Return the arguments of the run in the pods, where each start resumes it."""
        given = request.command.overrides
        kept = [text for text in given if re.split("[.=@]", text.lstrip("+~"))[0] not in ("launcher", "run_id")]
        task = locate(request.config.task["_target_"])
        own = [f"run_id={run_id}"] if task.trains and not task.reads_run else []
        # A custom directory within the working directory is at the same place in that of the image.
        here = Path.cwd()
        paths = [Path(text) for text in request.command.config_dirs]
        dirs = [str(path.relative_to(here) if path.is_relative_to(here) else path) for path in paths]
        return [*(f"--config-dir={path}" for path in dirs), *kept, *own]

    def _print(self, job: Object) -> None:
        objects = [SERVICE, job] if self._num_pods > 1 else [job]
        text = yaml.safe_dump_all(json.loads(json.dumps(objects)), explicit_start=True, sort_keys=False)
        print(text, end="")  # json removes what YAML would write as anchors

    def _render(self, name: str, run_id: str, arguments: Sequence[str]) -> Object:
        """Return the Job of a run in `outputs`/NAME. The Jobs of a sweep need short names of their own."""
        sweep, _, label = run_id.rpartition("/")
        text = f"{name}-{sweep}-{label.partition('-')[0]}" if sweep else run_id
        name = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")
        if len(f"{name}-{self._num_pods - 1}") > MAX_NAME:
            raise InputError(
                f"run_id={run_id} is too long for the names of pods; type at most {MAX_NAME - 4} characters"
            )
        options = {"max_restarts": self.max_restarts, "join_timeout_s": f"{self.join_timeout_s:g}"}
        command = command_of(name, self.python, self.nodes, self.nproc_per_node, options, arguments)
        requests = {"cpu": self.cpus_per_node, "memory": self.memory_per_node}
        limits = {"nvidia.com/gpu": self.gpus_per_node}
        container = {
            "image": self.image,
            "command": command,
            "env": [{"name": key, "value": value} for key, value in _texts(self.env).items()],
            "envFrom": [{"secretRef": {"name": secret}} for secret in self.secrets],
            "resources": {"requests": _texts(requests), "limits": _texts(limits)},
        }
        pod = render_pod(container, self.volumes or {}, self.grace_s)
        pod |= _texts({"serviceAccountName": self.service_account}) | {"nodeSelector": _texts(self.node_selector)}
        pod["containers"] = [merged(pod["containers"][0], self.container or {})]
        pod = merged(pod | {"tolerations": [*self.tolerations]}, self.pod or {})
        labels = _texts(self.labels)
        return render_job(name, self._num_pods, self.world_size is None, self.max_restarts, labels, pod)


def _create(api: Api, resource: str, body: Object) -> Object | None:
    """Create the object and return it. Return None if one of this name exists already."""
    try:
        return api.create(resource, body)
    except ApiError as error:
        if error.reason != "AlreadyExists":
            raise
        return None


def _create_job(api: Api, job: Object) -> Object | None:
    """Create the Job and return it. Return None if one of this name exists already."""
    created = _create(api, "jobs", job)
    if created:
        print(f"created Job {job['metadata']['name']} in namespace {api.namespace}", flush=True)
    return created


def _find_ended(names: Sequence[str]) -> set[str]:
    """Return the Jobs, each CONTEXT/NAMESPACE/JOB, that neither wait nor run. Raise ApiError if that is unknown."""
    unfinished: dict[tuple[str, str], set[str]] = {}  # by context and namespace
    ended = set()
    for name in names:
        context, namespace, job = name.rsplit("/", 2)
        if (context, namespace) not in unfinished:
            found = connect(context or None, namespace).jobs()
            unfinished[context, namespace] = {each["metadata"]["name"] for each in found if not end_of(each)}
        if job not in unfinished[context, namespace]:
            ended.add(name)
    return ended


def _leave_running(names: Collection[str]) -> NoReturn:
    """End the command after a signal; its Jobs continue."""
    jobs = " ".join(sorted(name.rpartition("/")[2] for name in names))
    text = f"the Jobs continue; `kubectl delete job {jobs}` ends them" if jobs else "no Job has been created"
    print(f"\n{text}", file=sys.stderr, flush=True)
    raise SystemExit(INTERRUPTED) from None


def _check_end(name: str, end: tuple[str, str] | None) -> None:
    """Raise JobFailed unless the Job is complete. end: that of the Job, or None if it was deleted."""
    if end and end[0] == "Complete":
        return
    text = f"Job {name} has been deleted"
    if end:
        shown = f"kubectl logs --prefix --selector=batch.kubernetes.io/job-name={name}"
        text = f"Job {name} has failed: {end[1]}; `{shown}` prints the output of its pods"
    print(f"error: {text}", file=sys.stderr, flush=True)
    found = re.search(r"exit code (\d+)", end[1] if end else "")
    raise JobFailed(text, 2 if found and found[1] == "2" else 1)


def _stop(api: Api, name: str, followed: FollowedJob, reason: str, again: str) -> NoReturn:
    """Delete the Job after Ctrl-C, and print its log until its pods have exited. After other signals it continues."""
    if reason != signal.SIGINT.name:
        text = f"Job {name} continues; {again} follows it, `kubectl delete job {name}` ends it"
        print(f"\n{text}", file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED) from None
    with signals_deferred():  # until the request has been answered
        print(f"\ndeleting Job {name}; a second Ctrl-C does not wait for it", file=sys.stderr, flush=True)
        try:
            api.delete(f"jobs/{name}")
        except ApiError as error:
            if error.reason != "NotFound":
                text = f"Job {name} continues; `kubectl delete job {name}` ends it"
                print_messages([f"error: {error}", text])
                raise JobFailed(text) from None
    followed.wait()
    raise Preempted(reason) from None


def _check_outputs(outputs: str, job: Object) -> None:
    """Raise InputError unless `outputs` is in a volume: a pod that is started again has new files elsewhere."""
    mounts = _container_of(job)["volumeMounts"]
    if not any(Path(outputs).is_relative_to(mount["mountPath"]) for mount in mounts):
        raise InputError(
            f"outputs={outputs} must be in a volume of the pods, which outlives them; add outputs=/runs "
            "'launcher.volumes={CLAIM:/runs}'"
        )


def _container_of(job: Object) -> Object:
    container: Object = job["spec"]["template"]["spec"]["containers"][0]
    return container


def _texts(values: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the values except None as text, because Kubernetes refuses numbers and booleans."""
    given = {key: value for key, value in (values or {}).items() if value is not None}
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in given.items()}
