"""The objective of the configuration made into an object, with its loss; what is trained of them joins the model."""

from collections.abc import Mapping

import torch
from torch import nn

from runner.config.diagnostics.signature import accepts
from runner.config.instantiate import make_group
from runner.config.schema import Config
from runner.errors import InputError
from runner.training.losses import Auto
from runner.training.modes import modes_that
from runner.training.objective import Objective, check_names
from runner.training.parts import attach_part
from runner.training.strategy import Parallel
from runner.training.supervised import Supervised


def make_objective(config: Config, choices: Mapping[str, str], parallel: Parallel) -> Objective:
    """What a step minimises; it gets the loss of the configuration if it takes one.

    Raises InputError for an option that it or the loss refuses, and for what the mode does not carry.
    """
    target = config.objective["_target_"]
    given = {}
    if accepts(target, "loss"):
        given["loss"] = make_group(choices, "loss", config.loss)
    elif config.loss["_target_"] != f"{Auto.__module__}.{Auto.__qualname__}":
        raise InputError(f"loss={choices['loss']} has no effect on objective={choices['objective']}, which takes none")
    objective: Objective = make_group(choices, "objective", config.objective, **given)
    if not isinstance(objective, Objective):
        raise InputError(f"objective._target_={target}: derive it from runner.training.objective.Objective")
    check_names(objective)
    several, mode = len(objective.losses) > 1, choices["parallel"]
    if parallel.carries == "supervised" and not isinstance(objective, Supervised):
        others = modes_that(lambda mode: mode.carries != "supervised")
        raise InputError(
            f"objective={choices['objective']} calls the model itself, and parallel={mode} carries a loss of outputs "
            f"and targets alone; try {others}"
        )
    if parallel.carries != "several_losses" and several:
        others = modes_that(lambda mode: mode.carries == "several_losses")
        raise InputError(
            f"objective={choices['objective']} has {len(objective.losses)} losses, and parallel={mode} carries one; "
            f"try {others}"
        )
    return objective


def attach(module: nn.Module, objective: Objective, device: torch.device, dtype: torch.dtype) -> None:
    """Put what the objective and its loss hold of tensors on the device; what is trained belongs to the model.

    Raises InputError where the model has something of that name.
    """
    try:
        if isinstance(objective, Supervised):
            loss = objective.function
            if isinstance(loss, nn.Module) and any(True for _ in loss.to(device=device, dtype=dtype).parameters()):
                attach_part(module, "loss", loss)
        elif isinstance(objective, nn.Module):
            objective.to(device=device, dtype=dtype)
            if any(True for _ in objective.state_dict()):
                attach_part(module, "objective", objective)
    except ValueError as error:
        raise InputError(str(error)) from None
