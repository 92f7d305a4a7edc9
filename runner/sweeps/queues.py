"""Jobs of a sweep that a queue runs: checks before the submission, the submission, and their state afterwards."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from runner.config.custom_dirs import searched_dirs
from runner.config.diagnostics.import_target import locate
from runner.config.help.config_tree import ConfigTree
from runner.config.schema import Config
from runner.distributed.environment import RankInfo
from runner.errors import InputError
from runner.launchers.protocol import Queue
from runner.paths import CONF
from runner.records.ledger import JobRecord, read_ledger
from runner.records.run_directory import Request
from runner.sweeps.jobs import Job

UNDECIDED = ("queued", "running")


class PartlyQueued(Exception):
    """Not all jobs have been submitted: the queue refused some of them."""


def check_launchers(
    configs: Sequence[Config], choices: Sequence[Mapping[str, str]], rank_info: RankInfo, adds_jobs: bool
) -> tuple[bool, bool]:
    """Return whether all jobs are for a queue, and whether they are only printed.

    choices: the chosen options of each job's groups. adds_jobs: the sweeper needs results before it adds jobs. Raises
    InputError if the launchers cannot be used in this sweep, and if a queued job could not run in its world.
    """
    from runner.launchers.launch import check_ahead, check_queueable, make_launcher

    launchers = [make_launcher(config) for config in configs]
    jobs = zip(configs, choices, launchers, strict=True)
    queued = [(config, chosen, cast(Queue, launcher)) for config, chosen, launcher in jobs if launcher.queues]
    if any(launcher.started_on_each for launcher in launchers):
        raise InputError(
            "launcher.nodes: each machine would create its own sweep; start the sweep with torchrun on all of them "
            "(torchrun --nnodes ... -m runner -m ...), or with a launcher that queues jobs"
        )
    if not queued:
        return False, False
    named, hydra_launcher = (f"{key}={queued[0][1][key]}" for key in ("launcher", "hydra/launcher"))
    if adds_jobs:
        raise InputError(
            f"{named} queues jobs, but hydra/sweeper=optuna needs the result of each before it proposes the next; "
            "start the sweep inside a job, with launcher=env"
        )
    if rank_info.is_embedded:
        raise InputError(f"{named} queues jobs, but runner.sweep waits for local jobs; start the sweep in a shell")
    if not rank_info.may_start_processes:
        raise InputError(
            f"{named} queues jobs, but {rank_info.source} has started this process as rank {rank_info.rank} of "
            f"{rank_info.world_size}, and each rank would queue them; use only one of the two"
        )
    if hydra_launcher != "hydra/launcher=basic":
        raise InputError(f"{hydra_launcher} runs jobs on this machine, but {named} queues them; remove one")
    messages: list[str] = []
    for config, chosen, launcher in queued:
        try:
            check_queueable(config, chosen)
            if launcher.world_size is not None:
                check_ahead(config, chosen, launcher.world_size)
        except InputError as error:
            messages += [message for message in error.messages if message not in messages]
    if messages:
        raise InputError(*messages)
    num_printed = sum(launcher.dry_run for _, _, launcher in queued)
    if 0 < num_printed < len(configs):
        raise InputError(
            f"launcher.dry_run=true: {num_printed} of {len(configs)} jobs would be printed and the others run; set it "
            "for all"
        )
    return len(queued) == len(configs), num_printed > 0


def submit(queued: Sequence[tuple[Job, Config, Request]], directory: Path, record: Callable[..., None]) -> bool:
    """Submit the jobs, as many at once as their queue accepts. Return True if they may still be in the queue.

    record(job, state, **facts) is called for each submitted job. Raises InputError if none was accepted, and
    PartlyQueued if only some were.
    """
    from runner.launchers.launch import make_launcher

    groups: dict[str, list[tuple[Job, Config, Request]]] = {}  # a submission has one set of launcher options
    for each in queued:
        groups.setdefault(json.dumps(each[1].launcher, sort_keys=True, default=str), []).append(each)
    queues, num_queued = [], 0
    for group in groups.values():
        config = group[0][1]
        queue = cast(Queue, make_launcher(config))
        queues.append(queue)
        size = queue.max_jobs() or len(group)
        for batch in (group[first : first + size] for first in range(0, len(group), size)):
            try:
                names = queue.submit_sweep([(config, request) for _, config, request in batch], directory)
            except InputError as error:
                if not num_queued:
                    raise
                raise PartlyQueued(
                    f"{error}\n{num_queued} of {len(queued)} jobs are queued, {len(queued) - num_queued} are not; "
                    f"python -m runner -m resume={directory} submits those that are not"
                ) from None
            num_queued += len(names)
            for (job, _, _), name in zip(batch, names, strict=False):  # printed jobs have no names
                record(job, "queued", queued_as=name, queue=config.launcher["_target_"])
    have_ended = [queue.wait_for_sweep() for queue in queues]
    return bool(queues) and not all(have_ended)


def find_ended(jobs: Sequence[JobRecord]) -> set[str]:
    """Return the names of the jobs that have left their queues. Raises InputError if a queue cannot be queried."""
    names: dict[str, list[str]] = {}
    for job in jobs:
        if job.queued_as:
            names.setdefault(job.queue, []).append(job.queued_as)
    return {name for queue, queued_as in names.items() for name in _queue_class(queue).find_ended(queued_as)}


def read_jobs_and_queues(directory: Path) -> list[JobRecord]:
    """Return the jobs of the ledger. A job that has left its queue without an outcome has failed.

    The ledger stands if a queue cannot be queried on this machine.
    """
    jobs = read_ledger(directory)
    try:
        ended = find_ended([job for job in jobs if job.state in UNDECIDED])
    except ValueError:
        return jobs
    if not ended:
        return jobs
    jobs = read_ledger(directory)  # a job may have recorded its outcome before its queue was queried
    for job in jobs:
        if job.queued_as in ended and job.state in UNDECIDED:
            log = _queue_class(job.queue).log_file(directory, job.queued_as)
            job.state = "failed"
            job.error = f"job {job.queued_as} left its queue before its run recorded an outcome" + (
                f"; its log is {log}" if log else ""
            )
    return jobs


def _queue_class(target: str) -> type[Queue]:
    """Return the class of a queue. Raises InputError unless an option of `launcher` names it.

    The ledger is data, possibly of another user, and must not choose what is imported.
    """
    tree = ConfigTree([*map(Path, searched_dirs()), CONF])
    targets = [tree.merged("launcher", option).targets.get("") for option in tree.groups["launcher"]]
    if target not in targets:
        raise InputError(f"jobs are in a queue of {target}, which no launcher has; add --config-dir=DIR that has it")
    return cast(type[Queue], locate(target))
