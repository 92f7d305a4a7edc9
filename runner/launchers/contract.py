"""The contracts of a launcher, which starts the processes of a run, and of a queue, which starts them later."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from runner.config.request import Request
from runner.distributed.environment import JOIN_TIMEOUT_S, RankInfo


class Launcher(ABC):
    """How the processes of one run are started; one file of runner/launchers and one YAML file of conf/launcher.

    A launcher derives from this class and overrides only the attributes that differ.
    """

    starts_processes: bool = False  # the launcher starts the ranks; otherwise the calling process is one of them
    queues: bool = False  # the jobs of a sweep are submitted together instead of launched one by one; see `Queue`
    started_on_each: bool = False  # the same command is started on several machines
    uses_machines: bool = False  # the processes are on machines of runner.launchers.machines
    is_elastic: bool = False  # the other ranks continue if one is killed; see `elastic_every_steps`
    is_remote: bool = False  # the run is on other machines, and `outputs` is a path there
    world_size: int | None = None  # number of processes that the launcher starts; None if it is not known in advance
    join_timeout_s: float = JOIN_TIMEOUT_S  # that a process waits for the others to join

    @abstractmethod
    def launch(self, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Run the job to its end. Return rank 0's metrics, or raise as runner.jobs.job.run_job does."""


class Queue(Launcher):
    """A launcher that submits jobs to a queue, which starts them later.

    A queue derives from this class, and defines `launch`, `submit_sweep` and `find_ended`. `launch` submits a single
    run. The job starts `python -m runner` with the overrides of the request and with its directory in RUNNER_DIRECTORY,
    which keeps the run from being submitted again, or with another launcher and `run_id`.
    """

    starts_processes: bool = True
    queues: bool = True
    dry_run: bool = False  # the jobs are printed instead of submitted, and nothing is written

    @abstractmethod
    def submit_sweep(self, jobs: Sequence[Request], directory: Path) -> list[str]:
        """Submit jobs of the sweep in this directory. Return a name for each; [] if `dry_run`.

        All jobs have the options of this launcher, and all or none of them have `elastic_every_steps`. Raises
        InputError if the queue refuses the jobs.
        """

    @classmethod
    @abstractmethod
    def find_ended(cls, names: Sequence[str]) -> set[str]:
        """Return the named jobs that neither wait nor run; an empty set if the queue does not respond.

        Raises InputError if this machine cannot query the queue.
        """

    def max_jobs(self) -> int | None:
        """Return the maximum number of jobs of one `submit_sweep`; None if it is unlimited."""
        return None

    def wait_for_sweep(self) -> bool:
        """Wait until the submitted jobs have ended, if that is configured. Return True if the method waited."""
        return False

    @classmethod
    def log_file(cls, directory: Path, name: str) -> Path | None:
        """Return the path of the log of a job of the sweep in this directory; None if there is no such file."""
        return None
