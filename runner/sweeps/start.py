"""A sweep as a whole: from what was typed to the table at its end."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.errors import InstantiationException

from runner.config.compose import compose
from runner.config.resume import Typed
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.errors import InputError, Preempted, tell
from runner.runs.ledger import SweepRecord, let_go
from runner.sweeps.plan import first_job
from runner.sweeps.submission import PartlyQueued
from runner.sweeps.summary import conclude
from runner.sweeps.sweep import Sweep, being_current

STOPPED = 143  # as whom a job that a signal has stopped ends Hydra's loop over the jobs


@dataclass(frozen=True)
class Swept:
    """What has come of a sweep; directory: None where it was only shown."""

    directory: str | None
    status: int  # to exit with


def run_sweep(typed: Typed, rank_info: RankInfo, command: Sequence[str]) -> Swept:
    """Run the sweep that was typed. Raises InputError with nothing written, and Preempted.

    command: what is recorded as having started it.
    """
    owner = GlobalHydra.instance().hydra
    assert owner is not None
    # Hydra's own look at a sweep leaves out what has several values, and then does not know the keys of a swept choice.
    first = first_job(typed.overrides, GlobalHydra.instance().config_loader())
    base = compose(first)
    launcher = str(base.hydra.runtime.choices["hydra/launcher"])
    if not rank_info.may_start_processes and launcher != "basic":
        raise InputError(
            f"hydra/launcher={launcher} starts jobs itself, but {rank_info.found} has started this process as rank "
            f"{rank_info.rank} of {rank_info.world_size}; leave one of the two out"
        )
    record = SweepRecord(list(typed.recorded), list(typed.config_dirs), list(command), {})
    arguments = [word for word in typed.overrides if not word.lstrip("+~").startswith(("hydra.", "hydra/"))]
    sweep = Sweep(rank_info, record, typed.directory, dict(base.backend), arguments)
    try:
        with being_current(sweep):
            owner.multirun("config", sweep, first, with_log_configuration=False)
        return Swept(None if sweep.shows else sweep.directory, _end(sweep))
    except InstantiationException as error:  # of the sweeper or the launcher; a job's own is that job's failure
        key = str(error).rpartition("full_key: ")[2].strip()
        raise InputError(f"{key}: {error.__cause__ or error}".splitlines()[0]) from None
    except SystemExit as error:
        if error.code != STOPPED:
            raise
        raise Preempted(f"{sweep.directory} was stopped", str(sweep.directory)) from None
    finally:
        if sweep.directory is not None:
            let_go(Path(sweep.directory))


def _end(sweep: Sweep) -> int:
    """Queue what is for a queue, and tell what has become of the jobs. Returns the exit status."""
    try:
        waiting = sweep.submit()
    except PartlyQueued as error:
        tell(str(error).splitlines())
        return 1
    if sweep.shows:
        return 0
    if waiting:
        print(f"\n`python -m runner task=report run={sweep.directory}` says how they stand", flush=True)
        return 0
    failed = json.loads(sweep.share("failed", lambda: json.dumps(conclude(Path(str(sweep.directory))))))
    if sweep.rank_info.world_size > 1:
        from runner.distributed.rendezvous import join

        join(sweep.rank_info, as_backend(sweep.backend)).ending.close()
    return 1 if failed else 0
