"""The objects of a run in Kubernetes: an Indexed Job, and the headless Service that gives pods their names."""

from collections.abc import Mapping, Sequence
from typing import Any

from runner.launchers.kubernetes.kubectl import OWNER
from runner.launchers.torchrun import MASTER_PORT, REPEAT

Object = dict[str, Any]
CONTAINER = "runner"
SERVICE: Object = {  # shared by all runs of a namespace; it also publishes pods that are not ready
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "experiment-runner", "labels": OWNER},
    "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": OWNER},
}
KEEP_S = 7 * 24 * 3600  # for which a finished Job and the logs of its pods are kept
SHARED_MEMORY = "/dev/shm"  # Kubernetes' default of 64 MiB is too small for loader workers and NCCL
# Keys that the launcher depends on.
RESERVED = {"pod": ("containers", "restartPolicy", "subdomain"), "container": ("name", "image", "command", "args")}


def command_of(
    name: str, python: str, nodes: int | str, nproc_per_node: int, options: Mapping[str, Any], arguments: Sequence[str]
) -> list[str]:
    """Return the command of each pod: the run, with launcher=torchrun and the rendezvous in pod 0.

    arguments: the overrides of the run, which Kubernetes must not expand. options: further ones of the launcher.
    """
    launcher = {"nodes": nodes, "nproc_per_node": nproc_per_node, **options}
    if nodes != 1:
        launcher |= {"master_addr": f"{name}-0.{SERVICE['metadata']['name']}", "master_port": MASTER_PORT}
    if nodes != 1 and isinstance(nodes, int):
        launcher["node_rank"] = "$(JOB_COMPLETION_INDEX)"
    escaped = [argument.replace("$", "$$") for argument in arguments]
    return [
        *(python, "-um", "runner", *escaped, "launcher=torchrun"),
        *(f"launcher.{key}={value}" for key, value in launcher.items()),
    ]


def render_job(
    name: str, num_pods: int, is_elastic: bool, max_restarts: int, labels: Mapping[str, Any], pod: Object
) -> Object:
    """Return the Job. A pod that is evicted, or loses another one, is started again; a failed run ends the Job."""
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        _rule("Ignore", REPEAT, 143),
        _rule("FailJob", 1, 2),
    ]
    labels = {**labels, **OWNER}
    spec: Object = {
        "completionMode": "Indexed",
        "completions": num_pods,
        "parallelism": num_pods,
        "backoffLimitPerIndex": max_restarts,
        "maxFailedIndexes": 0,  # the other pods cannot finish the run
        "ttlSecondsAfterFinished": KEEP_S,
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    if is_elastic:  # the run has finished, although other pods may never have been scheduled
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "labels": labels}, "spec": spec}


def render_pod(container: Object, volumes: Mapping[str, str], grace_s: int) -> Object:
    """Return the spec of the pods with their only container, and with volumes: claims and their paths."""
    found: list[Object] = [{"emptyDir": {"medium": "Memory"}}]
    found += [{"persistentVolumeClaim": {"claimName": claim}} for claim in volumes]
    names = [f"volume-{number}" for number in range(len(found))]
    paths = [SHARED_MEMORY, *volumes.values()]
    mounts = [{"name": name, "mountPath": path} for name, path in zip(names, paths, strict=True)]
    return {
        "restartPolicy": "Never",
        "subdomain": SERVICE["metadata"]["name"],
        "terminationGracePeriodSeconds": grace_s,
        "containers": [{"name": CONTAINER, **container, "volumeMounts": mounts}],
        "volumes": [{"name": name, **volume} for name, volume in zip(names, found, strict=True)],
    }


def merged(base: Any, extra: Any) -> Any:
    """Return `base` with the values of `extra`: mappings are merged, lists appended, other values replaced."""
    if isinstance(base, Mapping) and isinstance(extra, Mapping):
        return {**base, **{key: merged(base[key], value) if key in base else value for key, value in extra.items()}}
    return [*base, *extra] if isinstance(base, Sequence) and isinstance(extra, list) else extra


def _rule(action: str, *statuses: int) -> Object:
    return {"action": action, "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [*statuses]}}
