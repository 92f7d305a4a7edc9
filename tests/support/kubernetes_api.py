"""A small API server of Kubernetes for kubectl, which runs the pods of Indexed Jobs as processes on this machine.

It checks objects with Kubernetes' own schemas, and applies the policies of a Job to pods that exit, as the controller
of Jobs does. It has no scheduler, containers or names of pods, whose address is replaced by the loopback address.
"""

import json
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import Popen
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
from commands import Commands, free_port
from namespaces import Hosts

VERSION = "1.34"  # of the schemas
FORBIDDEN = "secret"  # a namespace in which the user has no permission
MAX_PODS = 12  # that a Job starts, so that a test of a wrong policy ends


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass
class Pod:
    """A pod as a process. Its log has the time of each line, as `timestamps=true` returns it."""

    name: str
    index: int
    process: Popen[str]
    created: str = field(default_factory=now)
    lines: list[str] = field(default_factory=list)
    is_disrupted: bool = False
    is_handled: bool = False  # its exit has been

    def read_log(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(f"{now()} {line.rstrip()}")

    def as_object(self) -> dict[str, Any]:
        annotations = {"batch.kubernetes.io/job-completion-index": str(self.index)}
        metadata = {"name": self.name, "creationTimestamp": self.created, "annotations": annotations}
        return {"metadata": metadata, "status": {"phase": "Running" if self.process.poll() is None else "Failed"}}


class Job:
    """An Indexed Job. A thread handles the exits of its pods."""

    def __init__(self, commands: Commands, body: dict[str, Any], num_schedulable: int):
        self.commands, self.body, self.spec = commands, body, body["spec"]
        self.name, self.port = body["metadata"]["name"], str(free_port())
        self.conditions: list[dict[str, str]] = []
        self.pods: list[Pod] = []
        self.counted: dict[int, int] = {}  # failures by index
        self.is_deleted = False
        for index in range(min(self.spec["completions"], num_schedulable)):
            self._start(index)
        self.thread = threading.Thread(target=self._handle_exits, daemon=True)
        self.thread.start()

    def newest(self, index: int) -> Pod:
        return [pod for pod in self.pods if pod.index == index][-1]

    def as_object(self) -> dict[str, Any]:
        return {**self.body, "status": {"conditions": self.conditions}}

    def evict(self, index: int) -> None:
        """Tell the pod to stop, because its machine is needed."""
        pod = self.newest(index)
        pod.is_disrupted = True
        pod.process.send_signal(signal.SIGTERM)

    def kill(self, index: int) -> None:
        """Kill all processes of the pod, as the kernel does if the container runs out of memory."""
        Hosts.kill(self.commands, self.newest(index).process)

    def delete(self) -> None:
        self.is_deleted = True
        self._stop_pods()

    def _stop_pods(self) -> None:
        for pod in self.pods:
            if pod.process.poll() is None:
                pod.process.send_signal(signal.SIGTERM)

    def _start(self, index: int) -> None:
        assert len(self.pods) < MAX_PODS, f"{self.name} has started {MAX_PODS} pods"
        container = self.spec["template"]["spec"]["containers"][0]
        variables = {each["name"]: each["value"] for each in container["env"]} | {"JOB_COMPLETION_INDEX": str(index)}
        command = [_expanded(word, variables) for word in container["command"]]
        command = [word.replace(f"{self.name}-0.experiment-runner", "127.0.0.1") for word in command]
        command = [word.replace("master_port=29500", f"master_port={self.port}") for word in command]
        process = self.commands.start_as(["sh", "-c", 'exec "$@" 2>&1', "sh", *command], variables)
        pod = Pod(f"{self.name}-{index}-{len(self.pods)}", index, process)
        self.pods.append(pod)
        threading.Thread(target=pod.read_log, daemon=True).start()

    def _handle_exits(self) -> None:
        while not self.conditions:
            for pod in [pod for pod in self.pods if not pod.is_handled and pod.process.poll() is not None]:
                pod.is_handled = True
                if pod.process.returncode and not self.is_deleted:
                    self._handle_failure(pod)
            have_exited = all(pod.process.poll() is not None for pod in self.pods)
            if have_exited and self.is_deleted:
                return
            if have_exited and all(pod.is_handled for pod in self.pods) and not self.conditions:
                succeeded = {pod.index for pod in self.pods if pod.process.returncode == 0}
                needed = {0} if "successPolicy" in self.spec else {*range(self.spec["completions"])}
                self._end("Complete" if needed <= succeeded else "Failed")
            time.sleep(0.1)

    def _handle_failure(self, pod: Pod) -> None:
        status = pod.process.returncode if pod.process.returncode > 0 else 128 - pod.process.returncode
        for rule in self.spec["podFailurePolicy"]["rules"]:
            if ("onPodConditions" in rule and pod.is_disrupted) or status in rule.get("onExitCodes", {}).get(
                "values", ()
            ):
                if rule["action"] == "Ignore":
                    return self._start(pod.index)
                text = (
                    f"Container runner for pod default/{pod.name} failed with exit code {status} matching FailJob rule"
                )
                return self._end("Failed", text)
        self.counted[pod.index] = self.counted.get(pod.index, 0) + 1
        if self.counted[pod.index] > self.spec["backoffLimitPerIndex"]:
            return self._end("Failed", "Job has exceeded the specified maximal number of failed indexes")
        self._start(pod.index)

    def _end(self, kind: str, message: str = "") -> None:
        self._stop_pods()
        for pod in self.pods:
            pod.process.wait(timeout=180)
        self.conditions = [{"type": kind, "status": "True", "message": message}]


class KubernetesApi:
    """The server, on a free port of the loopback interface. `env` selects it for kubectl."""

    def __init__(self, commands: Commands, folder: Path):
        self.commands, self.jobs = commands, dict[str, Job]()
        self.services: dict[str, Any] = {}
        self.num_schedulable = MAX_PODS  # of each Job
        self._lock = threading.Lock()
        api = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def _answer(self, respond: Callable[..., tuple[int, Any]], *args: Any) -> None:
                with api._lock:
                    status, body = respond(*args)
                data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _read_body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                chunks = []
                while size := int(self.rfile.readline(), 16):
                    chunks.append(self.rfile.read(size))
                    self.rfile.readline()
                return b"".join(chunks)

            def do_GET(self) -> None:
                self._answer(api._get, self.path)

            def do_POST(self) -> None:
                self._answer(api._post, self.path, json.loads(self._read_body()))

            def do_DELETE(self) -> None:
                self._read_body()
                self._answer(api._delete, self.path)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        config = folder / "kubeconfig"
        config.write_text(
            f"{{apiVersion: v1, kind: Config, current-context: tests, users: [], clusters: [{{name: tests, cluster: "
            f"{{server: 'http://127.0.0.1:{self._server.server_port}'}}}}], contexts: [{{name: tests, context: "
            "{cluster: tests, user: ''}}]}"
        )
        self.env = {"KUBECONFIG": str(config)}

    def stop(self) -> None:
        """Kill the pods, and close the server."""
        for job in self.jobs.values():
            job.is_deleted = True
            for pod in job.pods:
                self.commands.kill(pod.process)
            job.thread.join(timeout=60)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=60)

    def _get(self, path: str) -> tuple[int, Any]:
        parts = urlsplit(path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if parts.path.endswith("/pods"):
            job = self.jobs.get(query["labelSelector"].partition("=")[2])
            return 200, {"items": [pod.as_object() for pod in job.pods] if job else []}
        if match := re.search(r"/pods/([^/]+)/log$", parts.path):
            pods = [pod for job in self.jobs.values() for pod in job.pods if pod.name == match[1]]
            lines = [line for pod in pods for line in pod.lines if line[:19] >= query.get("sinceTime", "")[:19]]
            return 200, "".join(f"{line}\n" for line in lines)
        if parts.path.endswith("/jobs"):
            return 200, {"items": [job.as_object() for job in self.jobs.values() if not self._is_gone(job)]}
        name = parts.path.rpartition("/")[2]
        if (job := self.jobs.get(name)) and not self._is_gone(job):
            return 200, job.as_object()
        return _failure(404, "NotFound", f'jobs.batch "{name}" not found')

    def _post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        namespace, name = path.split("/namespaces/")[1].split("/")[0], body["metadata"]["name"]
        if namespace == FORBIDDEN:
            return _failure(403, "Forbidden", f'jobs.batch is forbidden: User "you" cannot create it in "{namespace}"')
        if namespace != "default":
            return _failure(404, "NotFound", f'namespaces "{namespace}" not found')
        try:
            kubernetes_validate.validate(body, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            where = ".".join(map(str, error.path))
            return _failure(400, "BadRequest", f"strict decoding error: {where}: {error.message}")
        objects: dict[str, Any] = self.jobs if body["kind"] == "Job" else self.services
        if name in objects and not (body["kind"] == "Job" and self._is_gone(self.jobs[name])):
            return _failure(409, "AlreadyExists", f'{body["kind"]} "{name}" already exists')
        objects[name] = Job(self.commands, body, self.num_schedulable) if body["kind"] == "Job" else body
        return 201, body

    def _delete(self, path: str) -> tuple[int, Any]:
        self.jobs[urlsplit(path).path.rpartition("/")[2]].delete()
        return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    @staticmethod
    def _is_gone(job: Job) -> bool:
        return job.is_deleted and all(pod.process.poll() is not None for pod in job.pods)


def _expanded(word: str, variables: dict[str, str]) -> str:
    """Return the word with $(NAME) replaced by the variable, and $$ by $, as in the command of a container."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda found: "$" if found[0] == "$$" else variables[found[1]], word)


def _failure(code: int, reason: str, message: str) -> tuple[int, Any]:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return code, {**status, "reason": reason, "message": message, "code": code}
