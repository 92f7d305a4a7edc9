"""An average of the weights over the steps: kept beside them, evaluated in their place, saved with them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from runner.config.schema import Averaging
from runner.errors import Preempted
from runner.training.names import names_of
from runner.training.saved_state import AVERAGE, MODEL, HeldState, SavedState, local_part
from runner.training.strategy import Spread

log = logging.getLogger(__name__)


def average_of(spread: Spread, module: nn.Module, options: Averaging) -> "WeightAverage | None":
    """One that begins with the present weights; None where it is off."""
    return None if options.decay is None else WeightAverage(spread, module, options.decay, options.warmup_steps)


class WeightAverage:
    """The exponential moving average of the trained parameters: each rank's of what it has of them, by no collective.

    It begins as the weights are now. The n-th update from there, counted from 1, makes it
    d * average + (1 - d) * weights, where d is `decay`, or with a warm-up the smaller of that and
    (1 + n) / (warmup_steps + n). It is torch's AveragedModel with get_ema_multi_avg_fn: buffers are the model's own,
    BatchNorm's statistics too. It costs the memory of what a rank has of the parameters once more.
    """

    def __init__(self, spread: Spread, module: nn.Module, decay: float, warmup_steps: int = 0):
        """module: the spread one; its parameters' names are those of a checkpoint."""
        self._spread, self._decay, self._warmup_steps = spread, decay, warmup_steps
        names = names_of([*module.named_parameters(remove_duplicate=False)])
        self._names = {aliases[0]: aliases for aliases in names.values()}
        self._averages: dict[str, torch.Tensor] = {}  # what this rank has of them, by the first of their names
        self._num_updates = 0
        self._begin()

    def _begin(self) -> None:
        self._averages = {name: local_part(tensor).clone() for name, tensor in self._spread.held().items()}
        self._num_updates = 0

    def update(self) -> None:
        """To be called after each optimizer step."""
        self._num_updates += 1
        average = get_ema_multi_avg_fn(self._decay_of(self._num_updates))
        alike: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for mean, tensor in self._pairs():
            means, tensors = alike.setdefault((mean.device, mean.dtype), ([], []))
            means.append(mean)
            tensors.append(tensor)
        for means, tensors in alike.values():  # of one device and type: one kernel for all of them
            average(means, tensors, self._num_updates)

    def _decay_of(self, number: int) -> float:
        if not self._warmup_steps:
            return self._decay
        return min(self._decay, (1 + number) / (self._warmup_steps + number))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have the averages for its weights meanwhile. All ranks must call it.

        After an error they stay there: what is left of the run must not wait for its peers.
        """
        self._exchange()
        try:
            yield
        except Preempted:  # which all ranks raise together; the model is saved then
            self._exchange()
            raise
        self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for mean, tensor in self._pairs():
            kept = tensor.clone()
            tensor.copy_(mean)
            mean.copy_(kept)
        self._spread.changed()

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each average with what it is of, on this rank."""
        for name, tensor in self._spread.held().items():
            yield self._averages[name], local_part(tensor)

    def state(self, held: HeldState) -> HeldState:
        """What this rank writes of it in a checkpoint: what it writes of the model, averaged. held: Spread.state()."""
        pieces = {
            AVERAGE + alias: replace(held.pieces[MODEL + alias], tensor=mean)
            for name, mean in self._averages.items()
            for alias in self._names[name]
            if MODEL + alias in held.pieces
        }
        return HeldState(pieces, {"averaged_steps": self._num_updates})

    def load_state(self, saved: SavedState) -> None:
        """Take over a checkpoint's, of this or another mode, when the model has its weights. All ranks must call it.

        Where it has none, the average begins with those weights.
        """
        self._begin()
        if not saved.average():
            log.info("ema.decay=%g: the checkpoint has no average; it begins with its weights", self._decay)
            return
        with self.in_place():
            held = {AVERAGE + name: tensor for name, tensor in self._spread.held().items()}
            saved.read({name: tensor for name, tensor in held.items() if name in saved.tensors})
        self._num_updates = saved.facts["averaged_steps"]
