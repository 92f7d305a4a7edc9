"""The processes exist already: a launcher has started them, or there is one."""

from runner.config.schema import Config
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.rendezvous import join
from runner.launchers.job import run_job
from runner.runs.run_directory import Request


class Env:
    """launcher=env: the processes exist already; this one runs its part of the job."""

    starts_processes = False
    queues = False
    started_on_each = False
    world_size: int | None = None

    def __init__(self, join_timeout_s: float = 120.0):
        self.join_timeout_s = checked_timeout(join_timeout_s)

    def launch(self, config: Config, request: Request, rank_info: RankInfo) -> dict[str, float]:
        return run_job(config, request, join(rank_info, as_backend(config.backend), self.join_timeout_s))


def checked_timeout(join_timeout_s: float) -> float:
    """The seconds that a process waits for the others to appear. Raises ValueError for none at all."""
    if join_timeout_s <= 0:
        raise ValueError(f"launcher.join_timeout_s={join_timeout_s:g} must be above 0 seconds; try 120")
    return join_timeout_s
