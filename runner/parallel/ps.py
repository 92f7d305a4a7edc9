"""A parameter server: rank 0 keeps the weights and the optimizer, the other ranks compute gradients for it."""

from typing import Literal

import torch.distributed as dist
from torch import nn

from runner.config.schema import Config
from runner.distributed.sync_batch_norm import has_batch_norm, use_group
from runner.distributed.world import World
from runner.parallel.ps_ranks import Serving, Training
from runner.parallel.ps_server import Server, join_rpc
from runner.training.parts import attached_loss
from runner.training.strategy import Axes, Carries, Recipe, Spread


class ParameterServer:
    """parallel=ps (Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014).

    updates=sync gives the numbers of parallel=none. With async each trainer's share of the global gradient is an
    update of its own, at weights that the others may have changed since they were fetched; no trainer gets more than
    one step ahead of another, as the loop asks all ranks after each step whether to stop. Dropout under forward=remote
    draws its masks on the server, in the order in which trainers call.
    """

    needs_group = True
    meta_init = False
    spans_devices = False
    fails_at_once = False

    @property
    def carries(self) -> Carries:
        return "one_loss" if self.forward == "local" else "supervised"

    def __init__(
        self,
        updates: Literal["sync", "async"] = "sync",
        forward: Literal["local", "remote"] = "local",
        allow_network: bool = False,
    ):
        self.updates, self.forward, self.allow_network = updates, forward, allow_network

    def axes(self, world_size: int) -> Axes:
        if world_size < 2:
            raise ValueError(
                f"parallel=ps needs at least 2 ranks, a server and a trainer, but the world has {world_size}; "
                "try launcher=spawn launcher.nproc_per_node=2"
            )
        return Axes(replicate=world_size - 1, servers=1)

    def check(self, config: Config, module: nn.Module) -> list[str]:
        messages = []
        if config.precision == "fp16":
            messages.append("precision=fp16: parallel=ps has no loss scale that server and trainers share; try bf16")
        if self.updates == "async" and config.clip_grad_norm is not None:
            messages.append(
                f"clip_grad_norm={config.clip_grad_norm}: parallel.updates=async never has the whole gradient; "
                "try parallel.updates=sync"
            )
        if config.on_nonfinite == "skip" and (self.updates == "async" or self.forward == "remote"):
            key = "updates=async" if self.updates == "async" else "forward=remote"
            messages.append(
                f"on_nonfinite=skip: under parallel.{key} the trainers do not have the gradients of a step before they "
                "are applied; try on_nonfinite=stop"
            )
        if self.forward == "remote" and has_batch_norm(module):
            messages.append(
                "parallel.forward=remote: BatchNorm on the server would see one trainer's samples at a time; "
                "try parallel.forward=local"
            )
        if self.forward == "remote" and attached_loss(module) is not None:
            messages.append(
                "parallel.forward=remote: the loss has parameters of its own, which the server would not see; "
                "try parallel.forward=local"
            )
        if self.forward == "remote" and config.activation_checkpointing != "none":
            messages.append(
                f"activation_checkpointing={config.activation_checkpointing}: under parallel.forward=remote other "
                "weights are in place when backward comes; try parallel.forward=local"
            )
        if self.forward == "remote" and config.compile:
            messages.append(
                "compile=true: parallel.forward=remote replaces the model's weights at each call; "
                "try parallel.forward=local"
            )
        return messages

    def prepare(self, recipe: Recipe, world: World) -> Spread:
        if not self.allow_network and world.rank_info.local_world_size < world.world_size:
            raise ValueError(
                f"parallel.allow_network=false: {world.world_size} ranks on several machines, but RPC runs whatever "
                "reaches it; in a network that you trust set parallel.allow_network=true"
            )
        for tensor in (*recipe.module.parameters(), *recipe.module.buffers()):
            dist.broadcast(tensor.data, src=0)
        trainers = dist.new_group(list(range(1, world.world_size)))
        server = Server(recipe, world.world_size - 1, world.backend.timeout_s) if world.rank == 0 else None
        join_rpc(world, server, self.allow_network)
        if server is not None:
            return Serving(server, world, self)
        assert isinstance(trainers, dist.ProcessGroup)
        use_group(recipe.module, trainers)  # SyncBatchNorm: the server calls no forward
        return Training(recipe, world, self)
