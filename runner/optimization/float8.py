"""precision=float8: matrix products of linear layers in 8 bits, by torchao; all else is computed as with bf16."""

import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from runner.errors import InputError
from runner.optimization.parameter_patterns import counted

MULTIPLE = 16  # of which both sizes of a layer must be multiples (torch._scaled_mm)
CAPABILITY = (8, 9)  # the first GPUs with products in float8: L4, H100


def convert_linears(model: nn.Module, device: torch.device) -> list[str]:
    """Convert linear layers, in place. Return header lines.

    The outputs and the gradients of the inputs are computed in float8, with a scale for each row, and the gradients
    of the weights in bfloat16 (torchao's recipe rowwise_with_gw_hp). So the numbers of a sample do not depend on the
    other samples of its rank. CPUs emulate the products. Layers whose sizes are no multiples of 16, and layers of a
    class derived from nn.Linear, stay unchanged.

    Raises InputError if torchao is missing, the GPU has no such products, or no layer can be converted.
    Source: https://docs.pytorch.org/ao/stable/workflows/training.html
    """
    emulates = is_emulated(device)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise InputError(
            f"precision=float8 needs a GPU with float8, such as an H100 or L4, not {name}; try precision=bf16"
        )
    pytree = logging.getLogger("torch.utils._pytree")
    level = pytree.level
    try:
        pytree.setLevel(logging.ERROR)  # torchao 0.18 calls a function that torch 2.14 deprecates
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ModuleNotFoundError:
        raise InputError("precision=float8 needs torchao; pip install 'experiment-runner[float8]'") from None
    finally:
        pytree.setLevel(level)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    converted = [name for name, module in linears.items() if _is_suitable(module)]
    if not converted:
        raise InputError(
            f"precision=float8: the model has no nn.Linear whose sizes are multiples of {MULTIPLE}; try precision=bf16"
        )
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=emulates)
    for module in map(linears.__getitem__, converted):
        # Changes the class, because a new module would lack the hooks, and other parts know the module by its identity.
        new = convert_to_float8_training(copy.copy(module), config=config)
        module.__class__ = type(new)
        vars(module).update({name: value for name, value in vars(new).items() if name not in vars(module)})
        module.register_forward_pre_hook(_prepare, with_kwargs=True)
    others = [name for name in linears if name not in converted]
    return [
        f"float8   {counted(converted, 3)}; the numbers differ from those of bf16"
        + (", and are emulated on this CPU" if emulates else "")
        + (f"; in bf16: {counted(others, 3)}" if others else "")
    ]


def is_emulated(device: torch.device) -> bool:
    """Return True if the device has no products in float8. A plan for a GPU replaces this function."""
    return device.type == "cpu"


def _is_suitable(module: nn.Linear) -> bool:
    return type(module) is nn.Linear and module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0


def _prepare(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any], dict[str, Any]]:
    """Cast the input as autocast does, which torchao's layers do only on GPUs, and make it contiguous for them."""
    (inputs,) = (*args, *kwargs.values())
    if torch.is_autocast_enabled(inputs.device.type):
        inputs = inputs.to(torch.get_autocast_dtype(inputs.device.type))
    return (inputs.contiguous(),), {}
