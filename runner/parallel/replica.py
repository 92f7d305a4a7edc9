"""A model spread over the world, ready to step, for the modes in which every rank runs a whole forward and backward."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from runner.parallel.optimizer_state import load_optimizer_state, optimizer_state
from runner.parallel.parameter_update import ParameterUpdate
from runner.training.batch import StepBatch
from runner.training.losses import weighted_loss
from runner.training.precision import Precision


class Replica:
    """Gradients by backward on this rank, combined over the ranks in the way the mode says.

    forward: what runs the module, a wrapper of it or itself.
    loss_scale: what a rank's share of the mean loss is multiplied with before backward, so that combining the
        gradients gives those of the mean over the global batch (the number of ranks where they are averaged).
    without_sync: entered for all micro-batches of a step but the last.
    reduce: combines the parameters' gradients over the ranks after the last backward.
    duplicates: how many ranks compute the very same share of the loss; each returns its part of it.
    after_step: called when the parameters are updated.
    before_state: called when a checkpoint is taken.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: nn.Module,
        precision: Precision,
        clip_grad_norm: float | None = None,
        *,
        forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
        loss_scale: float = 1.0,
        without_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
        reduce: Callable[[Iterable[nn.Parameter]], None] = lambda parameters: None,
        duplicates: int = 1,
        after_step: Callable[[], None] = lambda: None,
        before_state: Callable[[], None] = lambda: None,
    ):
        self.module, self.optimizer, self.loss, self.precision = module, optimizer, loss, precision
        self.update = ParameterUpdate(optimizer, module.parameters(), precision, clip_grad_norm)
        self._forward = forward or module
        self._loss_scale, self._without_sync, self._reduce = loss_scale, without_sync, reduce
        self._duplicates, self._after_step, self._before_state = duplicates, after_step, before_state

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        """Add up the step's gradients. Returns this rank's share of the global batch's mean loss, detached, ()."""
        device = next(self.module.parameters()).device
        total = torch.zeros((), dtype=self.precision.parameter_dtype, device=device)
        last = len(batch.micro_batches) - 1
        for number, micro_batch in enumerate(batch.micro_batches):
            with nullcontext() if number == last else self._without_sync():
                with self.precision.autocast():
                    loss = weighted_loss(self.loss, self._forward(micro_batch.inputs), micro_batch.targets)
                share = loss.share(batch.num_samples)
                self.precision.scaler.scale(share * self._loss_scale).backward()
            total += share.detach()
        self._reduce(self.module.parameters())
        return total / self._duplicates

    def step(self, lr_factor: float, want_norm: bool) -> float | None:
        """Update the parameters. Returns the norm of the whole gradient before clipping, if wanted."""
        norm = self.update.step(lr_factor, want_norm)
        self._after_step()
        return norm

    @property
    def learning_rate(self) -> float:
        return self.update.learning_rate

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        """The model's outputs in evaluation mode, without gradients. (N, *sample_shape) -> (N, num_outputs)"""
        self.module.eval()
        try:
            with torch.no_grad(), self.precision.autocast():
                return self.module(inputs)
        finally:
            self.module.train()

    def state(self) -> dict[str, Any]:
        """Everything that decides the future, by full names, on the CPU. All ranks must call it."""
        self._before_state()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return {
            "model": get_model_state_dict(self.module, options=options),
            "optimizer": optimizer_state(self.module, self.optimizer),
            "scaler": self.precision.scaler.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned, in this or another mode. All ranks must call it."""
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.module, state["model"], options=options)
        load_optimizer_state(self.module, self.optimizer, state["optimizer"])
        if state["scaler"]:
            self.precision.scaler.load_state_dict(state["scaler"])
