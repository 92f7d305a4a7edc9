"""The placement of a model's submodules on several devices of one rank."""

from collections.abc import Mapping

import torch
from torch import nn

from runner.distributed.world import World
from runner.errors import InputError, as_input_error
from runner.training.model.submodules import offered


def place_submodules(module: nn.Module, choices: Mapping[str, str], spans_devices: bool, world: World) -> list[str]:
    """Call the model's `place`, if it has one, with its `devices` or those of this rank. Return warnings.

    Raises InputError if the devices do not fit the model or the mode.
    """
    place, name, count = offered(module, "place", []), f"model={choices.get('model')}", world.backend.devices_per_rank
    if place is None:
        if count > 1:
            raise InputError(
                f"backend.devices_per_rank={count} has no effect on {name}, which cannot be split; "
                "try model=split, or backend.devices_per_rank=1"
            )
        return []
    chosen: list[torch.device] | None = getattr(module, "devices", None)
    if chosen is None and count == 1:
        where = "the CPU" if world.device.type == "cpu" else f"{world.device}; try backend.devices_per_rank=2"
        return [f"{name}: all submodules are on {where}"]

    key = f"backend.devices_per_rank={count}" if chosen is None else f"model.devices={[*map(str, chosen)]}"
    devices = chosen or world.devices
    if not spans_devices and len(set(devices)) > 1:
        raise InputError(f"{key}: parallel={choices.get('parallel')} has one device per rank; try parallel=ddp")
    uses_gpus = any(device.type != "cpu" for device in devices)
    if chosen and (count > 1 or (uses_gpus and world.rank_info.local_world_size > 1) or chosen[0] != world.device):
        raise InputError(
            f"{key} must begin with the device {world.device} of the samples, and be the devices of a single rank; "
            f"try model.devices=null backend.devices_per_rank={len(chosen)}"
        )
    with as_input_error(f"{key}: "):
        place(devices)
    return [] if uses_gpus else [f"{name}: all submodules are on the CPU"]
