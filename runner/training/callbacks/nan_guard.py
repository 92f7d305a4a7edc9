"""Detection of losses and gradients that are not finite, and of loss spikes, before the parameters are updated."""

import functools
import logging
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NoReturn

import torch
from torch.nn.utils import get_total_norm

from runner.checkpoints.layout import TrainState
from runner.checkpoints.saved_state import LocalState, SavedState, local_part
from runner.distributed.readings import is_asynchronous
from runner.distributed.world import World
from runner.errors import JobFailed
from runner.input.batch import StepBatch
from runner.input.pytree import tensors
from runner.optimization.parameter_patterns import counted
from runner.training.build import Experiment
from runner.training.callbacks.contract import Callback, Progress, Update
from runner.training.mode import ParallelModel
from runner.training.model.forward_state import ForwardState

log = logging.getLogger(__name__)

WINDOW = 64  # number of losses in the median
MIN_LOSSES = 16  # with fewer losses, none is a spike
MAX_LISTED = 256  # samples in a message
DELAY_S = 0.3  # on a rank whose samples are finite, so that a rank whose samples contain the NaN reports first


class NanGuard(Callback):
    """Decides before each update whether it may be made; see `on_nonfinite` and `loss_spike`.

    With `on_nonfinite=stop` it raises JobFailed on the ranks that detect a problem; the first report becomes the run's
    error. On a GPU, it raises it a step later, or before a checkpoint, so that no step waits for the device. With
    `skip`, all ranks skip the update if any rank detects a problem, and wait for their devices in each step.
    """

    def __init__(
        self,
        on_nonfinite: str,
        loss_spike: float | None,
        experiment: Experiment,
        parallel_model: ParallelModel,
        world: World,
    ):
        self._action, self._factor = on_nonfinite, loss_spike
        self._experiment, self._parallel_model, self._world = experiment, parallel_model, world
        self._has_scaler = experiment.recipe.precision.scaler.is_enabled()
        self._before: ForwardState | None = None
        self._recent_losses: dict[str, list[float]] = {}  # over all ranks, if spikes are detected
        self._skipped: list[str] = []

    def check_weights(self, step: int) -> None:
        """Raise JobFailed if the weights are not finite. Called before a checkpoint; all ranks must call it."""
        self._world.readings.flush()
        if self._action == "go_on":
            return
        tensors = [local_part(tensor.detach()) for tensor in self._parallel_model.local_parameters().values()]
        if self._world.collectives.any_async(not finite_norm(tensors).isfinite())():
            raise JobFailed(
                f"step {step}: the update produced weights that are not finite; no checkpoint of them is saved\n"
                "try a smaller optimizer.lr, or clip_grad_norm=1.0; resume= continues from the last checkpoint"
            )

    def before_forward(self) -> None:
        """Copy what the forward changes, such as BatchNorm's statistics, to restore it after a skip."""
        if self._action == "skip":
            recipe = self._experiment.recipe
            self._before = ForwardState(recipe.module, recipe.objective)

    def allows_update(self, update: Update) -> bool:
        if self._action == "go_on":
            return True
        # The fp16 scaler tries scales until no gradient overflows, and skips those updates itself.
        norm = torch.zeros_like(update.loss) if self._has_scaler else finite_norm(update.gradients())
        values = [update.loss, norm.to(update.loss.device, non_blocking=True)]
        if self._factor is not None:
            values.append(self._world.collectives.sum(update.loss.clone()))
        if self._action == "skip":
            return not self._skips(update, torch.stack(values))
        self._world.readings.add(torch.stack(values), functools.partial(self._check, update))
        return True

    def _skips(self, update: Update, values: torch.Tensor) -> bool:
        """Return True if a rank detects a problem, and restore what the forward has changed. All ranks must call it."""
        loss, norm, *total = values.tolist()
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        skips = self._world.collectives.any_async(not is_finite or self._is_spike(update.name, total))()
        if skips:
            assert self._before is not None
            self._before.restore()
            self._skipped.append(update.name)
        else:
            self._add_recent(update.name, total)
        return skips

    def _check(self, update: Update, values: torch.Tensor) -> None:
        """Raise JobFailed if the update is wrong. values: this rank's loss, the norm, and the loss over all ranks."""
        loss, norm, *total = values.tolist()
        if not math.isfinite(loss):
            self._fail_by_loss(update, loss)
        if not math.isfinite(norm):
            problem = f"the gradient of {update.name} is not finite, though this rank's part of the loss is"
        elif self._is_spike(update.name, total):
            problem = f"{update.name} of {total[0]:.6g} is above loss_spike={self._factor:g} times the median"
            problem += f" of the last steps, {self._median_loss(update.name):.6g}"
        else:
            self._add_recent(update.name, total)
            return
        samples = f"the samples of the step are {self._listed(self._samples_of_step(update.state))}"
        self._fail(update, problem, samples, follows=not math.isfinite(norm) and self._world.world_size > 1)

    def after_step(self, now: Progress) -> None:
        if self._skipped:
            count = now.state.skipped_steps
            if self._world.rank == 0 and (count <= 8 or count & (count - 1) == 0):  # later only every power of two
                log.warning("step %d: no update by %s; %d skipped so far", now.step, " and ".join(self._skipped), count)
            self._skipped.clear()

    def state(self, model: LocalState) -> LocalState:
        return LocalState(facts={"recent_losses": {**self._recent_losses}} if self._recent_losses else {})

    def load_state(self, saved: SavedState) -> None:
        self._recent_losses = {name: [*losses] for name, losses in saved.facts.get("recent_losses", {}).items()}

    def _fail_by_loss(self, update: Update, loss: float) -> NoReturn:
        indices = [index for micro_batch in update.batch.micro_batches for index in micro_batch.indices]
        samples = f"the samples of this rank are {self._listed(indices)}"
        if not_finite := _samples_not_finite(update.batch):
            samples += f"; not finite themselves are {self._listed(not_finite)}"
        else:
            time.sleep(DELAY_S)
        self._fail(update, f"{update.name} is {loss}", samples)

    def _fail(self, update: Update, problem: str, samples: str, follows: bool = False) -> NoReturn:
        stopped = "stopped before its update"
        if is_asynchronous(update.loss.device):
            stopped = "stopped before a checkpoint contains its update"
        where = f"rank {self._world.rank}, step {update.state.step + 1}, epoch {update.state.epoch + 1}"
        raise JobFailed(
            f"{where}: {problem}; {stopped}\n{samples}\n"
            "debug=true names the line it comes from, on_nonfinite=skip skips such steps; resume= continues from the "
            "last checkpoint",
            follows=follows,
        )

    def _is_spike(self, name: str, total: Sequence[float]) -> bool:
        return self._factor is not None and total[0] > self._factor * self._median_loss(name)

    def _add_recent(self, name: str, total: Sequence[float]) -> None:
        if total:
            self._recent_losses[name] = [*self._recent_losses.get(name, []), *total][-WINDOW:]

    def _median_loss(self, name: str) -> float:
        """Return the median of the recent losses; infinity if they are too few, or if it is not above 0."""
        recent = self._recent_losses.get(name, [])
        median = statistics.median(recent) if len(recent) >= MIN_LOSSES else 0.0
        return median if median > 0 else math.inf

    def _samples_of_step(self, state: TrainState) -> list[int]:
        """Return the indices of the samples of the next step, over all ranks."""
        sampler = replace(self._experiment.train_loader.sampler, micro_batches=1, data_rank=0, data_ranks=1)
        return next(sampler.local_batches(state.epoch, state.step_in_epoch))

    def _listed(self, indices: Sequence[int]) -> str:
        """Return the dataset's indices of these samples of the training split."""
        return counted([*map(str, self._experiment.train_loader.dataset.dataset_indices(indices))], MAX_LISTED)


def finite_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a norm of all tensors, (), that is finite if and only if all their elements are."""
    floating = [tensor for tensor in tensors if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex())]
    real = [torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor for tensor in floating]
    if not (real and is_asynchronous(real[0].device)):
        # On CPUs this norm takes a tenth of the time of the maximum norm. It may overflow.
        norm = get_total_norm(real)
        if norm.isfinite():
            return norm
    return get_total_norm(real, math.inf)


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
