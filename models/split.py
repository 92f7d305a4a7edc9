"""A model in parts on several devices of one process: the only model that knows its devices."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class Split(nn.Module):
    """The stages of `model` in `parts` parts of about equally many stages, each of which may be on another device.

    Parameters and buffers have the same names as in `model`, so that each can load the state dict of the other. Inputs
    may be on any device, and outputs are returned on that device. Parts run on the device of their weights: that of
    `model`, unless `devices` is set or `place` is called.
    Raises ValueError if `model` cannot be split or a device does not exist.
    """

    def __init__(self, model: nn.Module, parts: int = 2, devices: Sequence[str] | None = None) -> None:
        super().__init__()
        name = type(model).__name__
        get_stages: Callable[[], list[nn.Module]] | None = getattr(model, "stages", None)
        if get_stages is None or isinstance(get_stages, nn.Module):  # some models have a submodule of this name
            raise ValueError(f"model={name} cannot be split, because it does not define stages(); try convnet")
        stages = get_stages()
        if len(stages) < 2:
            raise ValueError(f"model={name} cannot be split, because it has one stage; try convnet")
        if not 2 <= parts <= len(stages):
            raise ValueError(f"parts={parts} must be at least 2 and at most the {len(stages)} stages of {name}; try 2")
        if [*model.parameters(recurse=False), *model.buffers(recurse=False)]:
            raise ValueError(f"model={name} cannot be split, because it has tensors outside its submodules")
        cuts = [part * len(stages) // parts for part in range(parts + 1)]
        self._stages = stages
        self._parts = [nn.Sequential(*stages[start:end]) for start, end in pairwise(cuts)]
        if tied := _tied(model, self._parts):
            raise ValueError(
                f"model={name} cannot be split, because {tied} are one tensor in two parts; try an untied model"
            )
        self.devices: list[torch.device] | None = None
        # The model's submodules become submodules of this module, under their names. Adding the model itself would
        # prefix all names.
        for child_name, child in model.named_children():
            self.add_module(child_name, child)
        if devices is not None:
            self.place(devices)

    def place(self, devices: Sequence[str | torch.device]) -> None:
        """Move each part to its device. Raise ValueError unless each part has a device that exists."""
        option = f"devices=[{','.join(map(str, devices))}]"
        if len(devices) != len(self._parts):
            raise ValueError(f"{option} must be {len(self._parts)} devices, one per part")
        try:
            self.devices = [torch.device(device) for device in devices]
            for part, device in zip(self._parts, self.devices, strict=True):
                part.to(device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"{option}: {str(error).splitlines()[0]}") from None

    def forward(self, samples: Tensor) -> Tensor:
        features = samples
        for part in self._parts:
            weight = next(part.parameters(), None)
            features = part(features if weight is None else features.to(weight.device))
        return features.to(samples.device)

    def stages(self) -> list[nn.Module]:
        return list(self._stages)


def _tied(model: nn.Module, parts: Sequence[nn.Module]) -> str | None:
    """Return the names of the first parameter that several parts share, or None. It can be on one device only."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    in_parts = Counter(parameter for part in parts for parameter in part.parameters())
    return next((" and ".join(names[parameter]) for parameter, count in in_parts.items() if count > 1), None)
