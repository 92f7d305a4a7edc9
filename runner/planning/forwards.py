"""The forward of a plan: one for all ranks that build the same model."""

from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from runner.config.schema import Config
from runner.input.pytree import map_tensors
from runner.objectives.objective import Prediction
from runner.objectives.supervised import Supervised
from runner.training.components import Components
from runner.training.dry_run import DryRun
from runner.training.preflight import Findings, run_forward


class Forwards:
    """Runs the forward of a model once, and repeats what it has found for ranks that build the same model again.

    A forward of fake tensors takes as long as a fifth of the plan of a rank.
    """

    def __init__(self) -> None:
        # The result, and the attributes that the forward has added to each module.
        self._known: dict[tuple[Any, ...], tuple[DryRun, list[dict[str, Any]]]] = {}

    def run(self, config: Config, components: Components) -> Findings:
        """Return the findings of `run_forward`, and mark the same modules. Raises InputError as it does."""
        parallel, objective = components.parallel, components.objective
        modules = [*components.module.modules()]
        axes = parallel.resolved_axes
        key = repr(replace(config, parallel=None)), parallel.shards_matrices, parallel.meta_init, axes.sequence
        if key in self._known:
            forward, added = self._known[key]
            for module, attributes in zip(modules, added, strict=True):
                vars(module).update(attributes)
            if isinstance(objective, Supervised):
                objective.settle(forward.prediction.outputs, components.sample().targets, components.is_ragged)
            return Findings(forward)
        before = [set(vars(module)) for module in modules]
        found = run_forward(components, config.activation_checkpointing != "none")
        self._known[key] = (
            _without_memory(found.forward),
            [
                {name: vars(module)[name] for name in vars(module).keys() - names}
                for module, names in zip(modules, before, strict=True)
            ],
        )
        return found


def _without_memory(forward: DryRun) -> DryRun:
    """Return the result with outputs and targets that occupy no memory in a plan."""
    with _disable_current_modes():
        outputs, targets = map_tensors(_as_meta, (forward.prediction.outputs, forward.prediction.targets))
    return replace(forward, prediction=Prediction({}, outputs, targets))


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
