"""Copies of the whole state in the memory of each rank, from which a run continues when ranks are lost or join."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runner.checkpoints.layout import TrainState
from runner.checkpoints.saved_state import LocalState, SavedState
from runner.checkpoints.shard_file import LocalChunk, SavedTensor
from runner.checkpoints.snapshot import Snapshot, writing_all
from runner.distributed.membership import Copy, Regroup
from runner.distributed.world import World
from runner.training.callbacks.contract import Callbacks
from runner.training.mode import ParallelModel


@dataclass
class StateCopies:
    """Copies the state before every n-th step, and lets the ranks regroup when another process waits to join.

    Two copies are kept, because a rank may be lost while others have made a copy that it has not made. The older one is
    dropped as soon as a vote of all ranks shows that each of them has the newer one.
    """

    every_steps: int | None  # None: the world is not elastic, and nothing is copied
    parallel_model: ParallelModel
    callbacks: Callbacks
    world: World
    _snapshots: list[Snapshot] = field(default_factory=lambda: [Snapshot(), Snapshot()])
    _is_awaited: bool = False  # as the vote of the last step has found: another process waits to join

    def is_awaited(self) -> bool:
        """Return True if this rank knows of a process that waits to join: this rank's part in the vote of a step."""
        return self.world.membership is not None and self.world.membership.is_awaited()

    def after_vote(self, is_awaited_on_any: bool) -> None:
        """Adopt the result of a vote of all ranks."""
        self._is_awaited |= is_awaited_on_any
        if self.world.membership is not None:
            self.world.membership.confirm()

    def before_step(self, state: TrainState) -> None:
        """Copy the state if it is due. Raises Regroup on all ranks if a process waits to join."""
        membership = self.world.membership
        if membership is None or self.every_steps is None:
            return
        copies = membership.copies
        is_due = not copies or state.step % self.every_steps == 0 or self._is_awaited
        if is_due and not (copies and copies[-1].step == state.step):
            self.world.readings.flush()  # what earlier steps log is not logged again
            with writing_all():
                local = self.callbacks.state(self.parallel_model.state())
            self._snapshots.reverse()  # the memory of the older copy is written
            local = self._snapshots[0].of(local)
            local = replace(local, facts=json.loads(json.dumps(local.facts)))  # as they would be read from a file
            membership.keep(Copy(state.step, (local, state)))
        if self._is_awaited:
            raise Regroup


def restore_copy(path: Path, parallel_model: ParallelModel, callbacks: Callbacks, world: World) -> TrainState | None:
    """Load the copy from which this world continues, also on ranks without it. All ranks must call it.

    Returns the position; None if there is no such copy, so that the run continues from its newest checkpoint. path: of
    a checkpoint of this position, for messages.
    """
    membership = world.membership
    if membership is None or membership.start_step is None:
        return None
    copy, owner = membership.copy_of(membership.start_step), membership.owner_of_copy()
    local, state = _share(copy.content if copy else None, owner, world)
    membership.copies = [Copy(membership.start_step, (local, state))]
    saved = SavedState(path, {n: SavedTensor.of(chunk.tensor) for n, chunk in local.chunks.items()}, local.facts)
    parallel_model.load_state(saved)
    callbacks.call("load_state", saved)
    return state


def _share(content: tuple[LocalState, TrainState] | None, owner: int, world: World) -> tuple[LocalState, TrainState]:
    """Return the owner's state and position on all ranks, so that their replicas are equal. All ranks must call it."""
    if world.world_size == 1 and content is not None:
        return content
    local, state = content or (LocalState(), None)
    shapes = {name: (tuple(chunk.tensor.shape), chunk.tensor.dtype) for name, chunk in local.chunks.items()}
    header: list[Any] = [(shapes, local.facts, state)]
    dist.broadcast_object_list(header, src=owner)
    shapes, facts, state = header[0]
    chunks: dict[str, LocalChunk] = {}
    for name, (shape, dtype) in shapes.items():
        tensor = local.chunks[name].tensor if world.rank == owner else torch.empty(shape, dtype=dtype)
        sent = tensor.to(world.device)
        dist.broadcast(sent.reshape(-1).view(torch.uint8), src=owner)
        chunks[name] = LocalChunk(sent.to(tensor.device), (0,) * len(shape))
    return LocalState(chunks, facts), state
