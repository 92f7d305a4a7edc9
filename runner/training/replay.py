"""Replay: the gradients of some steps are computed twice and compared to the bit, to detect silent corruption."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from runner.checkpoints.saved_state import local_part
from runner.distributed.world import World
from runner.errors import JobFailed
from runner.input.batch import StepBatch
from runner.training.mode import Recipe, Stepper
from runner.training.model.forward_state import restoring_state


class Replay:
    """Computes the gradients of every n-th step twice, from the same state; see `replay_every_steps`."""

    def __init__(self, every_steps: int | None, recipe: Recipe, world: World):
        self._every, self._recipe, self._world = every_steps, recipe, world
        # Read before the first step: parameters that FSDP gathers later are other objects.
        self._names = {parameter: f"the gradient of {name}" for name, parameter in recipe.module.named_parameters()}

    def forward_backward(self, stepper: Stepper, batch: StepBatch, step: int) -> torch.Tensor:
        """Call the stepper's method, and raise JobFailed on all ranks if a replay differs. All ranks must call it."""
        if self._every is None or step % self._every:
            return stepper.forward_backward(batch)
        with restoring_state(self._recipe.module, self._recipe.objective):
            before = self._compute(stepper, batch)
            stepper.skip()
        now = self._compute(stepper, batch)
        differences = {name: _difference(before[name], now[name]) for name in now if name in before}
        differing = {name: difference for name, difference in differences.items() if difference is not None}
        if self._world.collectives.any_async(bool(differing))():
            # With another loss, all gradients differ.
            worst = "the loss" if "the loss" in differing else max(differing, key=differing.__getitem__, default="")
            problem = f"{worst} differs by {differing[worst]:.6g}" if worst else "a gradient of another rank differs"
            raise JobFailed(
                f"rank {self._world.rank}, step {step}: {problem} between two computations; stopped before the update\n"
                "either the device computes wrong values, or operations are not deterministic (docs/reliability.md)",
                follows=not differing,
            )
        return now["the loss"]

    def _compute(self, stepper: Stepper, batch: StepBatch) -> dict[str, torch.Tensor]:
        """Return the loss and copies of the gradients: whole ones before the exchange, and shards after it."""
        found: dict[str, torch.Tensor] = {}

        def copy(parameter: nn.Parameter) -> None:  # called before DDP exchanges the gradient
            found[self._names[parameter]] = parameter.grad.clone()  # type: ignore[union-attr]

        whole = [p for p in self._names if p.requires_grad and not isinstance(p, DTensor)]
        hooks = [parameter.register_post_accumulate_grad_hook(copy) for parameter in whole]
        found["the loss"] = stepper.forward_backward(batch)
        for hook in hooks:
            hook.remove()
        for parameter, name in self._names.items():
            if parameter.grad is not None and name not in found:
                found[f"{name}, after the exchange,"] = local_part(parameter.grad).clone()
        return found


def _difference(before: torch.Tensor, now: torch.Tensor) -> float | None:
    """Return the largest difference, infinity if it is not finite; None if all bits are equal."""
    before, now = (tensor.to_dense().reshape(-1) for tensor in (before, now))
    if torch.equal(before.view(torch.uint8), now.view(torch.uint8)):
        return None
    return (now - before).abs().nan_to_num(torch.inf).max().item()
