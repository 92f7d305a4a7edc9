"""What is known of a launcher, whichever was chosen."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from runner.config.schema import Config
from runner.distributed.environment import RankInfo
from runner.runs.run_directory import Request


class Launcher(Protocol):
    """How the processes of one run come to be; a file of runner/launchers and a YAML file of conf/launcher."""

    starts_processes: bool
    queues: bool  # jobs of a sweep are not launched one by one but submitted together: see Queue
    started_on_each: bool  # the same command is started on several machines
    world_size: int | None  # of the processes that it starts; None where that is not known before
    join_timeout_s: float  # that a process waits for the others to appear

    def launch(self, config: Config, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Run the job to its end. Returns rank 0's metrics.

        Raises InputError, Preempted or JobFailed, as runner.launchers.job.run_job does.
        """


class Queue(Launcher, Protocol):
    """A launcher that hands jobs to a queue, which runs them when it likes."""

    dry_run: bool  # jobs are shown, and not submitted

    def max_jobs(self) -> int:
        """How many `submit_sweep` takes at once."""

    def submit_sweep(self, jobs: Sequence[tuple[Config, Request]], directory: Path) -> list[str]:
        """Submit the jobs of a sweep, which is kept in the directory. Returns their names in the queue."""

    def wait_for_sweep(self) -> bool:
        """Return once they have ended, if that is asked for. Returns whether it is."""
