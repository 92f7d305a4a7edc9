"""Custom optimizers whose updates depend on more than the gradients of a parameter."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class Langevin(torch.optim.SGD):
    """Stochastic gradient Langevin dynamics (Welling, Teh 2011): adds noise to the parameters."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.05, noise: float = 0.05):
        super().__init__(params, lr=lr)
        self.noise = noise

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(torch.randn_like(parameter), alpha=self.noise * group["lr"])


class Normalized(torch.optim.SGD):
    """Divides the step by the norm of the gradient of all parameters."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.05):
        super().__init__(params, lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum((gradient**2).sum() for gradient in gradients) ** 0.5
        for gradient in gradients:
            gradient.div_(norm)
        super().step(closure)


class Adaptive(torch.optim.Optimizer):
    """Estimates the step size of all parameters together from their distance to the start, as D-Adaptation does."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1.0):
        super().__init__(params, {"lr": lr})
        self.distance, self.weighted, self.total = 1e-6, 0.0, 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        trained = [(p, group["lr"]) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, lr in trained:
            start = self.state[parameter].setdefault("start", parameter.clone())
            self.weighted += self.distance * float((parameter.grad * (start - parameter)).sum())
            parameter.sub_(parameter.grad.sign(), alpha=lr * self.distance)
            self.total += self.distance * float(parameter.grad.abs().sum())
        self.distance = max(self.distance, self.weighted / self.total)


class Seeded(torch.optim.SGD):
    """Draws noise from a generator of its own."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.05):
        super().__init__(params, lr=lr)
        self.generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(torch.randn(parameter.shape, generator=self.generator))
        super().step(closure)


class ByShape(torch.optim.SGD):
    """Updates each parameter by its gradient and its shape, and rejects parameters of three dims."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.05):
        super().__init__(params, lr=lr, momentum=0.9, nesterov=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.dim() != 3
                parameter.grad.mul_(parameter.dim()).div_(parameter.grad.norm())
        super().step(closure)
