"""Which of its machine's devices a rank takes."""

import itertools
import json

import torch

from runner.distributed.world import World


def choose_devices(world: World) -> list[str]:
    """Take this rank's devices; what is wrong with them, one message each. All ranks must call it."""
    messages = world.backend.check()
    on_gpu = not messages and world.backend.device_type() == "cuda"
    each, num_ranks = world.backend.devices_per_rank, world.rank_info.local_world_size
    # Slurm may let each of its tasks see its own GPU alone, as --gpus-per-task=1 does.
    seen = range(each) if on_gpu and num_ranks > 1 and torch.cuda.device_count() == each else ()
    uuids = {str(torch.cuda.get_device_properties(number).uuid) for number in seen}
    others = world.agreement.others_here("gpus", json.dumps(sorted(uuids)))
    if messages:
        return messages
    if not on_gpu:
        world.devices = [torch.device("cpu")] * each
        return []
    bound = bool(uuids) and uuids.isdisjoint(itertools.chain.from_iterable(map(json.loads, others)))
    first = 0 if bound else world.rank_info.local_rank * each
    if (uuids and not bound) or first + each > torch.cuda.device_count():
        need = "a GPU each" if each == 1 else f"{each} GPUs each, {num_ranks * each} together"
        return [
            f"{num_ranks} ranks on this machine need {need}, but there are {torch.cuda.device_count()}; "
            "start fewer, or try backend=gloo"
        ]
    world.devices = [torch.device("cuda", first + number) for number in range(each)]
    return []
