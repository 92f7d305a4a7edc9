"""Losses and gradients that are not finite, and losses that jump: the step that they would spoil is not made."""

import logging
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NoReturn

import torch
from torch.utils._pytree import tree_leaves

from runner.config.schema import Config
from runner.distributed.world import World
from runner.errors import JobFailed
from runner.runs.train_state import TrainState
from runner.training.batch import StepBatch
from runner.training.build import Experiment
from runner.training.finite import each_is_finite, norms_are_finite
from runner.training.pytree import known
from runner.training.strategy import Stepping

log = logging.getLogger(__name__)

WINDOW = 64  # losses that a median is over
LEAST = 16  # before there are so many, none is a jump
LISTED = 256  # a message lists so many samples
TOLD = 8  # so many skipped steps are told one by one, then those at powers of two
UNSURE_S = 0.3  # for a rank whose samples hold a NaN to speak before those that only compute one, by BatchNorm say


class Guard:
    """What is asked before each update of a step: whether it may be made.

    on_nonfinite=stop raises JobFailed on the ranks that see a reason; the first to speak is told as the cause. With
    skip the ranks ask each other, and all leave the update out. With go_on nothing is asked.
    """

    def __init__(self, config: Config, experiment: Experiment, world: World):
        self._action, self._factor = config.on_nonfinite, config.loss_spike
        self._experiment, self._world = experiment, world
        # A scaler of fp16 tries factors until no gradient overflows, and leaves those steps out itself.
        self._scaled = experiment.recipe.precision.scaler.is_enabled()
        self._buffers: list[torch.Tensor] = []
        self._wholes: dict[str, float] = {}  # the losses of the step, over all ranks, where they are asked for

    @property
    def skips(self) -> bool:
        return self._action == "skip"

    def begin(self) -> None:
        """Before a forward: what it writes (BatchNorm's statistics) is put back where the update is left out."""
        if self.skips:
            self._buffers = [buffer.clone() for buffer in self._experiment.recipe.module.buffers()]

    def allows(self, name: str, loss: torch.Tensor, turn: Stepping, batch: StepBatch, state: TrainState) -> bool:
        """Whether the update by one of the losses may be made. All ranks must call it.

        loss: this rank's share of the mean over the whole batch, ().
        """
        if self._action == "go_on":
            return True
        recent, jumps = state.recent_losses.get(name, []), False
        if self._factor is not None:
            self._wholes[name] = self._world.collectives.sum(loss.clone()).item()
            jumps = _jumps(self._wholes[name], recent, self._factor)
        loss_is_finite, gradient_is_finite = _are_finite(loss, [] if self._scaled else turn.gradients())
        if self.skips:
            skipped = self._world.collectives.any_later(jumps or not (loss_is_finite and gradient_is_finite))()
            if skipped:
                self._put_back()
            return not skipped
        if not loss_is_finite or not gradient_is_finite:
            self._stop(name, loss.item(), loss_is_finite, batch, state)
        if jumps:
            raise JobFailed(
                f"step {state.step + 1}: {name} of {self._wholes[name]:.6g} is above loss_spike={self._factor:g} times "
                f"the median of the last {len(recent)} steps, {statistics.median(recent):.6g}; stopped before its "
                f"update\nthe samples of the step are {_listed(self._indices_of_all(state))}\n"
                "on_nonfinite=skip leaves such steps out, loss_spike=null takes them; resume= begins at the last "
                "checkpoint"
            )
        return True

    def after(self, state: TrainState, skipped: Sequence[str]) -> TrainState:
        """With what there is to remember of a step; skipped: the losses without an update."""
        if skipped:
            state = replace(state, skipped_steps=(count := state.skipped_steps + 1))
            if self._world.rank == 0 and (count <= TOLD or count & (count - 1) == 0):
                log.warning("step %d: no update by %s; %d skipped so far", state.step, " and ".join(skipped), count)
        if self._factor is None:
            return state
        taken = {name: whole for name, whole in self._wholes.items() if name not in skipped}
        before = state.recent_losses
        return replace(state, recent_losses=before | {n: [*before.get(n, []), w][-WINDOW:] for n, w in taken.items()})

    @torch.no_grad()
    def _put_back(self) -> None:
        for buffer, before in zip(self._experiment.recipe.module.buffers(), self._buffers, strict=True):
            buffer.copy_(before)

    def _stop(self, name: str, loss: float, loss_is_finite: bool, batch: StepBatch, state: TrainState) -> NoReturn:
        own = [index for micro_batch in batch.micro_batches for index in micro_batch.indices]
        holes = _not_finite_samples(batch)
        where = f"rank {self._world.rank}, step {state.step + 1}, epoch {state.epoch + 1}"
        if loss_is_finite:
            what = f"the gradient of {name} is not finite, though this rank's share of the loss is"
            indices = f"the samples of the step are {_listed(self._indices_of_all(state))}"
        else:
            what = f"{name} is {loss}"
            indices = f"the samples of this rank are {_listed(own)}"
            if holes:
                indices += f"; not finite themselves are {_listed(holes)}"
            else:
                time.sleep(UNSURE_S)
        raise JobFailed(
            f"{where}: {what}; stopped before its update\n{indices}\n"
            "debug=true names the line it comes from, on_nonfinite=skip leaves such steps out; resume= begins at the "
            "last checkpoint",
            follows=loss_is_finite and self._world.world_size > 1,
        )

    def _indices_of_all(self, state: TrainState) -> list[int]:
        """Of the step that comes, over all ranks."""
        sampler = replace(self._experiment.train_loader.sampler, micro_batches=1, data_rank=0, data_ranks=1)
        return next(sampler.shares(state.epoch, state.step_in_epoch))


def _are_finite(loss: torch.Tensor, gradients: Sequence[torch.Tensor]) -> tuple[bool, bool]:
    """Of both, with one wait for the device."""
    finite = [loss.detach().isfinite(), *(flag.to(loss.device) for flag in norms_are_finite(gradients))]
    first, *others = torch.stack(finite).tolist()
    return first, all(others) or each_is_finite(gradients)


def _jumps(loss: float, recent: Sequence[float], factor: float) -> bool:
    """Of losses that are not above 0 there is no multiple that would mean anything."""
    if len(recent) < LEAST:
        return False
    median = statistics.median(recent)
    return median > 0 and loss > factor * median


def _not_finite_samples(batch: StepBatch) -> list[int]:
    """The indices of those whose own numbers are not finite."""
    found: list[int] = []
    for micro_batch in batch.micro_batches:
        rows: set[int] = set()
        for leaf in tree_leaves(known(micro_batch.data)):
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or not leaf.dim():
                continue
            if len(leaf) == micro_batch.num_samples > 0:
                rows |= set((~leaf.isfinite()).reshape(len(leaf), -1).any(1).nonzero().flatten().tolist())
        found += [micro_batch.indices[row] for row in sorted(rows)]
    return found


def _listed(indices: Iterable[int]) -> str:
    numbers = list(indices)
    more = f" and {len(numbers) - LISTED} more" if len(numbers) > LISTED else ""
    return ", ".join(map(str, numbers[:LISTED])) + more
