"""Detection of state that differs between ranks, because forward computes it from the samples of one rank."""

import logging
from contextlib import suppress

from torch.nn.modules.batchnorm import _BatchNorm

from runner.checkpoints.extra_state import extra_state_hash, with_extra_state
from runner.checkpoints.saved_state import tensor_hashes
from runner.distributed.sync_batch_norm import statistics_of
from runner.distributed.world import World
from runner.optimization.parameter_patterns import counted
from runner.training.build import Experiment
from runner.training.callbacks.contract import Callback, Progress
from runner.training.mode import ParallelModel

log = logging.getLogger(__name__)


class BufferCheck(Callback):
    """Compares what forward changes on all ranks after steps 1, 2, 4, 8, ...: buffers, parameters, extra states.

    The buffers of BatchNorm are not compared (`sync_batchnorm`).
    """

    def __init__(self, experiment: Experiment, parallel_model: ParallelModel, world: World):
        self._module, self._parallel_model, self._world = experiment.recipe.module, parallel_model, world
        axes, rank = experiment.axes, world.rank
        # Ranks with the same index along the stage and tensor axes have the same tensors, and read different samples.
        # A server calls no forward.
        self._part = None if axes.data_rank(rank) is None else (rank - axes.servers) % (axes.stage * axes.tensor)
        self._written = [*experiment.recipe.written]
        self._has_warned = False

    def after_step(self, now: Progress) -> None:
        if self._world.world_size == 1 or now.step & (now.step - 1):
            return
        layers = [layer for layer in self._module.modules() if isinstance(layer, _BatchNorm)]
        of_norms = {id(statistic) for layer in layers for statistic in statistics_of(layer)}
        buffers = {name: buffer for name, buffer in self._module.named_buffers() if id(buffer) not in of_norms}
        parameters = dict(self._module.named_parameters())
        written = {name: parameters[name] for name in self._written}
        extra = with_extra_state(self._module)
        compared = {**buffers, **written}
        hashes: dict[tuple[int, str], int] = {}
        if self._part is not None and (compared or extra):
            for name, tensor in {**self._parallel_model.local_parameters(), **compared}.items():
                if not tensor.is_meta:
                    with suppress(NotImplementedError):  # torch cannot hash sparse tensors, for example
                        hashes |= {(self._part, key): value for key, value in tensor_hashes({name: tensor}).items()}
            hashes |= {(self._part, name): extra_state_hash(part) for name, part in extra.items()}
        # All ranks gather, also those without buffers: a forward may create one, and some ranks call none.
        gathered = self._world.collectives.gather_objects((hashes, [*compared, *extra])) or []
        names = {name for _, of_rank in gathered for name in of_rank}
        first: dict[tuple[int, str], int] = {}
        differ = {
            key[1]: None
            for of_rank, _ in gathered
            for key, value in of_rank.items()
            if first.setdefault(key, value) != value
        }
        # If parameters differ, the ranks are not replicas: local_sgd trains them separately.
        if differ and differ.keys() <= names and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s differ between ranks after step %d: %s; forward computes them from the samples of one rank, "
                "so that the results depend on the number of ranks",
                "buffers" if differ.keys() <= buffers.keys() else "states of the model",
                now.step,
                counted([*differ], 3),
            )
