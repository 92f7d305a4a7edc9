"""A trial of a custom optimizer on small parameters, which finds out what its update of a parameter depends on."""

import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from runner.input.rng import CPU, UPDATE, DrawDetector, derive_seed, isolated, seed_all

# Optimizers that estimate a step size from all parameters, such as Prodigy, begin with one that is constant.
_STEPS = 12


class Dependencies(NamedTuple):
    """What the update of a parameter depends on, in addition to its gradients.

    Attributes:
        on_draws: It draws random numbers.
        on_others: It depends on other parameters or their gradients, for example by the norm of all gradients.
    """

    on_draws: bool = False
    on_others: bool = False


def try_updates(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], shapes: Iterable[torch.Size]
) -> Dependencies:
    """Compare updates of small parameters by one optimizer with those by an optimizer for each parameter.

    `shapes` are those of the parameters; at most 3 of their dims are used. An optimizer that raises an exception is not
    examined, because such small parameters may not suit it.
    """
    small = list(dict.fromkeys(tuple(min(size, 4) for size in shape) for shape in shapes))[:3]
    small += small  # the parameters of a model may all have the same shape
    detector = DrawDetector()

    def train(apart: bool) -> list[Tensor]:
        detector.seed(0)
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in small]
        start = [parameter.detach().clone() for parameter in parameters]
        means = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in small]
        optimizers = [make([parameter]) for parameter in parameters] if apart else [make(parameters)]
        for _ in range(_STEPS):
            for number, (parameter, mean) in enumerate(zip(parameters, means, strict=True)):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.grad = mean + number * noise  # of unequal size, and unequally consistent
            for optimizer in optimizers:
                optimizer.step()
        return [parameter.detach() - before for parameter, before in zip(parameters, start, strict=True)]

    # A compiler would take seconds, and the parameters of a plan may be fake.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        with eager, _disable_current_modes():
            together, apart = detector.call(lambda: train(apart=False)), detector.call(lambda: train(apart=True))
            return Dependencies(detector.has_drawn, any(map(_differ, together, apart)))
    except Exception:  # custom code can raise anything
        return Dependencies()


def _differ(update: Tensor, other: Tensor) -> bool:
    return not torch.allclose(update, other, rtol=1e-6, atol=1e-9 * float(update.abs().max()), equal_nan=True)


def seed_steps(optimizer: torch.optim.Optimizer, step_key: Callable[[], int], number: int) -> None:
    """Seed all generators during each step of the optimizer, so that all ranks draw the same random numbers.

    `step_key` returns the seed of the current step, and `number` is different for each optimizer of a model.
    """
    step = optimizer.step

    @functools.wraps(step)
    def seeded_step(*args: Any, **kwargs: Any) -> Any:
        devices = {p.device for group in optimizer.param_groups for p in group["params"] if p.is_cuda}
        with torch.random.fork_rng(devices), isolated():
            seed_all(derive_seed(step_key(), number, UPDATE), next(iter(devices), CPU))
            return step(*args, **kwargs)

    # Not by hooks, which torch also calls for the step of a base class that the step calls.
    optimizer.step = seeded_step  # type: ignore[method-assign]
