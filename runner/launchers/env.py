"""launcher=env: the ranks exist already, or the world is one process."""

from typing import Any

from runner.config.request import Request
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.rendezvous import join
from runner.jobs.job import run_job
from runner.launchers.contract import Launcher


class Env(Launcher):
    """Run the job in this process, as the rank that the environment describes."""

    def __init__(self, join_timeout_s: float = 120.0):
        check_options(join_timeout_s)
        self.join_timeout_s = join_timeout_s

    def launch(self, request: Request, rank_info: RankInfo) -> dict[str, float]:
        return run_job(request, join(rank_info, as_backend(request.config.backend), self.join_timeout_s))


def check_options(join_timeout_s: float, max_restarts: int = 0, **counts: int | None) -> None:
    """Raise ValueError if an option of a launcher is too small. Each of the counts must be at least 1, or None."""
    if join_timeout_s <= 0:
        raise ValueError(f"launcher.join_timeout_s={join_timeout_s:g} must be above 0 seconds; try 120")
    if max_restarts < 0:
        raise ValueError(f"launcher.max_restarts={max_restarts} must be at least 0")
    for key, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"launcher.{key}={value} must be at least 1")


def check_gpus(nproc_per_node: int, gpus_per_node: int | None) -> None:
    """Raise ValueError if a node has GPUs, but not one for each of its processes."""
    if gpus_per_node and gpus_per_node < nproc_per_node:
        raise ValueError(
            f"launcher.nproc_per_node={nproc_per_node} needs a GPU each, but launcher.gpus_per_node={gpus_per_node} "
            "is less; use equal values"
        )


def check_restarts(given: str, min_nodes: int, max_nodes: int, max_restarts: int) -> None:
    """Raise ValueError if a run is to continue without a lost machine, but must not restart. given: as key=value."""
    if min_nodes < max_nodes and not max_restarts:
        raise ValueError(
            f"{given} needs launcher.max_restarts, because the ranks start again without those of a lost machine; try "
            "launcher.max_restarts=3"
        )


def parse_nodes(nodes: Any, key: str = "launcher.nodes") -> tuple[int, int]:
    """Return the minimum and maximum number of nodes. Raise ValueError. key: for messages."""
    first, _, last = str(nodes).partition(":")
    if not first.isdigit() or not (last or first).isdigit() or not 1 <= int(first) <= int(last or first):
        raise ValueError(f"{key}={nodes} must be a number of at least 1, or MIN:MAX, as 2 or 1:4")
    return int(first), int(last or first)
