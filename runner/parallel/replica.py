"""A model spread over the world, ready to step, for the modes in which every rank runs a whole forward and backward."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from runner.parallel.optimizer_state import load_optimizer_state, optimizer_state, pieces_of_rank
from runner.parallel.parameter_update import ParameterUpdate, held_gradients
from runner.parallel.total_weight import factor_of, scale_gradients
from runner.parallel.turns import only
from runner.training.batch import MicroBatch, StepBatch
from runner.training.names import names_of
from runner.training.objective import Prediction, Turn, turns
from runner.training.saved_state import MODEL, HeldState, SavedState, fingerprints, read_weights
from runner.training.strategy import Recipe, Stepping


class Memory(Protocol):
    """What a way of combining gradients remembers from step to step."""

    def state(self) -> HeldState: ...  # what this rank writes of a checkpoint

    def load_state(self, saved: SavedState) -> None: ...


class Replica:
    """Gradients by backward on this rank, combined over the ranks in the way the mode says.

    turn: which of the objective's losses it steps by, and the parameters that this trains; by default the only one.
    within: runs a function of the model in the wrapper's forward; by default there is no wrapper.
    evaluate_within: the same for an evaluation.
    loss_scale: what a rank's share of the mean loss is multiplied with before backward, so that combining the
        gradients gives those of the mean over the global batch (the number of ranks where they are averaged).
    without_sync: entered for all micro-batches of a step but the last.
    reduce: combines the parameters' gradients over the ranks after the last backward.
    sum_over: sums a tensor over all ranks.
    duplicates: how many ranks compute the very same share of the loss; each returns its part of it.
    after_step: called when the parameters are updated.
    before_state: called when a checkpoint is taken.
    after_change: called when the parameters were written; drops what is gathered of them.
    memory: what else decides the future, and is in checkpoints.
    """

    def __init__(
        self,
        recipe: Recipe,
        optimizer: torch.optim.Optimizer,
        turn: Turn | None = None,
        *,
        sum_over: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        within: Callable[..., Any] | None = None,
        evaluate_within: Callable[..., Any] | None = None,
        loss_scale: float = 1.0,
        without_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
        reduce: Callable[[Iterable[nn.Parameter]], None] = lambda parameters: None,
        duplicates: int = 1,
        after_step: Callable[[], None] = lambda: None,
        before_state: Callable[[], None] = lambda: None,
        after_change: Callable[[], None] = lambda: None,
        memory: "Memory | None" = None,
    ):
        self.module, self.optimizer, self.precision = recipe.module, optimizer, recipe.precision
        self.objective = recipe.objective
        if turn is None:
            (turn,) = turns(recipe.objective, recipe.module)
        self.turn = turn
        self.update = ParameterUpdate(optimizer, turn.parameters, recipe.precision, recipe.clip_grad_norm)
        self._sum_over = sum_over
        self._within, self._evaluate_within = within or self._directly, evaluate_within or self._directly
        self._loss_scale, self._without_sync, self._reduce = loss_scale, without_sync, reduce
        self._duplicates, self._after_step, self._before_state = duplicates, after_step, before_state
        self._after_change, self._memory = after_change, memory
        # Now: what FSDP has gathered later on has the names of its parts.
        self._names = {parameter: names[0] for parameter, names in names_of([*self.module.named_parameters()]).items()}

    @property
    def turns(self) -> Mapping[str, Stepping]:
        return {self.turn.name: self}

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        """Add up the step's gradients. Returns this rank's share of the global batch's mean loss, detached, ()."""
        device = next(self.module.parameters()).device
        total = torch.zeros((), dtype=self.precision.parameter_dtype, device=device)
        weight = torch.zeros((), dtype=torch.float64, device=device)
        last = len(batch.micro_batches) - 1
        with nullcontext() if self.turn.is_only else only(self.turn):
            for number, micro_batch in enumerate(batch.micro_batches):
                with nullcontext() if number == last else self._without_sync():
                    with self.precision.autocast():
                        loss = self._within(self.objective.measure, self.turn.name, micro_batch)
                    share = loss.share(batch.num_samples)
                    self.precision.scaler.scale(share * self._loss_scale).backward()
                total += share.detach()
                if not self.objective.counts_samples:
                    weight += loss.weight
        self._reduce(self.turn.parameters)
        if not self.objective.counts_samples:
            factor = factor_of(batch.num_samples, weight / self._duplicates, self._sum_over)
            scale_gradients(self.turn.parameters, factor)
            total *= factor
        return total / self._duplicates

    def gradients(self) -> list[torch.Tensor]:
        """Those of the step, combined over the ranks: what this rank has of them."""
        return held_gradients(self.turn.parameters)

    def skip(self) -> None:
        """Drop the gradients in the place of `step`."""
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, lr_factor: float, want_norm: bool) -> float | None:
        """Update the parameters. Returns the norm of the whole gradient before clipping, if wanted."""
        norm = self.update.step(lr_factor, want_norm)
        self._after_step()
        return norm

    @property
    def learning_rate(self) -> float:
        return self.update.learning_rate

    def predict(self, micro_batch: MicroBatch) -> Prediction:
        """The model in evaluation mode, without gradients: its losses, and its outputs if the objective has some."""
        self.module.eval()
        try:
            with torch.no_grad(), self.precision.autocast():
                prediction: Prediction = self._evaluate_within(self.objective.evaluate, micro_batch)
                return prediction
        finally:
            self.module.train()

    def _directly(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self.module, *args)

    def state(self) -> HeldState:
        """What this rank writes of everything that decides the future."""
        self._before_state()
        scaler = self.precision.scaler.state_dict()
        held = self.model_state() | optimizer_state(self.module, self.optimizer) | HeldState(facts={"scaler": scaler})
        return held if self._memory is None else held | self._memory.state()

    def model_state(self) -> HeldState:
        """What this rank writes of the model."""
        self._after_change()  # what is gathered of parameters is dropped, and no part of them
        held: dict[str, Any] = get_model_state_dict(self.module)
        state = HeldState(pieces_of_rank({MODEL + name: tensor for name, tensor in held.items()}))
        if self._duplicates == 1:  # else each rank computes the same gradients itself, which a GPU may round otherwise
            state.alike = fingerprints(self.held())
        return state

    def weights(self) -> dict[str, torch.Tensor]:
        """The whole model by full names, on the CPU of rank 0. All ranks must call it."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: dict[str, Any] = get_model_state_dict(self.module, options=options)
        return weights

    def load_state(self, saved: SavedState) -> None:
        """Take over this rank's part of a checkpoint, of this or another mode."""
        self.load_weights(saved)
        self.load_optimizer(saved)

    def load_optimizer(self, saved: SavedState) -> None:
        """That part of `load_state` which is not the model's."""
        load_optimizer_state(self.module, self.optimizer, saved)
        if scaler := saved.facts.get("scaler"):
            self.precision.scaler.load_state_dict(dict(scaler))
        if self._memory is not None:
            self._memory.load_state(saved)

    def load_weights(self, saved: SavedState) -> None:
        """Take over the model of a checkpoint alone: of what is cut over ranks, this rank's part."""
        self._after_change()
        held: dict[str, Any] = get_model_state_dict(self.module)
        read_weights(saved, held)

    def held(self) -> dict[str, torch.Tensor]:
        """The trained parameters by name, in a fixed order: whole, or cut over ranks."""
        trained = [p for p in (*self.turn.parameters, *self.turn.others) if p.requires_grad]
        return {self._names[p]: p.detach() for p in trained}

    def changed(self) -> None:
        """To be called when what is `held` was written. All ranks must call it."""
        self._after_change()
