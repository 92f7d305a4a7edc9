"""What the entry knows of a launcher."""

from typing import Protocol

from runner.config import Config
from runner.launchers.env import Place
from runner.run_dir import Request


class Launcher(Protocol):
    """How the processes of one run come to be; a file of runner/launchers and a YAML file of conf/launcher."""

    starts_processes: bool
    join_timeout_s: float  # that a process waits for the others to appear

    def launch(self, config: Config, request: Request, place: Place) -> dict[str, float]:
        """Run the job to its end. Returns rank 0's metrics.

        Raises InputError, Preempted or JobFailed, as runner.job.run_job does.
        """
