"""A parameter server: rank 0 keeps the weights and the optimizer, the other ranks compute gradients for it."""

from typing import Literal

import torch.distributed as dist
from torch import nn

from runner.config.schema import Config
from runner.distributed.sync_batch_norm import has_batch_norm, use_group
from runner.distributed.world import World
from runner.parallel.parameter_server_models import ServerModel, TrainerModel
from runner.parallel.parameter_server_rpc import join_rpc
from runner.training.mode import Axes, Parallel, ParallelModel, Recipe
from runner.training.model.submodules import attached_loss


class ParameterServer(Parallel):
    """parallel=ps (Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014).

    updates=sync gives the numbers of parallel=none. With updates=async, each trainer's part of the global gradient is
    a separate update, at weights that the others may have changed since they were fetched. No trainer gets more than
    one step ahead of another, because all ranks vote after each step whether to stop. Dropout under forward=remote
    draws its masks on the server, in the order of the trainers' calls.
    """

    needs_group = True
    fails_at_once = False

    def __init__(
        self,
        updates: Literal["sync", "async"] = "sync",
        forward: Literal["local", "remote"] = "local",
        allow_network: bool = False,
    ):
        self.updates, self.forward, self.allow_network = updates, forward, allow_network
        self.supported_objectives = "one_loss" if forward == "local" else "supervised"

    def axes(self, world_size: int) -> Axes:
        if world_size < 2:
            raise ValueError(
                f"parallel=ps needs at least 2 ranks, a server and a trainer, but the world has {world_size}; "
                "try launcher=spawn launcher.nproc_per_node=2"
            )
        return Axes(replicate=world_size - 1, servers=1)

    def check(self, config: Config, module: nn.Module) -> list[str]:
        is_async, is_remote = self.updates == "async", self.forward == "remote"
        key = "updates=async" if is_async else "forward=remote"
        recomputed = config.activation_checkpointing
        rules = [
            (
                config.precision == "fp16",
                "precision=fp16: parallel=ps has no loss scale that server and trainers share; try bf16",
            ),
            (
                is_async and config.clip_grad_norm is not None,
                f"clip_grad_norm={config.clip_grad_norm}: parallel.updates=async never has the whole gradient; "
                "try parallel.updates=sync",
            ),
            (
                config.on_nonfinite == "skip" and (is_async or is_remote),
                f"on_nonfinite=skip: under parallel.{key} the trainers do not have the gradients of a step before they "
                "are applied; try on_nonfinite=stop",
            ),
            (
                is_remote and has_batch_norm(module),
                "parallel.forward=remote: BatchNorm on the server would see one trainer's samples at a time; "
                "try parallel.forward=local",
            ),
            (
                is_remote and attached_loss(module) is not None,
                "parallel.forward=remote: the loss has parameters, which the server would not update; "
                "try parallel.forward=local",
            ),
            (
                is_remote and recomputed != "none",
                f"activation_checkpointing={recomputed}: under parallel.forward=remote the weights may have changed "
                "before backward recomputes a block; try parallel.forward=local",
            ),
            (
                is_remote and config.compile,
                "compile=true: parallel.forward=remote replaces the model's weights at each call; "
                "try parallel.forward=local",
            ),
        ]
        return [message for is_broken, message in rules if is_broken]

    def prepare(self, recipe: Recipe, world: World) -> ParallelModel:
        if not self.allow_network and world.rank_info.local_world_size < world.world_size:
            raise ValueError(
                f"parallel.allow_network=false: the {world.world_size} ranks are on several machines, and RPC executes "
                "whatever anybody sends; in a network that you trust set parallel.allow_network=true"
            )
        for tensor in (*recipe.module.parameters(), *recipe.module.buffers()):
            dist.broadcast(tensor.data, src=0)
        trainers = dist.new_group(list(range(1, world.world_size)))
        if world.rank == 0:
            model = ServerModel(recipe, world, self.updates, self.forward)
            join_rpc(world, model.server, self.allow_network)
            return model
        join_rpc(world, None, self.allow_network)
        assert isinstance(trainers, dist.ProcessGroup)
        use_group(recipe.module, trainers)  # for SyncBatchNorm: the server calls no forward
        return TrainerModel(recipe, world, self.updates, self.forward)
