"""A model in parts on several devices of one process: the one model that is told its devices."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class Split(nn.Module):
    """The stages of `model` in `parts` parts, as even in number as can be; each may be on a device of its own.

    Names of parameters and buffers are those of `model`, so that either loads the other's state. Inputs may be on any
    device, and the outputs come back to it. Parts run where their weights are: until `place` is called, or `devices`
    given, that is where `model` was.
    Raises ValueError where `model` cannot be split so, and where a device does not exist.
    """

    def __init__(self, model: nn.Module, parts: int = 2, devices: Sequence[str] | None = None) -> None:
        super().__init__()
        name = type(model).__name__
        offer: Callable[[], list[nn.Module]] | None = getattr(model, "stages", None)
        if offer is None:
            raise ValueError(f"model={name} cannot be split, as it does not offer its stages; try convnet")
        stages = offer()
        if len(stages) < 2:
            raise ValueError(f"model={name} cannot be split, as it has one stage; try convnet")
        if not 2 <= parts <= len(stages):
            raise ValueError(f"parts={parts} must be at least 2 and at most the {len(stages)} stages of {name}; try 2")
        if [*model.parameters(recurse=False), *model.buffers(recurse=False)]:
            raise ValueError(f"model={name} cannot be split, as it has tensors outside its submodules")
        cuts = [part * len(stages) // parts for part in range(parts + 1)]
        self._stages = stages
        self._parts = [nn.Sequential(*stages[start:end]) for start, end in pairwise(cuts)]
        if tied := _tied(model, self._parts):
            raise ValueError(
                f"model={name} cannot be split, as {tied} are one tensor in two parts; try an untied model"
            )
        self.devices: list[torch.device] | None = None
        # The model's submodules become this module's own, under their names. The model itself stays outside, or each
        # name would begin with its.
        for child_name, child in model.named_children():
            self.add_module(child_name, child)
        if devices is not None:
            self.place(devices)

    def place(self, devices: Sequence[str | torch.device]) -> None:
        """Move each part to its device. Raises ValueError unless there are as many, and all of them exist."""
        typed = f"devices=[{','.join(map(str, devices))}]"
        if len(devices) != len(self._parts):
            raise ValueError(f"{typed} must be {len(self._parts)} devices, one per part")
        try:
            self.devices = [torch.device(device) for device in devices]
            for part, device in zip(self._parts, self.devices, strict=True):
                part.to(device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"{typed}: {str(error).splitlines()[0]}") from None

    def forward(self, samples: Tensor) -> Tensor:
        features = samples
        for part in self._parts:
            weight = next(part.parameters(), None)
            features = part(features if weight is None else features.to(weight.device))
        return features.to(samples.device)

    def stages(self) -> list[nn.Module]:
        return list(self._stages)


def _tied(model: nn.Module, parts: Sequence[nn.Module]) -> str | None:
    """The names of the first parameter that several parts share, which cannot be on the device of each."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    in_parts = Counter(parameter for part in parts for parameter in part.parameters())
    return next((" and ".join(names[parameter]) for parameter, count in in_parts.items() if count > 1), None)
