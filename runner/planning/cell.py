"""The plan of a mode at one world size, combined from the plans of its distinct ranks."""

import math
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from runner.errors import InputError, first_line, user_line
from runner.input.source import Source
from runner.planning.costs import Costs
from runner.planning.forwards import Forwards
from runner.planning.imagined_rank import ModeConfig, RankPlan, plan_rank, without_forward
from runner.planning.memory import GIB
from runner.planning.simulation import simulate
from runner.planning.timeline import Message
from runner.training.components import make_parallel
from runner.training.mode import Axes

MAX_PLANNED = 4  # the largest number of ranks, or of stages, that are all planned


@dataclass
class Cell:
    """The plan of one mode at one world size: a row of the tables of task=plan."""

    mode: str
    world_size: int
    reason: str = ""  # why the mode cannot be planned; `ranks` is then empty
    is_refused: bool = False  # a run would be refused for the same reason
    ranks: list[RankPlan] = field(default_factory=list)  # the distinct ones
    round_steps: int = 1  # of the mode: see runner.training.mode.Parallel
    limit: float = math.inf  # the memory of a rank, in bytes
    step_s: float = 0.0
    bubble: float = 0.0  # the fraction of a step in which a rank waits for others, averaged over the ranks
    samples_per_s: float = 0.0  # over all ranks

    @property
    def worst(self) -> RankPlan:
        """The rank that needs the most memory."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def peak(self) -> int:
        return self.worst.peak

    @property
    def fits(self) -> bool:
        return bool(self.ranks) and self.peak <= self.limit

    @property
    def is_exact(self) -> bool:
        """True if the ranks combine their gradients in each step, as in every mode that is equal to parallel=none."""
        return self.round_steps == 1

    @property
    def most_rows(self) -> int | None:
        """The largest local micro-batch that fits on all ranks, in samples; None if unknown."""
        known = [rank for rank in self.ranks if rank.bytes_per_row and math.isfinite(self.limit)]
        rows = [math.floor((self.limit - rank.bytes_between) / (rank.bytes_per_row or 1)) for rank in known]
        return max(0, min(rows)) if rows else None

    @property
    def bytes_per_step(self) -> dict[str, float]:
        """The bytes per step by collective, for each collective those of the rank that exchanges the most."""
        kinds = sorted({kind for rank in self.ranks for kind in rank.bytes_per_step})
        return {kind: max(rank.bytes_per_step.get(kind, 0.0) for rank in self.ranks) for kind in kinds}

    @property
    def mesh(self) -> str:
        """The axes of the mesh that have several ranks, for example "shard 4 x tensor 2"; "1" if none has."""
        axes = {name: size for name, size in asdict(self.ranks[0].axes).items() if name != "micro_batches" and size > 1}
        return " x ".join(f"{name} {size}" for name, size in axes.items()) or "1"

    def as_record(self) -> dict[str, Any]:
        """Return the cell for plan.json."""
        record: dict[str, Any] = {"mode": self.mode, "world_size": self.world_size}
        if not self.ranks:
            return record | {"reason": self.reason}
        return record | {
            "mesh": asdict(self.ranks[0].axes),
            "fits": self.fits,
            "memory_bytes": {str(rank.rank): dict(rank.memory) for rank in self.ranks},
            "largest_micro_batch": self.most_rows,
            "bytes_per_step": self.bytes_per_step,
            "bubble": self.bubble,
            "step_time_s": self.step_s,
            "samples_per_second": self.samples_per_s,
        }


def plan_cell(
    composed: ModeConfig,
    data: tuple[Source, Source],
    mode: str,
    world_size: int,
    limit: float,
    on_gpu: bool,
    forwards: Forwards | None = None,
) -> Cell:
    """Plan a mode, without times. If it cannot be planned, return a cell with the reason.

    on_gpu: the ranks compute on GPUs. forwards: those of other cells, which are not repeated.
    """
    forwards = forwards or Forwards()
    cell = Cell(mode, world_size, limit=limit)
    try:
        cell.round_steps = make_parallel(composed.config.parallel, composed.choices).round_steps
        cell.ranks = _plan_ranks(composed, data, world_size, on_gpu, forwards)
    except Exception as error:  # raised by the model, or by torch for tensors without values
        cause = _find_value_error(error)
        if cause is None and isinstance(error, InputError):
            cell.reason, cell.is_refused = error.messages[0], True
            return cell
        line = user_line(cause or error)
        cell.reason = first_line(cause or error) + (f" (at {line})" if line else "")
        if cause is not None:
            cell.reason = (
                "the model or the loss reads values of tensors, which a plan does not have; measure it with "
                f"task=compare or parallel=auto: {cell.reason}"
            )
            with suppress(Exception):  # not every mode supports another objective, and the constructor may read values
                ranks = _plan_ranks(without_forward(composed), data, world_size, on_gpu, forwards)
                least = max(rank.peak for rank in ranks) / GIB
                cell.reason += f"; without activations, a rank needs {least:.3g} GiB"
    return cell


def add_times(cell: Cell, costs: Costs) -> None:
    """Simulate the step of a planned cell, and remove the events of its ranks."""
    first = cell.ranks[0]
    round_s, cell.bubble = simulate(_with_other_stages(cell.ranks, first.axes), costs)
    cell.step_s = costs.step_s + round_s / cell.round_steps
    cell.samples_per_s = first.num_samples / cell.step_s
    cell.ranks = [replace(rank, events=()) for rank in cell.ranks]


def _plan_ranks(
    composed: ModeConfig, data: tuple[Source, Source], world_size: int, on_gpu: bool, forwards: Forwards
) -> list[RankPlan]:
    first = plan_rank(composed, data, 0, world_size, on_gpu, forwards)
    others = [rank for rank in distinct_ranks(first.axes, world_size) if rank > 0]
    return [first, *(plan_rank(composed, data, rank, world_size, on_gpu, forwards) for rank in others)]


def _find_value_error(error: BaseException | None) -> BaseException | None:
    """Return the error with which torch refuses to read a fake tensor, among the error and its contexts; else None."""
    while error is not None and type(error).__module__ != FakeTensor.__module__:
        error = error.__context__
    return error


def distinct_ranks(axes: Axes, world_size: int) -> list[int]:
    """Return the ranks to plan, which need about as much memory and time as the rank that needs the most.

    In a world of more than MAX_PLANNED ranks, these are the first rank, a trainer if the first one is a parameter
    server, and one rank of each stage. Of more than MAX_PLANNED stages, the first two, the middle and the last one are
    planned. Other ranks have no more samples, because each rank is planned with the most, and no larger parts of the
    parameters; with zero, the part of another rank can be slightly larger.
    """
    if world_size <= MAX_PLANNED:
        return [*range(world_size)]
    stages = [*range(axes.stage)] if axes.stage <= MAX_PLANNED else [0, 1, axes.stage // 2, axes.stage - 1]
    # With causal attention, the last positions of a sample attend to the most others.
    return sorted({0, axes.sequence - 1, *(axes.servers + stage * axes.tensor for stage in stages)})


def _with_other_stages(ranks: list[RankPlan], axes: Axes) -> dict[int, Any]:
    """Return the events by rank. A stage that was not planned has the events of the middle stage."""
    events = {rank.rank: rank.events for rank in ranks}
    middle = axes.stage // 2
    for stage in range(axes.stage if axes.stage > MAX_PLANNED else 0):
        shift = (stage - middle) * axes.tensor
        if stage * axes.tensor not in events:
            events[stage * axes.tensor] = [_shifted(event, shift) for event in events[middle * axes.tensor]]
    return events


def _shifted(event: Any, shift: int) -> Any:
    """Return the event with the rank of its peer increased by `shift`."""
    return replace(event, peer=event.peer + shift) if isinstance(event, Message) and event.peer is not None else event
