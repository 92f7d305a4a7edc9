"""torchrun's elastic agent, run by the runner itself: on this machine, or as one of several."""

import logging
import multiprocessing
import os
import sys
import uuid
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from runner.config import Config, InputError
from runner.launchers.env import Place, checked_timeout, find_place
from runner.launchers.network import address_towards
from runner.launchers.rank import PRELOADED, Outcome, conclude, how_it_died, passing_signals_on, run_rank
from runner.run_dir import Request

RESTART = 75  # exit status by which a rank asks its agent for a new world; sysexits.h calls it a temporary failure


class Torchrun:
    """launcher=torchrun: an agent that starts nproc_per_node processes, and the world again when one dies.

    nodes: how many agents there are, each started by this same command; min:max where the world may lose and gain some.
    rdzv_endpoint: HOST:PORT of the node where they meet.
    """

    starts_processes = True

    def __init__(
        self,
        nproc_per_node: int = 2,
        nodes: int | str = 1,
        rdzv_endpoint: str | None = None,
        rdzv_id: str = "runner",
        max_restarts: int = 0,
        join_timeout_s: float = 120.0,
    ):
        if nproc_per_node < 1:
            raise ValueError(f"launcher.nproc_per_node={nproc_per_node} must be at least 1; try 2")
        if max_restarts < 0:
            raise ValueError(f"launcher.max_restarts={max_restarts} must be at least 0")
        self.min_nodes, self.max_nodes = _bounds(nodes)
        if self.max_nodes > 1 and not rdzv_endpoint:
            raise ValueError(f"launcher.nodes={nodes} needs launcher.rdzv_endpoint=HOST:PORT, where the nodes meet")
        if self.max_nodes == 1 and rdzv_endpoint:
            raise ValueError(
                f"launcher.rdzv_endpoint={rdzv_endpoint} has an effect on several nodes; add launcher.nodes"
            )
        host, _, port = (rdzv_endpoint or "localhost:0").rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"launcher.rdzv_endpoint={rdzv_endpoint} must be HOST:PORT, as node1:29400")
        self.host, self.port, self.rdzv_id = host.strip("[]"), int(port), rdzv_id
        self.nproc_per_node, self.max_restarts = nproc_per_node, max_restarts
        self.join_timeout_s = checked_timeout(join_timeout_s)

    def launch(self, config: Config, request: Request, place: Place) -> dict[str, float]:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the runner tells, and once
        alone = self.max_nodes == 1
        multiprocessing.set_forkserver_preload([*PRELOADED, "runner.launchers.torchrun"])
        launch_config = LaunchConfig(
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            nproc_per_node=self.nproc_per_node,
            run_id=uuid.uuid4().hex if alone else self.rdzv_id,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{self.host}:{self.port}",
            rdzv_configs={"join_timeout": int(self.join_timeout_s), "read_timeout": int(self.join_timeout_s)},
            max_restarts=self.max_restarts,
            monitor_interval=0.05,
            start_method="forkserver",
            local_addr="localhost" if alone else address_towards(self.host),
            signals_to_handle="SIGHUP,SIGQUIT",  # the others are passed on, so that the ranks save
        )
        outcomes: dict[int, Outcome] = {}
        died = None
        try:
            with passing_signals_on():
                outcomes = elastic_launch(launch_config, _run_rank)(config, request, self.join_timeout_s)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            died = None if failure.exitcode == RESTART else how_it_died(rank, failure.exitcode)
        except RendezvousError as error:
            raise InputError(
                f"launcher.rdzv_endpoint={self.host}:{self.port}: {self.max_nodes} nodes did not meet there within "
                f"launcher.join_timeout_s={self.join_timeout_s:g} ({str(error).splitlines()[0]}); is every one started?"
            ) from None
        return conclude(next(iter(outcomes.values()), None), died)


def _run_rank(config: Config, request: Request, join_timeout_s: float) -> Outcome:
    """One rank's process, whose place the agent has put into its environment."""
    place = find_place()
    outcome, leave = run_rank(config, request, place, join_timeout_s)
    leave()
    if "failed" in outcome and place.restart < int(os.environ["TORCHELASTIC_MAX_RESTARTS"]):
        sys.exit(RESTART)
    return outcome


def _bounds(nodes: Any) -> tuple[int, int]:
    first, _, last = str(nodes).partition(":")
    if not first.isdigit() or not (last or first).isdigit() or not 1 <= int(first) <= int(last or first):
        raise ValueError(f"launcher.nodes={nodes} must be a number of at least 1, or MIN:MAX, as 2 or 1:4")
    return int(first), int(last or first)
