"""A model spread over the world, ready to step, for the modes in which every rank runs a whole forward and backward."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from runner.loader import StepBatch
from runner.losses import batch_loss
from runner.precision import Precision


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
        self.clip_grad_norm = clip_grad_norm
        self._forward = forward or module
        self._loss_scale, self._without_sync, self._reduce = loss_scale, without_sync, reduce
        self._duplicates, self._after_step, self._before_state = duplicates, after_step, before_state
        self._base_lrs = [group["lr"] for group in optimizer.param_groups]

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        """Add up the step's gradients. Returns this rank's share of the global batch's mean loss, detached, ()."""
        total = torch.zeros((), dtype=torch.float64 if self.precision.name == "fp64" else torch.float32)
        total = total.to(next(self.module.parameters()).device)
        last = len(batch.micro_batches) - 1
        for number, (inputs, targets) in enumerate((m.inputs, m.targets) for m in batch.micro_batches):
            with nullcontext() if number == last else self._without_sync():
                with self.precision.autocast():
                    mean = batch_loss(self.loss, self._forward(inputs), targets)
                share = mean * (len(inputs) / batch.num_samples)
                self.precision.scaler.scale(share * self._loss_scale).backward()
            total += share.detach()
        self._reduce(self.module.parameters())
        return total / self._duplicates

    def step(self, lr_factor: float, want_norm: bool) -> float | None:
        """Update the parameters. Returns the norm of the whole gradient before clipping, if wanted."""
        for group, lr in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = lr * lr_factor
        self.precision.scaler.unscale_(self.optimizer)
        with_gradient = by_mesh(p for p in self.module.parameters() if p.grad is not None)
        norm = None
        if want_norm or self.clip_grad_norm is not None:
            norm = _total_norm(with_gradient)
        if self.clip_grad_norm is not None:
            assert norm is not None
            for parameters in with_gradient:
                torch.nn.utils.clip_grads_with_norm_(parameters, self.clip_grad_norm, norm)
        self.precision.scaler.step(self.optimizer)
        self.precision.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self._after_step()
        return norm.item() if norm is not None and want_norm else None

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
            "optimizer": get_optimizer_state_dict(self.module, self.optimizer, options=options),
            "scaler": self.precision.scaler.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned, in this or another mode. All ranks must call it."""
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.module, state["model"], options=options)
        # The state brings its own learning rate, momentum and so on; those of this run's configuration hold.
        configured = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        # torch raises where either side has nothing, as SGD without momentum does.
        if state["optimizer"]["state"] and get_optimizer_state_dict(self.module, self.optimizer)["state"]:
            set_optimizer_state_dict(self.module, self.optimizer, state["optimizer"], options=options)
        for group, hyperparameters in zip(self.optimizer.param_groups, configured, strict=True):
            group.update(hyperparameters)
        if state["scaler"]:
            self.precision.scaler.load_state_dict(state["scaler"])


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in groups of one mesh each, or of none: one foreach operator takes no others together."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


def _total_norm(groups: list[list[nn.Parameter]]) -> torch.Tensor:
    """The norm of the whole gradient, on every rank, (). All ranks that share a mesh must call it."""
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]  # each rank had its shards'
    return torch.linalg.vector_norm(torch.stack(whole)) if whole else torch.zeros(())
