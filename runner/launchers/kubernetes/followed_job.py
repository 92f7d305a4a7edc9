"""A Job that is followed: the log of its first pod, what its pods wait for, and its end."""

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runner.errors import print_messages, printable
from runner.launchers.kubernetes.kubectl import Api, ApiError
from runner.records.output import FailSafeStream

POLL_S = 2.0
DELETE_S = 60.0  # for the cluster to delete a Job after its pods have exited
FIRST = "batch.kubernetes.io/job-completion-index"  # the annotation of a pod with its number
STARTING = ("ContainerCreating", "PodInitializing")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\S+ ")  # at the beginning of a line of a log


def end_of(job: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return how the Job has ended, Complete or Failed, and the message about it; None if it has not ended."""
    for condition in job.get("status", {}).get("conditions", ()):
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            return condition["type"], condition.get("message", "")
    return None


def wait_until_deleted(api: Api, name: str, grace_s: float) -> None:
    """Wait until the Job and its pods have been deleted. Raise ApiError if they exist for longer than `grace_s`."""
    deadline = time.monotonic() + grace_s + DELETE_S
    print(f"waiting until the previous Job {name} has been deleted", flush=True)
    while time.monotonic() < deadline:
        try:
            api.get(f"jobs/{name}")
        except ApiError as error:
            if error.reason == "NotFound":
                return
            raise
        time.sleep(POLL_S)
    raise ApiError(f"Job {name} has not been deleted; `kubectl describe job {name}` may show why")


class FollowedJob:
    """Prints the log of the newest pod with index 0 as it grows, and once each problem of the pods."""

    def __init__(self, api: Api, name: str):
        self._api, self._name = api, name
        self._pod, self._line = "", ""  # the last line that was printed
        self._printed = set[str]()

    def wait(self) -> tuple[str, str] | None:
        """Wait until the Job has ended, and return its end as `end_of` does. Return None if it has been deleted."""
        while True:
            end = None
            try:
                end = end_of(self._api.get(f"jobs/{self._name}"))
                self._print_new(self._api.pods(self._name))
            except ApiError as error:
                if error.reason == "NotFound":
                    return None
                self._print_once(f"kubectl: {error}")
            if end:
                return end
            time.sleep(POLL_S)

    def _print_new(self, pods: Sequence[Mapping[str, Any]]) -> None:
        for problem in _problems(pods):
            self._print_once(f"a pod waits: {problem}")
        firsts = [pod["metadata"]["name"] for pod in pods if pod["metadata"].get("annotations", {}).get(FIRST) == "0"]
        if not firsts:
            return
        if firsts[-1] != self._pod:
            self._pod, self._line = firsts[-1], ""
        try:
            lines = self._api.log(self._pod, self._line.partition(" ")[0])
        except ApiError:  # the container has not started yet
            return
        if self._line in lines:
            lines = lines[len(lines) - lines[::-1].index(self._line) :]
        for line in lines:
            if not TIME.match(line):
                self._print_once(f"the log of {self._pod}: {line.strip()}")
                continue
            self._line = line
            text = line.partition(" ")[2].rstrip("\r").rpartition("\r")[2]  # the last state of a progress bar
            print(printable(text), file=FailSafeStream(sys.stdout), flush=True)

    def _print_once(self, text: str) -> None:
        if text not in self._printed:
            print_messages([text])
        self._printed.add(text)


def _problems(pods: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield why pods cannot start, such as an image that does not exist or machines that are busy."""
    for status in (pod["status"] for pod in pods):
        conditions = [each for each in status.get("conditions", ()) if each["type"] == "PodScheduled"]
        waiting = [each.get("state", {}).get("waiting") or {} for each in status.get("containerStatuses", ())]
        for each in (*(each for each in conditions if each["status"] == "False"), *waiting):
            if each.get("reason") and each["reason"] not in STARTING:
                yield " ".join(f"{each['reason']}: {each.get('message', '')}".split())
