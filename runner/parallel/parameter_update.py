"""How a rank's optimizer takes a step: the schedule's rate, the norm of the whole gradient, clipping, the scaler."""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from runner.parallel.optimizer_state import like
from runner.training.optimizers import by_mesh
from runner.training.precision import Precision
from runner.training.saved_state import local_part

Norm = Callable[[list[list[nn.Parameter]]], torch.Tensor]


class ParameterUpdate:
    """total_norm: of the gradient of parameters in groups of one mesh each, which is the whole one's on every rank."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[nn.Parameter],
        precision: Precision,
        clip_grad_norm: float | None = None,
        total_norm: Norm | None = None,
    ):
        self._optimizer, self._parameters = optimizer, list(parameters)
        self._precision, self._clip_grad_norm = precision, clip_grad_norm
        self._total_norm = total_norm or norm_over_meshes
        self._base_lrs = [group["lr"] for group in optimizer.param_groups]

    @property
    def learning_rate(self) -> float:
        """That of the first parameter group in the last step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def set_learning_rate(self, factor: float) -> None:
        """Of each parameter group, as a multiple of the configured one."""
        for group, lr in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = lr * factor

    def step(self, lr_factor: float, want_norm: bool) -> float | None:
        """Update the parameters. Returns the norm of the whole gradient before clipping, if wanted."""
        self.set_learning_rate(lr_factor)
        return self.apply(want_norm)

    def apply(self, want_norm: bool) -> float | None:
        """As `step`, with the learning rate as it is."""
        scaler = self._precision.scaler
        scaler.unscale_(self._optimizer)
        with_gradient = by_mesh(p for p in self._parameters if p.grad is not None)
        norm = None
        if want_norm or self._clip_grad_norm is not None:
            norm = self._total_norm(with_gradient)
        if self._clip_grad_norm is not None:
            assert norm is not None
            for parameters in with_gradient:
                torch.nn.utils.clip_grads_with_norm_(parameters, self._clip_grad_norm, norm)
        for group in self._optimizer.param_groups:
            if group.get("fused"):
                lay_out_gradients(group["params"])
        scaler.step(self._optimizer)
        scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        return norm.item() if norm is not None and want_norm else None


@torch.no_grad()
def lay_out_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give each gradient the strides of its parameter (channels_last, say), where a sum over ranks has made it anew.

    A fused update on the CPU goes through the memory of both, and does not look at strides.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        own, of_own = local_part(parameter), local_part(gradient)
        if own.shape == of_own.shape and own.stride() != of_own.stride():
            parameter.grad = like(parameter, torch.empty_like(own).copy_(of_own))


@torch.no_grad()
def held_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Of what this rank has of them: whole, its slices, or of sparse ones the values."""
    own = [local_part(p.grad) for p in parameters if p.grad is not None]
    return [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in own]


def norm_over_meshes(groups: list[list[nn.Parameter]]) -> torch.Tensor:
    """The norm of the whole gradient, on every rank, (). All ranks that share a mesh must call it."""
    norms = [norm_of_gradients(group) for group in groups]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]  # each rank had its shards'
    return torch.linalg.vector_norm(torch.stack(whole)) if whole else torch.zeros(())


def norm_of_gradients(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Of the gradients that there are, ()."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
