"""One world after another, on one machine, until the job has come to its end or is given up."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from runner.distributed.hung_rank import ENDED
from runner.errors import JobFailed
from runner.launchers.rank_process import Outcome, conclude
from runner.launchers.restarts import Restarts, newest_step
from runner.runs.run_directory import Request

# Runs one world to its end. Returns what its first rank said, and which rank died of what.
StartWorld = Callable[[Request], tuple[Outcome | None, str | None]]


def run_again_while_it_gets_on(
    start: StartWorld, request: Request, max_restarts: int, received: Sequence[str]
) -> dict[str, float]:
    """Run the job to its end, in one run directory however often it is started. Returns rank 0's metrics.

    received: the signals that have asked for an end. Raises as runner.launchers.rank_process.conclude.
    """
    restarts = Restarts(max_restarts)
    with TemporaryDirectory() as folder:
        tells = Path(request.tells or Path(folder, "directory"))
        request = replace(request, tells=str(tells))
        while True:
            step = newest_step(request.directory)
            outcome, died = start(request)
            if ENDED in (outcome or {}).get("failed", ""):
                died = None  # the others ended it, and have told why
            if tells.exists():
                request = replace(request, directory=tells.read_text())
            failure = died or (outcome or {}).get("failed")
            if max_restarts == 0 or received or not failure or "metrics" in (outcome or {}):
                return conclude(outcome, died, received)
            if why := restarts.refused(failure, step, request.directory):
                try:
                    return conclude(outcome, died, received)
                except JobFailed as error:
                    raise JobFailed(f"{error}\n{why}") from None


def told_directory(request: Request) -> str | None:
    """The run's, as far as it is known on this node."""
    return Path(request.tells).read_text() if request.tells and Path(request.tells).exists() else request.directory
