"""The connection to a Ray cluster, and the reservation of its nodes."""

import logging
import os
import signal
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from runner.config.diagnostics.type_hints import show
from runner.distributed.failures.signals import Stopped
from runner.errors import InputError, print_messages
from runner.process.daemon_thread import call_in_daemon

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

CONNECT_S = 5.0
PLACE_S = 5.0  # for Ray to reserve nodes that are free
POLL_S = 1.0
REPORT_S = 60.0  # between two messages about what the command waits for
MAX_LISTED = 8

Resources = Mapping[str, float]


def connect(key: str, address: str) -> bool:
    """Connect to the cluster. Return False if this process is connected already. Raise InputError if it fails.

    key: that of the address, for messages.
    """
    import ray

    if ray.is_initialized():
        return False
    target = (os.environ.get("RAY_ADDRESS") if address == "auto" else None) or address
    where = f"{key}={address}" + (f" (RAY_ADDRESS={target})" if target != address else "")
    if target != "local":
        _check_response(key, where, target)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        options: dict[str, Any] = {"include_dashboard": False} if target == "local" else {}
        ray.init(target, log_to_driver=False, logging_level=logging.CRITICAL, **options)
    except SystemExit:  # from Ray's handler of SIGTERM
        raise Stopped(signal.SIGTERM.name) from None
    except Exception as error:
        raise InputError(f"{where}: {_in_one_line(error)}") from None
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray has replaced it
    return True


def _check_response(key: str, where: str, target: str) -> None:
    """Raise InputError unless a cluster responds. Otherwise, Ray would try for minutes, and end this process then.

    target: auto, or the address of the cluster. where: as in `key`=`target`, for messages.
    """
    if target != "auto" and not is_endpoint(target):
        raise InputError(f"{where}: the address must be HOST:PORT, as head:6379")
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import RayError, RpcError

    try:
        endpoint = canonicalize_bootstrap_address(target)  # the one to which ray.init connects
    except ConnectionError:
        raise InputError(
            f"{where}: no Ray cluster runs on this machine; set {key}=HOST:PORT, or {key}=local to start one here"
        ) from None
    assert endpoint is not None  # only a new cluster has none
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        if target != "auto":  # otherwise, it is on this machine, and only ray.init reads its token
            call_in_daemon(lambda: GcsClient(address=endpoint), "ray").result(CONNECT_S)
    except (OSError, RpcError) as error:
        found = f" ({endpoint})" if target == "auto" else ""
        reason = str(error) or f"no response within {CONNECT_S:g} s"
        raise InputError(f"{where}{found}: no Ray cluster responds there ({reason})") from None
    except RayError as error:  # for example, it requires a token
        raise InputError(f"{where}: {_in_one_line(error)}") from None


def reserve(
    prefix: str, limits: tuple[int, int], bundle: Resources, labels: Mapping[str, str], wait: bool
) -> "PlacementGroup":
    """Return a placement group with a bundle on each node. `limits` are the minimum and maximum number of nodes.

    The group has as many nodes as are free. prefix: of the keys of the options, for messages. wait: wait until the
    minimum is free, even if the cluster does not have as many nodes yet. Raises InputError.
    """
    import ray
    from ray.util import placement_group, remove_placement_group

    least, most = limits
    wanted = f"{prefix}.nodes={least}" + (f":{most}" if most > least else "") + f" with {_describe(bundle, bundle)}"
    owned = [(each["NodeManagerHostname"], each["Resources"]) for each in ray.nodes() if each["Alive"]]
    num_fitting = sum(_times(bundle, each) > 0 for _, each in owned)
    if num_fitting < least and not wait:
        listed = [f"{name}: {_describe(bundle, each)}" for name, each in sorted(owned, key=lambda pair: pair[0])]
        more = f"; {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
        raise InputError(
            f"{wanted} each: {num_fitting} nodes of the Ray cluster have that "
            f"({'; '.join(listed[:MAX_LISTED])}{more}); {prefix}.wait=true waits for more"
        )
    if labels:
        wanted += f" and {prefix}.labels={show(labels)}"
    num = max(least, min(most, num_fitting, _times(bundle, ray.available_resources())))
    while True:
        selectors = [dict(labels)] * num if labels else None
        group: PlacementGroup = placement_group(
            [dict(bundle)] * num, strategy="STRICT_SPREAD", bundle_label_selector=selectors
        )
        try:
            if group.wait(PLACE_S) or (num == least and wait and _wait(group, wanted, bundle)):
                return group
        except BaseException:
            remove_placement_group(group)
            raise
        remove_placement_group(group)
        if num == least:
            free = _describe(bundle, ray.available_resources())
            raise InputError(f"{wanted}: not free (in the whole cluster: {free}); {prefix}.wait=true waits for them")
        num -= 1


def _wait(group: "PlacementGroup", wanted: str, bundle: Resources) -> bool:
    """Wait until the group is placed, and print once a minute what it waits for. Return True."""
    import ray

    report_at = time.monotonic()
    while not group.wait(POLL_S):
        if time.monotonic() >= report_at:
            report_at += REPORT_S
            print_messages(
                [f"waiting for {wanted}; free in the whole cluster: {_describe(bundle, ray.available_resources())}"]
            )
    return True


def _times(bundle: Resources, resources: Resources) -> int:
    """Return how often the bundle fits into the resources."""
    return int(min(resources.get(name, 0) // value for name, value in bundle.items()))


def _describe(bundle: Resources, resources: Resources) -> str:
    """Return the resources that the bundle has, too."""
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in bundle)


def is_endpoint(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdigit() and "/" not in host


def _in_one_line(error: BaseException) -> str:
    """Return the whole message: Ray names, for example, versions that do not match on further lines."""
    return " ".join(str(error).split())
