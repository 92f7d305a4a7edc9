"""A dry run that finds the state of a forward: parameters that it writes, and attributes that checkpoints lack."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from runner.checkpoints.extra_state import extra_state, with_extra_state
from runner.errors import InputError
from runner.input.batch import MicroBatch
from runner.input.rng import seed_all
from runner.objectives.objective import Objective
from runner.objectives.supervised import Supervised
from runner.optimization.parameter_patterns import counted
from runner.training.components import Components
from runner.training.mode import Axes, Parallel
from runner.training.model.deferred_init import probe
from runner.training.model.forward_state import mark_as_stateful, parts_of, restoring_all
from runner.training.model.object_state import frozen_value


@dataclass
class StateOfForward:
    """What forward passes in training mode accumulate, which two passes of the same batch show."""

    parameters: list[str] = field(default_factory=list)  # those that a pass writes
    attributes: list[str] = field(default_factory=list)  # of the model
    of_objective: list[str] = field(default_factory=list)  # attributes of the objective or its loss
    parts: list[Any] = field(default_factory=list)  # the modules and other objects to which all of these belong

    def warnings(self, choices: Mapping[str, str], objective: Objective) -> list[str]:
        """Return a warning about attributes, which no checkpoint contains."""
        component = "loss" if isinstance(objective, Supervised) else "objective"
        found = [("model", self.attributes), (component, self.of_objective)]
        return [
            f"{group}={choices[group]}: forward changes the attribute {counted(names, 3)}, which no checkpoint "
            "contains: it restarts when the run is resumed, and may differ between ranks; register it as a buffer of a "
            "module, or define get_extra_state and set_extra_state"
            for group, names in found
            if names
        ]

    def refuse(self, choices: Mapping[str, str], module: nn.Module, parallel: Parallel, axes: Axes) -> None:
        """Raise InputError if the mode cannot keep what the forward writes to parameters."""
        trained = [name for name in self.parameters if name in _trained(module)]
        is_sharded = parallel.shards_matrices or axes.shard * axes.stage * axes.tensor > 1
        names, why = self.parameters, "of which each rank keeps a shard, or only some ranks a copy"
        if not (is_sharded or parallel.meta_init):
            names, why = trained if axes.servers else [], "which the server replaces in each step"
        if names:
            raise InputError(
                f"parallel={choices['parallel']}: the forward of model={choices['model']} changes the parameter "
                f"{names[0]}, {why}; try parallel=ddp"
            )


def _trained(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def check_extra_state(choices: Mapping[str, str], module: nn.Module) -> None:
    """Raise InputError if a checkpoint cannot store or restore what a module's `get_extra_state` returns."""
    modules = with_extra_state(module)
    try:
        extra_state(modules)
    except ValueError as error:
        raise InputError(f"model={choices['model']}: {error}") from None
    for part in modules.values():
        if type(part).set_extra_state is nn.Module.set_extra_state:
            raise InputError(
                f"model={choices['model']}: {type(part).__name__} defines get_extra_state without set_extra_state, so "
                "that a run cannot be resumed; define both"
            )


def find_state(components: Components) -> StateOfForward:
    """Return the state of the forward, and mark the objects that have it for `ForwardState`.

    Model and objective are called twice with the same samples and random numbers: a value that the second pass changes
    again is a state, unlike a cache or the activations of the last pass. Exceptions are ignored, because training
    reports them.
    """
    state = StateOfForward()
    with suppress(Exception):
        probe(components.module, _find_state, state, components.objective, components.samples.batch([0, 0]))
    for part in state.parts:
        mark_as_stateful(part)  # now, because attributes have been restored
    return state


def _find_state(model: nn.Module, state: StateOfForward, objective: Objective, micro_batch: MicroBatch) -> None:
    def run() -> None:
        seed_all(0)
        for name in objective.losses:
            objective.measure(model, name, micro_batch)

    names = {id(part): name for name, part in model.named_modules()}
    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    with restoring_all(model, objective) as before:
        try:
            run()
        finally:  # writing to a placeholder of a parameter fails
            written = before.written()
            state.parameters += [name for key, name in parameters.items() if key in written]
            for part in model.modules():
                if any(id(parameter) in written for parameter in part.parameters(recurse=False)):
                    state.parts.append(part)
        changed = [(part, name) for part, name in before.changed() if not _is_kept(part, name)]
        parts = parts_of(model, objective)
        changed += [(part, name) for part in parts for name in getattr(part, "_non_persistent_buffers_set", ())]
        saved = [part for part in (model, objective) if isinstance(part, nn.Module)]  # attached to the model later
        extra = [module for part in saved for module in with_extra_state(part).values()]
        if not changed and not extra:
            return
        first = [frozen_value(_get(part, name)) for part, name in changed]
        first_extra = [frozen_value(module.get_extra_state()) for module in extra]
        run()
        covered = {
            id(part)
            for module, value in zip(extra, first_extra, strict=True)
            if value != frozen_value(module.get_extra_state())
            for part in module.modules()
        }
        for (part, name), value in zip(changed, first, strict=True):
            if value == frozen_value(_get(part, name)):
                continue
            state.parts.append(part)
            if id(part) in covered:
                continue
            prefix = names.get(id(part))
            if prefix is None:
                state.of_objective.append(name)
            else:
                state.attributes.append(f"{prefix}.{name}" if prefix else name)


def _get(part: Any, name: str) -> Any:
    return getattr(part, name, None)


def _is_kept(part: Any, name: str) -> bool:
    """Return True for what a checkpoint contains, and for the mode that each pass sets."""
    return isinstance(part, nn.Module) and name in ("training", "_parameters", "_buffers", "_modules")
