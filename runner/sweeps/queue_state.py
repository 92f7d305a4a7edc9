"""The ledger of a sweep, and what a queue says of the jobs whose runs have not said how they ended."""

import shutil
from pathlib import Path

from runner.launchers.slurm.queue import ended
from runner.runs.ledger import JobRecord, read_ledger

UNDECIDED = ("queued", "running")


def read_standing(directory: Path) -> list[JobRecord]:
    """As read_ledger; where Slurm can be asked, a job that it no longer has, and that did not say why, has failed."""
    jobs = read_ledger(directory)
    asked = [job.queued_as for job in jobs if job.queued_as and job.state in UNDECIDED]
    if not asked or shutil.which("scontrol") is None or not (over := ended(asked)):
        return jobs
    jobs = read_ledger(directory)  # one may have ended well, after the ledger was read and before Slurm was asked
    for job in jobs:
        if job.queued_as in over and job.state in UNDECIDED:
            job.state = "failed"
            job.error = (
                f"Slurm's job {job.queued_as} ended before the run could say why; its log is "
                f"{directory / 'slurm' / f'{job.queued_as}.log'}"
            )
    return jobs
