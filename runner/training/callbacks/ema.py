"""The exponential moving average of the weights over the steps."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from runner.checkpoints.saved_state import AVERAGE, MODEL, LocalState, SavedState, local_part
from runner.errors import Preempted
from runner.optimization.parameter_patterns import names_of
from runner.training.callbacks.contract import Callback, Progress
from runner.training.mode import ParallelModel

log = logging.getLogger(__name__)


class EMA(Callback):
    """The exponential moving average of this rank's trained parameters, which replaces them in evaluations.

    It starts with the current weights. Update n, counted from 1, computes d * average + (1 - d) * weights, where d is
    `decay`, or with a warm-up the smaller of `decay` and (1 + n) / (warmup_steps + n). Buffers, such as BatchNorm's
    statistics, are not averaged.
    """

    def __init__(self, parallel_model: ParallelModel, module: nn.Module, decay: float, warmup_steps: int = 0):
        """Start with the current weights; `module` has the parameter names of a checkpoint."""
        self._parallel_model, self._decay, self._warmup_steps = parallel_model, decay, warmup_steps
        names = names_of([*module.named_parameters(remove_duplicate=False)])
        self._names = {aliases[0]: aliases for aliases in names.values()}
        self._reset()

    def _reset(self) -> None:
        parameters = self._parallel_model.local_parameters()
        self._averages = {name: local_part(tensor).clone() for name, tensor in parameters.items()}
        self._num_updates = 0

    def after_step(self, now: Progress) -> None:
        if not now.updated:
            return
        self._num_updates += 1
        decay = self._decay
        if self._warmup_steps:
            decay = min(decay, (1 + self._num_updates) / (self._warmup_steps + self._num_updates))
        if pairs := [*self._pairs()]:
            averages, tensors = zip(*pairs, strict=True)
            get_ema_multi_avg_fn(decay)(averages, tensors, self._num_updates)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Swap the weights and the averages during an evaluation. All ranks must call it.

        After an error they are not swapped back, because the failing rank must not wait for its peers.
        """
        self._swap()
        try:
            yield
        except Preempted:  # raised on all ranks; then the model is saved
            self._swap()
            raise
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, tensor in self._pairs():
            weights = tensor.clone()
            tensor.copy_(average)
            average.copy_(weights)
        self._parallel_model.parameters_written()

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each local average with its parameter."""
        for name, tensor in self._parallel_model.local_parameters().items():
            yield self._averages[name], local_part(tensor)

    def state(self, model: LocalState) -> LocalState:
        """Return the averages of the parameters that this rank writes."""
        chunks = {
            AVERAGE + alias: replace(model.chunks[MODEL + alias], tensor=average)
            for name, average in self._averages.items()
            for alias in self._names[name]
            if MODEL + alias in model.chunks
        }
        return LocalState(chunks, {"averaged_steps": self._num_updates})

    def load_state(self, saved: SavedState) -> None:
        """Load the averages of a checkpoint, or else start with the model's weights. All ranks must call it."""
        self._reset()
        if not saved.average():
            log.info("ema.decay=%g: the checkpoint has no average; it starts with the weights", self._decay)
            return
        with self.evaluating():
            targets = {AVERAGE + name: tensor for name, tensor in self._parallel_model.local_parameters().items()}
            saved.read({name: tensor for name, tensor in targets.items() if name in saved.tensors})
        self._num_updates = saved.facts["averaged_steps"]
