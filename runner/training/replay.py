"""Replay: the gradients of some steps are computed twice and compared to the bit, to detect silent corruption."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from runner.checkpoints.saved_state import local_part
from runner.config.schema import Config
from runner.distributed.world import World
from runner.errors import JobFailed
from runner.input.batch import StepBatch
from runner.input.rng import restoring_generators
from runner.training.mode import Recipe, Stepper
from runner.training.model.forward_state import restoring_state


class Replay:
    """Computes the gradients of every n-th step twice, from the same state; see `replay_every_steps`.

    A gradient is compared as this rank has computed it from all micro-batches, before the ranks exchange it. Sharded
    gradients are compared after the exchange, because FSDP computes them by it.
    """

    def __init__(self, config: Config, recipe: Recipe, world: World):
        self._every, self._recipe, self._world = config.replay_every_steps, recipe, world
        # Read before the first step: parameters that FSDP gathers later are other objects.
        self._names = {parameter: name for name, parameter in recipe.module.named_parameters()}

    def forward_backward(self, stepper: Stepper, batch: StepBatch, step: int) -> torch.Tensor:
        """Call the stepper's method, twice if the step is replayed. All ranks must call it.

        Raises JobFailed on all ranks if the results of any rank differ.
        """
        if self._every is None or step % self._every:
            return stepper.forward_backward(batch)
        module, objective = self._recipe.module, self._recipe.objective
        with restoring_state(module, objective), restoring_generators(module), objective.without_logging():
            _, before = self._compute(stepper, batch)
            stepper.skip()
        loss, now = self._compute(stepper, batch)
        differences = {name: _difference(before.get(name), now.get(name)) for name in {**before, **now}}
        differing = {name: difference for name, difference in differences.items() if difference is not None}
        if self._world.collectives.any_async(bool(differing))():
            if not differing:
                raise JobFailed(f"step {step}: the computations of another rank differ", follows=True)
            # With another loss, all gradients differ.
            worst = "the loss" if "the loss" in differing else max(differing, key=lambda name: differing[name])
            raise JobFailed(
                f"rank {self._world.rank}, step {step}: {worst} differs by {differing[worst]:.6g} between two "
                "computations; stopped before the update\n"
                "either the device computes wrong values, or the model uses operations that are not deterministic; "
                "resume= continues from the last checkpoint"
            )
        return loss

    def _compute(self, stepper: Stepper, batch: StepBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, and copies of the loss and of this rank's gradients by name."""
        local: dict[nn.Parameter, torch.Tensor] = {}

        def copy(parameter: nn.Parameter) -> None:  # called before DDP exchanges the gradient
            assert parameter.grad is not None
            local[parameter] = parameter.grad.clone()

        whole = [p for p in self._names if p.requires_grad and not isinstance(p, DTensor)]
        hooks = [parameter.register_post_accumulate_grad_hook(copy) for parameter in whole]
        try:
            loss = stepper.forward_backward(batch)
        finally:
            for hook in hooks:
                hook.remove()
        found = {"the loss": loss.clone()}
        for parameter, name in self._names.items():
            if parameter in local:
                found[f"the gradient of {name}"] = local[parameter]
            elif parameter.grad is not None:
                found[f"the gradient of {name}, after the exchange,"] = local_part(parameter.grad).clone()
        return loss, found


def _difference(before: torch.Tensor | None, now: torch.Tensor | None) -> float | None:
    """Return the largest difference, infinity if it is not finite; None if all bits are equal."""
    if before is None or now is None:
        return torch.inf
    before, now = (tensor.to_dense().reshape(-1) for tensor in (before, now))
    if torch.equal(before.view(torch.uint8), now.view(torch.uint8)):
        return None
    return (now - before).abs().nan_to_num(torch.inf).max().item()
