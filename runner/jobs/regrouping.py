"""A job whose ranks continue in another world if one of them is lost, or another process joins: elastic_every_steps."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from runner.config.request import Request
from runner.distributed.failures.peer_failure import PEERS_TIMEOUT_S, wait_until
from runner.distributed.membership import JobEnded, Regroup
from runner.distributed.world import World
from runner.distributed.world_store import WorldStore

Metrics = dict[str, float]


def run_in_worlds(run: Callable[[Request, World], Metrics], request: Request, world: World) -> Metrics:
    """Return what `run` returns in the last world of the job, after all those in which it raised Regroup.

    Raises what `run` raises in that world, or `World.regroup`.
    """
    if request.config.elastic_every_steps is not None:
        world.be_elastic()
    with suppress(JobEnded):
        while True:
            is_over = True
            try:
                return run(request, world)
            except Regroup:
                is_over = False
            finally:
                if is_over and world.membership is not None:
                    world.membership.end()
            world.regroup(partial(_failure_in, world.store))
    return {}


def begin(world: World) -> None:
    """From now on, the job continues without a rank that is lost. Called once the first process group is formed."""
    if world.membership is not None and not world.membership.has_begun:
        world.membership.begin([*world.local_ranks.all.values()])


def has_lost_ranks(follows: bool, world: World) -> bool:
    """Return True if a failure is due to the loss of another rank, or of this one, and the job continues without it.

    follows: the failure of another rank may be the cause.
    """
    membership, job = world.membership, world.store.job
    if membership is None or not membership.has_begun:
        return False
    if job is None:  # the store does not respond: `World.regroup` finds out if the next world has this rank
        return True
    try:
        if membership.is_over():
            return True
        if follows:  # a rank that raises an exception reports it before it leaves
            wait_until(
                lambda: bool(membership.lost(anywhere=True)) or membership.is_over() or job.check(["failure"]),
                PEERS_TIMEOUT_S,
            )
            return not job.check(["failure"])
    except RuntimeError:  # as above
        return True
    return False


def _failure_in(store: WorldStore) -> str | None:
    """Return the failure of a rank of this world; None if none has failed."""
    job = store.job
    return json.loads(job.get("failure"))[0] if job is not None and job.check(["failure"]) else None
