"""Detection of losses and gradients that are not finite, and of loss spikes, before the parameters are updated."""

import logging
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NoReturn

import torch

from runner.checkpoints.layout import TrainState
from runner.checkpoints.saved_state import LocalState, SavedState
from runner.config.schema import Config
from runner.distributed.world import World
from runner.errors import JobFailed
from runner.input.batch import StepBatch
from runner.input.pytree import tensors
from runner.optimization.parameter_patterns import counted
from runner.training.build import Experiment
from runner.training.callbacks.contract import Callback, Progress, Update
from runner.training.callbacks.finite_weights import each_is_finite, norms_are_finite

log = logging.getLogger(__name__)

WINDOW = 64  # number of losses in the median
MIN_LOSSES = 16  # with fewer losses, none is a spike
MAX_LISTED = 256  # samples in a message
MAX_LOGGED = 8  # skipped steps that are each logged; later only every power of two
# Delay on a rank whose samples are finite. A rank whose samples contain the NaN reports first; BatchNorm, for example,
# spreads the NaN to the others.
DELAY_S = 0.3


class NanGuard(Callback):
    """Decides before each update whether it may be made; see `on_nonfinite` and `loss_spike`.

    With `on_nonfinite=stop` it raises JobFailed on the ranks that detect a problem; the first report becomes the run's
    error. With `skip`, all ranks skip the update if any rank detects a problem. With `go_on` nothing is checked.
    """

    def __init__(self, config: Config, experiment: Experiment, world: World):
        self._action, self._factor = config.on_nonfinite, config.loss_spike
        self._experiment, self._world = experiment, world
        # The fp16 scaler tries scales until no gradient overflows, and skips those updates itself.
        self._has_scaler = experiment.recipe.precision.scaler.is_enabled()
        self._buffers: list[torch.Tensor] = []
        self._total_losses: dict[str, float] = {}  # of the step's updates, over all ranks, if spikes are detected
        self._recent_losses: dict[str, list[float]] = {}
        self._skipped: list[str] = []

    def before_forward(self) -> None:
        """Copy the buffers that the forward changes, such as BatchNorm's statistics, to restore them after a skip."""
        if self._action == "skip":
            self._buffers = [buffer.clone() for buffer in self._experiment.recipe.module.buffers()]

    def allows_update(self, update: Update) -> bool:
        if self._action == "go_on":
            return True
        name, is_spike = update.name, False
        recent = self._recent_losses.get(name, [])
        if self._factor is not None:
            self._total_losses[name] = self._world.collectives.sum(update.loss.clone()).item()
            is_spike = _is_spike(self._total_losses[name], recent, self._factor)
        loss_is_finite, gradient_is_finite = _are_finite(update.loss, [] if self._has_scaler else update.gradients())
        if self._action == "skip":
            skip = self._world.collectives.any_async(is_spike or not (loss_is_finite and gradient_is_finite))()
            if skip:
                self._restore_buffers()
                self._skipped.append(name)
                self._total_losses.pop(name, None)
            return not skip
        if not loss_is_finite or not gradient_is_finite:
            self._stop(update, loss_is_finite)
        if is_spike:
            raise JobFailed(
                f"step {update.state.step + 1}: {name} of {self._total_losses[name]:.6g} is above "
                f"loss_spike={self._factor:g} times the median of the last {len(recent)} steps, "
                f"{statistics.median(recent):.6g}; stopped before its update\n"
                f"the samples of the step are {_listed(self._samples_of_step(update.state))}\n"
                "on_nonfinite=skip skips such steps, loss_spike=null accepts them; resume= continues from the last "
                "checkpoint"
            )
        return True

    def after_step(self, now: Progress) -> None:
        if self._skipped:
            count = now.state.skipped_steps
            if self._world.rank == 0 and (count <= MAX_LOGGED or count & (count - 1) == 0):
                log.warning("step %d: no update by %s; %d skipped so far", now.step, " and ".join(self._skipped), count)
            self._skipped.clear()
        for name, loss in self._total_losses.items():
            self._recent_losses[name] = [*self._recent_losses.get(name, []), loss][-WINDOW:]
        self._total_losses.clear()

    def state(self, model: LocalState) -> LocalState:
        return LocalState(facts={"recent_losses": {**self._recent_losses}} if self._recent_losses else {})

    def load_state(self, saved: SavedState) -> None:
        self._recent_losses = {name: [*losses] for name, losses in saved.facts.get("recent_losses", {}).items()}

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        for buffer, before in zip(self._experiment.recipe.module.buffers(), self._buffers, strict=True):
            buffer.copy_(before)

    def _stop(self, update: Update, loss_is_finite: bool) -> NoReturn:
        local = [index for micro_batch in update.batch.micro_batches for index in micro_batch.indices]
        where = f"rank {self._world.rank}, step {update.state.step + 1}, epoch {update.state.epoch + 1}"
        if loss_is_finite:
            problem = f"the gradient of {update.name} is not finite, though this rank's part of the loss is"
            samples = f"the samples of the step are {_listed(self._samples_of_step(update.state))}"
        else:
            problem = f"{update.name} is {update.loss.item()}"
            samples = f"the samples of this rank are {_listed(local)}"
            if not_finite := _samples_not_finite(update.batch):
                samples += f"; not finite themselves are {_listed(not_finite)}"
            else:
                time.sleep(DELAY_S)
        raise JobFailed(
            f"{where}: {problem}; stopped before its update\n{samples}\n"
            "debug=true names the line it comes from, on_nonfinite=skip skips such steps; resume= continues from the "
            "last checkpoint",
            follows=loss_is_finite and self._world.world_size > 1,
        )

    def _samples_of_step(self, state: TrainState) -> list[int]:
        """Return the indices of the samples of the next step, over all ranks."""
        sampler = replace(self._experiment.train_loader.sampler, micro_batches=1, data_rank=0, data_ranks=1)
        return next(sampler.local_batches(state.epoch, state.step_in_epoch))


def _are_finite(loss: torch.Tensor, gradients: Sequence[torch.Tensor]) -> tuple[bool, bool]:
    """Return whether the loss and the gradients are finite, with one synchronization with the device."""
    finite = [loss.detach().isfinite(), *(flag.to(loss.device) for flag in norms_are_finite(gradients))]
    first, *others = torch.stack(finite).tolist()
    return first, all(others) or each_is_finite(gradients)


def _is_spike(loss: float, recent: Sequence[float], factor: float) -> bool:
    """Return True if the loss is above the factor times the median; False if the median is not above 0."""
    if len(recent) < MIN_LOSSES:
        return False
    median = statistics.median(recent)
    return median > 0 and loss > factor * median


def _samples_not_finite(batch: StepBatch) -> list[int]:
    """Return the indices of the local samples that contain values that are not finite."""
    found: list[int] = []
    for micro_batch in batch.micro_batches:
        rows: set[int] = set()
        for tensor in tensors(micro_batch.data):
            if tensor.is_floating_point() and tensor.dim() and len(tensor) == micro_batch.num_samples > 0:
                rows |= set((~tensor.isfinite()).reshape(len(tensor), -1).any(1).nonzero().flatten().tolist())
        found += [micro_batch.indices[row] for row in sorted(rows)]
    return found


def _listed(indices: Iterable[int]) -> str:
    return counted([*map(str, indices)], MAX_LISTED)
