"""Kubernetes' API through `kubectl`, which has the user's clusters and credentials."""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from runner.errors import InputError

OWNER = {"app.kubernetes.io/managed-by": "experiment-runner"}  # the label of Jobs that the launcher may replace
REQUEST_TIMEOUT_S = 5  # kubectl may try twice
TIMEOUT_S = 60.0  # of kubectl itself, which may run a plugin for the credentials


class ApiError(InputError):
    """A failed request. `reason` is that of the API server, such as AlreadyExists; empty if it did not respond."""

    def __init__(self, message: str, reason: str = ""):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Api:
    """The objects of one namespace. Every method raises ApiError.

    The requests are raw: kubectl then neither queries the server's resources first, nor checks the object with the
    rules of its own version.
    """

    context: str | None
    namespace: str

    def create(self, resource: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create the object. Unknown keys are refused."""
        return dict(json.loads(self._call("create", f"{self._path(resource)}?fieldValidation=Strict", body)))

    def get(self, resource: str) -> dict[str, Any]:
        return dict(json.loads(self._call("get", self._path(resource))))

    def jobs(self) -> list[dict[str, Any]]:
        """Return the Jobs that launchers have created."""
        selector = quote(",".join(f"{key}={value}" for key, value in OWNER.items()))
        return list(json.loads(self._call("get", f"{self._path('jobs')}?labelSelector={selector}"))["items"])

    def pods(self, job: str) -> list[dict[str, Any]]:
        """Return the pods of the Job, the newest last."""
        selector = quote(f"batch.kubernetes.io/job-name={job}")
        pods = json.loads(self._call("get", f"{self._path('pods')}?labelSelector={selector}"))["items"]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def log(self, pod: str, since: str) -> list[str]:
        """Return the complete lines of the pod's log from the second of the time `since` on.

        Each line begins with its time, except messages of Kubernetes about a log that it cannot read.
        """
        second = f"&sinceTime={quote(re.sub(r'[.][0-9]+', '', since))}" if since else ""
        text = self._call("get", f"{self._path(f'pods/{pod}/log')}?timestamps=true{second}")
        return text.split("\n")[:-1]  # after the last newline, a line is incomplete

    def delete(self, resource: str) -> None:
        """Delete the object, once everything that it owns has been deleted."""
        self._call("delete", f"{self._path(resource)}?propagationPolicy=Foreground")

    def _path(self, resource: str) -> str:
        group = "/apis/batch/v1" if resource.startswith("jobs") else "/api/v1"
        return f"{group}/namespaces/{quote(self.namespace)}/{resource}"

    def _call(self, verb: str, path: str, body: Mapping[str, Any] | None = None) -> str:
        flags = (f"--request-timeout={REQUEST_TIMEOUT_S}s", f"--raw={path}", *(("-f", "-") if body else ()))
        return _kubectl(self.context, verb, *flags, standard_input=json.dumps(body) if body else "")


def connect(context: str | None, namespace: str | None) -> Api:
    """Return the API of the namespace, or else that of the context, which is the current one if it is None.

    Raises InputError without kubectl or the context.
    """
    if shutil.which("kubectl") is None:
        raise InputError(
            "launcher=kubernetes needs kubectl, which is not on this machine; launcher.dry_run=true prints the Job"
        )
    try:
        template = "jsonpath={..namespace}{'\\n'}{.current-context}"
        chosen, _, current = _kubectl(context, "config", "view", "--minify", f"--output={template}").partition("\n")
    except ApiError as error:
        if context:
            raise InputError(f"launcher.context={context}: {error}") from None
        chosen = current = ""  # in a pod, without a file of contexts
    return Api(current or None, namespace or chosen or "default")  # also if the current context changes later


def _kubectl(context: str | None, *arguments: str, standard_input: str = "") -> str:
    command = ["kubectl", *((f"--context={context}",) if context else ()), *arguments]
    try:
        done = subprocess.run(
            command,
            input=standard_input.encode(),
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
            start_new_session=True,  # Ctrl-C in a terminal must not end a request
        )
    except subprocess.TimeoutExpired:
        raise ApiError(f"kubectl does not respond within {TIMEOUT_S:g} s") from None
    if done.returncode:
        text = " ".join(done.stderr.decode(errors="replace").split())
        found = re.search(r"\(([A-Z]\w+)\):", text)
        raise ApiError(text.removeprefix("error: "), found[1] if found else "")
    return done.stdout.decode(errors="replace")  # a log may contain any bytes, and \r within its lines
