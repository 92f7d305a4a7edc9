"""Copies of the whole state in the memory of the ranks, from which a run continues when ranks are lost or join."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runner.checkpoints.layout import TrainState
from runner.checkpoints.saved_state import LocalState, SavedState, merge
from runner.checkpoints.shard_file import SavedChunk, SavedTensor
from runner.checkpoints.snapshot import Snapshot, writing_all
from runner.distributed.membership import Copy, Regroup
from runner.distributed.world import World
from runner.training.callbacks.contract import Callbacks
from runner.training.mode import ParallelModel

Key = tuple[str, tuple[int, ...]]  # the name of a tensor, and the offsets in it of the box that a rank has
Shapes = dict[Key, tuple[torch.Size, torch.dtype]]
WHOLE = frozenset([(0, 1)])


@dataclass(frozen=True)
class _Copied:
    """A copy of what is equal on all ranks, and of what only some ranks have."""

    tensors: dict[Key, torch.Tensor]  # on the CPU
    facts: dict[str, Any]  # as they would be read from a checkpoint
    state: TrainState
    # The ranks whose whole state is part of this copy, each with the number of ranks at the time of the copy.
    parts: frozenset[tuple[int, int]] = WHOLE

    @property
    def shapes(self) -> Shapes:
        return {key: (tensor.shape, tensor.dtype) for key, tensor in self.tensors.items()}


@dataclass
class StateCopies:
    """Copies the state before every n-th step, and lets the ranks regroup when another process waits to join.

    Two copies are kept, because a rank may be lost while others have made a copy that it has not made. The older one is
    dropped as soon as a vote of all ranks shows that each of them has the newer one.

    What only one rank has is also copied by another rank, on another machine if there are several. So a lost rank or
    machine leaves complete copies; if both ranks are lost, the newest checkpoint is needed.
    """

    every_steps: int | None  # None: the world is not elastic, and nothing is copied
    parallel_model: ParallelModel
    callbacks: Callbacks
    world: World
    has_parts: bool  # a rank may have something that no other rank has
    # The memory of both copies: that of this rank's state, and that of the other rank's part.
    _snapshots: list[tuple[Snapshot, Snapshot]] = field(
        default_factory=lambda: [(Snapshot(), Snapshot()), (Snapshot(), Snapshot())]
    )
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
        """Copy the state if it is due. All ranks must call it. Raises Regroup on all if a process waits to join."""
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
            membership.keep(Copy(state.step, self._copy(local, state)))
        if self._is_awaited:
            raise Regroup

    def _copy(self, local: LocalState, state: TrainState) -> _Copied:
        """Return a copy of this rank's state, and of what only one other rank has. All ranks must call it."""
        memory, received_memory = self._snapshots[0]
        local = memory.of(local)
        tensors = {(name, chunk.offsets): chunk.tensor for name, chunk in local.chunks.items()}
        copied = _Copied(tensors, json.loads(json.dumps(local.facts)), state)
        rank, num_ranks = self.world.rank, self.world.world_size
        if not self.has_parts or num_ranks == 1:
            return copied
        others: list[Any] = [None] * num_ranks
        dist.all_gather_object(others, (copied.shapes, copied.facts))
        target, source = (rank + self._distance) % num_ranks, (rank - self._distance) % num_ranks
        there, (shapes, facts) = others[target][0], others[source]
        missing = {
            key: torch.empty(shape, dtype=dtype, device="meta")
            for key, (shape, dtype) in shapes.items()
            if key not in tensors
        }
        received = received_memory.allocate(missing)
        sent = [tensor for key, tensor in tensors.items() if key not in there]
        works = [dist.isend(tensor, target, tag=number) for number, tensor in enumerate(sent)]
        works += [dist.irecv(tensor, source, tag=number) for number, tensor in enumerate(received.values())]
        for work in works:
            assert work is not None  # this rank belongs to the group
            work.wait()
        parts = frozenset([(rank, num_ranks), (source, num_ranks)])
        return _Copied({**tensors, **received}, merge(copied.facts, facts), state, parts)

    @functools.cached_property
    def _distance(self) -> int:
        """The distance from each rank to the one that copies its part: if possible, it is on another machine."""
        processes, num_ranks = self.world.local_ranks.all, self.world.world_size
        pairs = [(process.machine, rank) for rank, process in processes.items()]

        def count_apart(distance: int) -> int:
            return sum(machine != processes[(rank + distance) % num_ranks].machine for machine, rank in pairs)

        return max(range(1, num_ranks), key=count_apart)


def restore_copy(path: Path, parallel_model: ParallelModel, callbacks: Callbacks, world: World) -> TrainState | None:
    """Load the copy from which this world continues, also on ranks without it. All ranks must call it.

    Returns the position; None if there is no such copy, or an incomplete one, so that the run continues from its newest
    checkpoint. path: of a checkpoint of this position, for messages.
    """
    membership = world.membership
    if membership is None or membership.start_step is None:
        return None
    copy = membership.copy_of(membership.start_step)
    copied = _share(copy.content if copy else None, world)
    if copied is None:
        membership.drop_copies()
        return None
    membership.copies = [Copy(membership.start_step, copied)]
    tensors: dict[str, SavedTensor] = {}
    for (name, offsets), tensor in copied.tensors.items():
        chunk = SavedChunk(offsets, tuple(tensor.shape), tensor.__getitem__)
        tensors.setdefault(name, SavedTensor(tensor.dtype)).chunks.append(chunk)
    saved = SavedState(path, tensors, copied.facts)
    parallel_model.load_state(saved)
    callbacks.call("load_state", saved)
    return copied.state


def _share(own: _Copied | None, world: World) -> _Copied | None:
    """Return the whole state on all ranks, equal on all; None if they do not have all of it. All ranks must call it."""
    header = None if own is None else (own.shapes, own.facts, own.state, own.parts)
    headers: list[Any] = [header]
    if world.world_size > 1:
        headers *= world.world_size
        dist.all_gather_object(headers, header)
    found = {rank: header for rank, header in enumerate(headers) if header is not None}
    parts = {part for _, _, _, of_rank in found.values() for part in of_rank}
    if not any(all((rank, size) in parts for rank in range(size)) for _, size in parts):
        return None
    tensors: dict[Key, torch.Tensor] = {}
    for owner, (shapes, *_) in found.items():
        missing: Mapping[Key, Any] = {key: shape for key, shape in shapes.items() if key not in tensors}
        for key, (shape, dtype) in missing.items():
            tensor = own.tensors[key] if own and owner == world.rank else torch.empty(shape, dtype=dtype)
            if world.world_size > 1:
                sent = tensor.to(world.device)
                dist.broadcast(sent.reshape(-1).view(torch.uint8), src=owner)
                tensor = sent.to(tensor.device)
            tensors[key] = tensor
    facts = functools.reduce(merge, (facts for _, facts, _, _ in found.values()))
    return _Copied(tensors, dict(facts), next(state for _, _, state, _ in found.values()))
