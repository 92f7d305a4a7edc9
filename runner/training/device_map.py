"""A model in parts on several devices of one rank: which part goes where, in modes that allow it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from runner.distributed.world import World
from runner.errors import InputError


def place_parts(module: nn.Module, choices: Mapping[str, str], spans_devices: bool, world: World) -> list[str]:
    """Put the parts of a model that has a `place` on the devices it names, else on this rank's, if it has several.

    A model's `devices` are those it was told in its configuration, or None. Returns warnings. Raises InputError where
    the devices do not fit the model, or the mode takes one device per rank only.
    """
    parts: Any = module
    count = world.backend.devices_per_rank
    if not hasattr(module, "place"):
        if count > 1:
            raise InputError(
                f"backend.devices_per_rank={count} has no effect on model={choices.get('model')}, which has one part; "
                "try model=split, or backend.devices_per_rank=1"
            )
        return []
    named: list[torch.device] | None = parts.devices
    if named is None and count == 1:
        text = "the CPU" if world.device.type == "cpu" else f"{world.device}; try backend.devices_per_rank=2"
        return [f"model={choices.get('model')}: all parts are on {text}"]

    key = f"backend.devices_per_rank={count}" if named is None else f"model.devices={[*map(str, named)]}"
    devices = named or world.devices
    if named and count > 1:
        raise InputError(f"{key} and backend.devices_per_rank={count} exclude each other; drop one")
    if not spans_devices and len(set(devices)) > 1:
        raise InputError(f"{key}: parallel={choices.get('parallel')} has one device per rank; try parallel=ddp")
    if named and world.rank_info.local_world_size > 1 and any(device.type != "cpu" for device in named):
        raise InputError(
            f"{key} would be those of all {world.rank_info.local_world_size} ranks on this machine; try "
            f"model.devices=null backend.devices_per_rank={len(named)}"
        )
    if devices[0] != world.device:
        raise InputError(f"{key} must begin with {world.device}, where the samples are")
    try:
        parts.place(devices)
    except ValueError as error:
        raise InputError(f"{key}: {error}") from None
    if all(device.type == "cpu" for device in devices):
        return [f"model={choices.get('model')}: all parts are on the CPU"]
    return []
