"""Jobs of a sweep that a queue runs: their checks, their submission, and their state afterwards."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from runner.config.custom_dirs import searched_dirs
from runner.config.diagnostics.import_target import locate
from runner.config.help.config_tree import ConfigTree
from runner.config.request import Request
from runner.config.schema import Config
from runner.config.validate import check_outputs
from runner.distributed.environment import RankInfo
from runner.errors import InputError, JobFailed, print_messages
from runner.launchers.contract import Queue
from runner.paths import CONF
from runner.records.ledger import JobRecord, read_ledger
from runner.records.run_record import DONE, LOST, RUNNING

UNDECIDED = ("queued", RUNNING, LOST)


def check_launchers(
    jobs: Sequence[tuple[Config, Mapping[str, str]]], rank_info: RankInfo, adds_jobs: bool
) -> tuple[bool, bool]:
    """Return whether the jobs are for a queue, and whether they are only printed.

    jobs: the configuration of each job, with the chosen option of each group. adds_jobs: the sweeper needs results
    before it adds jobs. Raises InputError if the launchers cannot be used in this sweep, or if a queued job could not
    run with its world size.
    """
    from runner.launchers.launch import check_ahead, check_elastic, check_queueable, make_launcher

    launchers = [make_launcher(config.launcher, config.debug) for config, _ in jobs]
    if any(launcher.started_on_each for launcher in launchers):
        raise InputError(
            "launcher.nodes: each machine would create its own sweep; use torchrun --nnodes ... -m runner -m ..."
        )
    for (_, chosen), launcher in zip(jobs, launchers, strict=True):
        if launcher.uses_machines and chosen["hydra/launcher"] != "basic":
            raise InputError(
                f"launcher={chosen['launcher']} starts a job on several machines; with hydra/launcher="
                f"{chosen['hydra/launcher']}, each job needs a launcher for one machine, such as launcher=spawn"
            )
    queues = [cast(Queue, launcher) for launcher in launchers if launcher.queues]
    if not queues:
        return False, False
    named = next(chosen for (_, chosen), launcher in zip(jobs, launchers, strict=True) if launcher.queues)
    conflicts = {
        "hydra/sweeper=optuna needs the result of each before it proposes the next": adds_jobs,
        "runner.sweep waits for local jobs": rank_info.is_embedded,
        f"{rank_info.source} has started this process as rank {rank_info.rank} of {rank_info.world_size}": (
            not rank_info.may_start_processes
        ),
        f"hydra/launcher={named['hydra/launcher']} starts jobs itself": named["hydra/launcher"] != "basic",
        "other jobs have another launcher": len(queues) < len(launchers),
        "launcher.dry_run differs between them": len({queue.dry_run for queue in queues}) > 1,
    }
    for conflict, applies in conflicts.items():
        if applies:
            raise InputError(f"launcher={named['launcher']} queues jobs, but {conflict}; use only one of the two")
    for (config, chosen), queue in zip(jobs, queues, strict=True):
        task = locate(config.task["_target_"])
        if queue.is_remote and (not task.trains or task.reads_run):  # its results would not be in the job's directory
            raise InputError(
                f"launcher={chosen['launcher']}: a sweep only trains, and task={chosen['task']} does not; type a "
                "command for each job"
            )
        if queue.is_remote and not queue.dry_run and (messages := check_outputs(config.outputs)):
            raise InputError(*messages)  # the ledger is on this machine
        check_queueable(config.task, chosen)
        check_elastic(config, chosen, queue)
        if queue.world_size is not None:
            check_ahead(config, chosen, queue.world_size)
    return True, queues[0].dry_run


def submit(queued: Sequence[tuple[JobRecord, Request]], directory: Path, record: Callable[..., None]) -> bool:
    """Submit the jobs, as many at once as their queue accepts. Return True if they may still be in the queue.

    record(job, state, **facts) is called for each submitted job. Raises InputError if no job was accepted. Prints a
    message and raises JobFailed if only some were accepted, or if the queue did not respond and may have accepted some.
    """
    from runner.launchers.launch import make_launcher

    groups: dict[str, list[tuple[JobRecord, Request]]] = {}  # by launcher options, and whether ranks may be lost
    for job, request in queued:
        is_elastic = request.config.elastic_every_steps is not None
        options = json.dumps([request.config.launcher, is_elastic], sort_keys=True, default=str)
        groups.setdefault(options, []).append((job, request))
    queues, num_queued = [], 0
    for group in groups.values():
        config = group[0][1].config
        queue = cast(Queue, make_launcher(config.launcher, config.debug))
        queues.append(queue)
        size = queue.max_jobs() or len(group)
        for batch in (group[first : first + size] for first in range(0, len(group), size)):
            try:
                names = queue.submit_sweep([request for _, request in batch], directory)
            except InputError as error:
                if not num_queued:
                    raise
                summary = f"{num_queued} of {len(queued)} jobs are queued"
                resume = f"python -m runner -m resume={directory} submits those that are not"
                print_messages([*error.messages, f"{summary}; {resume}"])
                raise JobFailed(summary) from None
            num_queued += len(names)
            for (job, _), name in zip(batch, names, strict=False):  # printed jobs have no names
                record(job, "queued", queued_as=name, queue=config.launcher["_target_"])
    have_ended = [queue.wait_for_sweep() for queue in queues]
    return bool(queues) and not all(have_ended)


def ended_in_queues(jobs: Sequence[JobRecord]) -> set[str]:
    """Return the names of the jobs that have left their queues. Raises InputError if a queue cannot be queried."""
    names: dict[str, list[str]] = {}
    for job in jobs:
        if job.queued_as:
            names.setdefault(job.queue, []).append(job.queued_as)
    return {name for queue, queued_as in names.items() for name in _queue_class(queue).find_ended(queued_as)}


def find_unfinished(path: Path, recorded: Sequence[JobRecord], num_added: int) -> list[JobRecord]:
    """Return the jobs of a resumed sweep that are neither done nor in a queue, and print their number."""
    left = [job for job in recorded if job.state not in DONE]
    ended = ended_in_queues(left)
    unfinished = [job for job in left if job.queued_as in {None, *ended}]
    if recorded:
        num_queued = len(left) - len(unfinished)
        done = f"{len(recorded) - len(left)} jobs are done" + (f", {num_queued} in the queue" if num_queued else "")
        print(f"resuming {path}: {done}, {len(unfinished)} unfinished, {num_added} new", flush=True)
    return unfinished


def read_jobs_and_queues(directory: Path) -> list[JobRecord]:
    """Return the jobs of the ledger. The state of a job that left its queue without an outcome is failed.

    If a queue cannot be queried on this machine, the states are those of the ledger.
    """
    jobs = read_ledger(directory)
    try:
        ended = ended_in_queues([job for job in jobs if job.state in UNDECIDED])
    except ValueError:
        ended = set()
    if ended:
        jobs = read_ledger(directory)  # again: a job may have recorded its outcome before its queue was queried
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

    The ledger is data, possibly of another user, so it must not select code that is imported.
    """
    tree = ConfigTree([*map(Path, searched_dirs()), CONF])
    targets = [tree.merged("launcher", option).targets.get("") for option in tree.groups["launcher"]]
    if target not in targets:
        raise InputError(f"{target} has queued jobs, but no option of launcher names it; add its --config-dir=DIR")
    return cast(type[Queue], locate(target))
