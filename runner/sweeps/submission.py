"""The jobs of a sweep that a queue is to run: checked before the first is submitted, and submitted together."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from runner.config.schema import Config
from runner.distributed.environment import RankInfo
from runner.errors import InputError
from runner.launchers.protocol import Queue
from runner.launchers.slurm.queue import group_by_launcher
from runner.runs.run_directory import Request
from runner.sweeps.plan import Job


class PartlyQueued(Exception):
    """A queue has taken some of the jobs, and refused others."""


def check_launchers(
    configs: Sequence[Config], choices: Sequence[Mapping[str, str]], rank_info: RankInfo, asks: bool
) -> tuple[bool, bool]:
    """Whether all jobs are for a queue, and whether they are only to be shown.

    Raises InputError where a sweep cannot start its jobs so, and where one would wait in a queue only to be refused.
    choices: the options that each job takes of its groups. asks: the sweeper needs each result before the next job.
    """
    from runner.launchers.launch import check_ahead, check_queueable, make_launcher

    launchers = [make_launcher(config) for config in configs]
    jobs = zip(configs, choices, launchers, strict=True)
    queued = [(config, own, cast(Queue, launcher)) for config, own, launcher in jobs if launcher.queues]
    if asks and queued:
        raise InputError(
            "launcher=slurm queues jobs, and hydra/sweeper=optuna needs the result of each before it asks for the "
            "next; start the sweep inside a job, with launcher=env"
        )
    if any(launcher.started_on_each for launcher in launchers):
        raise InputError(
            "launcher.nodes: each machine would make a sweep of its own; start the sweep by torchrun on all of "
            "them (torchrun --nnodes ... -m runner -m ...), or with launcher=slurm"
        )
    if not queued:
        return False, False
    named = f"launcher={queued[0][1]['launcher']}"
    if rank_info.is_guest:
        raise InputError(f"{named} queues jobs, and runner.sweep waits for what runs here; type the sweep in a shell")
    if not rank_info.may_start_processes:
        raise InputError(
            f"{named} queues jobs, but {rank_info.found} has started this process as rank {rank_info.rank} of "
            f"{rank_info.world_size}, and each rank would; leave one of the two out"
        )
    if (hydra_launcher := queued[0][1]["hydra/launcher"]) != "basic":
        raise InputError(
            f"hydra/launcher={hydra_launcher} runs jobs on this machine, and {named} queues them; drop one"
        )
    messages: list[str] = []
    for config, own, launcher in queued:
        try:
            check_queueable(config, own)
            if launcher.world_size is not None:
                check_ahead(config, own, launcher.world_size)
        except InputError as error:
            messages += [message for message in error.messages if message not in messages]
    if messages:
        raise InputError(*messages)
    shown = [launcher.dry_run for _, _, launcher in queued]
    if any(shown) and not (all(shown) and len(shown) == len(configs)):
        raise InputError(
            f"launcher.dry_run=true: of {len(configs)} jobs {sum(shown)} would be shown and the others run; show all"
        )
    return len(queued) == len(configs), all(shown)


def submit(queued: Sequence[tuple[Job, Config, Request]], directory: Path, tell: Callable[..., None]) -> bool:
    """Submit the jobs, as many together as the queue takes. Returns whether they are still there.

    tell(job, state, **facts) hears of each that was taken. Raises InputError where none was, PartlyQueued where some.
    """
    from runner.launchers.launch import make_launcher

    queues, taken = [], 0
    for same in group_by_launcher(queued):
        queues.append(cast(Queue, make_launcher(same[0][1])))
        most = queues[-1].max_jobs()
        for part in (same[first : first + most] for first in range(0, len(same), most)):
            try:
                names = queues[-1].submit_sweep([(config, request) for _, config, request in part], directory)
            except InputError as error:
                if not taken:
                    raise
                raise PartlyQueued(
                    f"{error}\n{taken} of {len(queued)} jobs are queued, {len(queued) - taken} are not; "
                    f"python -m runner -m resume={directory} submits those"
                ) from None
            for (job, _, _), name in zip(part, names, strict=False):  # none of jobs that are only shown
                tell(job, "queued", queued_as=name)
            taken += len(names)
    waits = [queue.wait_for_sweep() for queue in queues]
    return bool(queues) and not all(waits)
