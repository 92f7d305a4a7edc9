"""The nodes of a Ray cluster on which agents run."""

import itertools
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from runner.errors import first_line, require_packages
from runner.launchers.agent import ALIVE, Assignment
from runner.launchers.agent_process import HEARTBEAT_S, input_of
from runner.launchers.env import parse_nodes
from runner.launchers.host_facts import HostFacts, read_facts
from runner.launchers.machines import Machine, Machines
from runner.launchers.ray import starter
from runner.launchers.ray.cluster import connect, is_endpoint, reserve
from runner.launchers.ray.starter import LOST, SET_BY_RAY, Ended, Starter

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

ANSWER_S = 90.0  # for the facts of a node, on which Ray starts a Python process first


@dataclass
class _Node:
    actor: Any  # a Starter
    why_lost: str = "it received nothing from this command for a while"


class RayAgent:
    """An agent that the actor of a node runs as the process `key`.

    ended: Ray's reference of its end. errors: a file for its errors, or its path, or None.
    """

    def __init__(self, node: _Node, key: int, ended: Any, errors: IO[bytes] | Path | None):
        self._node, self._key, self._ended, self._errors = node, key, ended, errors
        self._status: int | None = None

    @property
    def status(self) -> int | None:
        """The exit status; None while the agent runs; LOST if the node is lost."""
        import ray

        if self._status is None and ray.wait([self._ended], timeout=0)[0]:
            try:
                ended: Ended = ray.get(self._ended)
            except ray.exceptions.RayTaskError as error:
                ended = Ended(1, b"", first_line(error.cause).encode())
            except ray.exceptions.RayError as error:
                ended, self._node.why_lost = Ended(LOST, b"", b""), first_line(error)
            if isinstance(self._errors, Path):
                with self._errors.open("ab") as file:
                    file.write(ended.errors)
            elif self._errors is not None:
                self._errors.write(ended.errors)
            self._status = ended.status
        return self._status

    def send_signal(self, number: int) -> None:
        self._node.actor.send.remote(self._key, bytes([number]))

    def close(self) -> None:
        self._node.actor.close.remote(self._key)

    def kill(self) -> None:
        self._node.actor.kill.remote(self._key)


class RayNodes(Machines):
    """Nodes of a Ray cluster that Ray reserves for this command, with an actor on each that starts its agents.

    prefix: of the keys of the options, as launcher. num: the number of ranks or slots of a node. The other options are
    those of conf/launcher/ray.yaml. Raises ValueError.
    """

    silence_s = 30.0  # with save_s less than the 65 s after which Ray by default regards a node as lost
    save_s = 30.0

    def __init__(
        self,
        prefix: str,
        num: int,
        address: str = "auto",
        nodes: int | str = 1,
        cpus_per_node: int | None = None,
        gpus_per_node: int | None = None,
        resources: Mapping[str, Any] | None = None,
        labels: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
        wait: bool = False,
    ):
        self.key, self._prefix, self._num, self._address, self._wait = f"{prefix}.nodes", prefix, num, address, wait
        if not isinstance(num, int) or num < 1:
            raise ValueError(f"{prefix}.slots={num} must be at least 1")
        self.limits = parse_nodes(nodes, self.key)
        if address not in ("auto", "local") and not is_endpoint(address):
            raise ValueError(f"{prefix}.address={address} must be auto, local, or HOST:PORT, as head:6379")
        if address == "local" and self.limits[0] > 1:
            raise ValueError(f"{prefix}.address=local is this machine, but {self.key}={nodes}; name a cluster")
        self._num_cpus, self._num_gpus = num if cpus_per_node is None else cpus_per_node, gpus_per_node or 0
        for key, value, least in (("cpus_per_node", self._num_cpus, 1), ("gpus_per_node", self._num_gpus, 0)):
            if value < least:
                raise ValueError(f"{prefix}.{key}={value} must be at least {least}")
        wanted = {"CPU": self._num_cpus, "GPU": self._num_gpus, **(resources or {})}
        self._bundle = {name: float(value) for name, value in wanted.items() if value}
        self._labels = {name: str(value) for name, value in (labels or {}).items()}
        own = {SET_BY_RAY: os.environ[SET_BY_RAY]} if SET_BY_RAY in os.environ else {}
        if not self._num_gpus:  # Ray may leave all of them visible
            own["CUDA_VISIBLE_DEVICES"] = ""
        self._env = {**own, **{name: str(value) for name, value in (env or {}).items()}}
        self.machines: list[Machine] = []
        self._nodes: list[_Node] = []
        self._keys, self._is_connected = itertools.count(), False
        self._group: PlacementGroup | None = None
        self._is_closed = threading.Event()

    def reserve(self) -> None:
        require_packages(f"{self._prefix.replace('.', '/')}=ray", "ray", "ray")
        import ray
        from ray.util import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._is_connected = connect(f"{self._prefix}.address", self._address)
        self._group = group = reserve(self._prefix, self.limits, self._bundle, self._labels, self._wait)
        hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
        placed = [hosts[node] for _, node in sorted(placement_group_table(group)["bundles_to_node_id"].items())]
        are_unique = len({*placed}) == len(placed)  # several nodes of a cluster may be on one host
        names = placed if are_unique else [f"{name}-{number}" for number, name in enumerate(placed)]
        self.machines = [Machine(name, self._num) for name in names]
        ray.cloudpickle.register_pickle_by_value(starter)
        actors = [
            ray.remote(Starter)
            .options(
                num_cpus=self._num_cpus,
                num_gpus=self._num_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
                max_restarts=-1,  # on the node to which Ray moves the bundle if its node is lost
                max_concurrency=self._num + 4,
            )
            .remote(os.getcwd(), self._env, self.silence_s)
            for number in range(len(names))
        ]
        self._nodes = [_Node(actor) for actor in actors]
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def close(self) -> None:
        """Stop the actors with the processes that they have started, and disconnect from the cluster."""
        if not self._is_connected and self._group is None:
            return
        import ray
        from ray.util import remove_placement_group

        self._is_closed.set()
        if self._group is not None:
            remove_placement_group(self._group)
        if self._is_connected:
            ray.shutdown()

    def find_facts(self, number: int, shared: str) -> HostFacts | str:
        import ray

        words = ("-m", "runner.launchers.host_facts", shared)
        future = self._nodes[number].actor.run.remote(next(self._keys), words, b"", None).future()
        try:
            ended = future.result(ANSWER_S)  # ray.get would wait in C++, also while `close` disconnects
        except ray.exceptions.RayTaskError as error:
            return first_line(error.cause)  # for example, the working directory does not exist there
        except TimeoutError:
            return f"no response within {ANSWER_S:g} s"
        except ray.exceptions.RayError as error:
            return first_line(error)
        facts = read_facts(ended.status, *(each.decode(errors="replace") for each in (ended.output, ended.errors)))
        return replace(facts, num_gpus=self._num_gpus) if isinstance(facts, HostFacts) else facts

    def start(self, number: int, assignment: Assignment, output: IO[bytes] | int, errors: IO[bytes] | int) -> RayAgent:
        """Start the agent of an assignment. output: a file that all nodes see, also for its errors; or a constant."""
        node, key, path = self._nodes[number], next(self._keys), None
        if not isinstance(output, int):
            path = Path(output.name).absolute()
        words, log = ("-m", "runner.launchers.agent"), None if path is None else str(path)
        ended = node.actor.run.remote(key, words, input_of(assignment), log)
        return RayAgent(node, key, ended, path or (None if isinstance(errors, int) else errors))

    def why_lost(self, number: int, status: int, output: str) -> str | None:
        return self._nodes[number].why_lost if status == LOST else None

    def _beat(self) -> None:
        """Show the agents regularly that this process is running."""
        with suppress(Exception):  # the connection is closed
            while not self._is_closed.wait(HEARTBEAT_S):
                for node in self._nodes:
                    node.actor.send.remote(None, bytes([ALIVE]))
