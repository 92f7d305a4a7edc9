"""The usual parallel model: every rank runs a whole forward and backward, and the mode combines the gradients."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from runner.checkpoints.extra_state import copy_extra_state, extra_state, load_extra_state, with_extra_state
from runner.checkpoints.saved_state import (
    MODEL,
    LocalState,
    SavedState,
    local_part,
    read_weights,
    tensor_hashes,
    without_extra_state,
)
from runner.checkpoints.shard_file import LocalChunk
from runner.checkpoints.snapshot import writes_all
from runner.errors import JobFailed
from runner.input.batch import MicroBatch, StepBatch
from runner.objectives.losses import Loss
from runner.objectives.objective import LossGroup, Prediction, loss_groups
from runner.optimization.lr_schedules import Scheduled
from runner.optimization.parameter_patterns import names_of
from runner.parallel.optimizer_state import is_first_rank, is_of_rank, load_optimizer_state, optimizer_state
from runner.parallel.parameter_update import ParameterUpdate, norm_over_meshes, scale_gradients, weight_factor, whole
from runner.training.mode import Recipe, Stepper
from runner.training.model.forward_state import restoring_state


class Replica:
    """A parallel model and its own stepper. Modes that differ in a few members derive from it.

    Args:
        recipe: The model and how it is trained.
        optimizer: Updates the parameters of the loss group.
        loss_group: One of the objective's losses, with the parameters that it trains; by default the only loss.
        sum_over: Sums a tensor over all ranks, in place.
        wrapper: Calls a function of the model within the forward of a wrapper, such as DDP; by default there is none.
        evaluation_wrapper: The same in evaluations.
        loss_scale: Multiplies this rank's part of the mean loss before backward, so that the combined gradients are
            those of the mean over the global batch (the number of ranks, if gradients are averaged).
        without_sync: A context manager that is entered for all micro-batches of a step except the last one.
        reduce: Combines the gradients of these parameters over the ranks, after the last backward.
        duplicates: How many ranks compute the same loss of the same samples; each returns its fraction of the loss.
        after_write: Called after the parameters were written; drops the gathered parameters.
        local_optimizer: The optimizer that keeps this rank's states, if `optimizer` distributes them over the ranks.
    """

    def __init__(
        self,
        recipe: Recipe,
        optimizer: torch.optim.Optimizer,
        loss_group: LossGroup | None = None,
        *,
        sum_over: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        wrapper: Callable[..., Any] | None = None,
        evaluation_wrapper: Callable[..., Any] | None = None,
        loss_scale: float = 1.0,
        without_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
        reduce: Callable[[Iterable[nn.Parameter]], None] = lambda parameters: None,
        duplicates: int = 1,
        after_write: Callable[[], None] = lambda: None,
        local_optimizer: torch.optim.Optimizer | None = None,
    ):
        self.module, self.optimizer, self.precision = recipe.module, optimizer, recipe.precision
        self.objective, self.device, self._draws = recipe.objective, recipe.device, recipe.draws
        if loss_group is None:
            (loss_group,) = loss_groups(recipe.objective, recipe.module)
        self.loss_group = loss_group
        self._loss_number = [*recipe.objective.losses].index(loss_group.name)
        self._sum_over = sum_over
        self._wrapper, self._evaluation_wrapper = wrapper or self._call, evaluation_wrapper or self._call
        self._loss_scale, self._without_sync, self._reduce = loss_scale, without_sync, reduce
        self._duplicates, self._after_write, self._local_optimizer = duplicates, after_write, local_optimizer
        # Read before the first step: parameters that FSDP gathers later have the names of its submodules.
        self._names = {parameter: names[0] for parameter, names in names_of([*self.module.named_parameters()]).items()}
        trained = {self._names[parameter]: parameter for parameter in loss_group.parameters}
        self.update = ParameterUpdate(optimizer, trained, recipe.precision, recipe.clip_grad_norm, self.norm)

    @property
    def steppers(self) -> Mapping[str, Stepper]:
        return {self.loss_group.name: self}

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        """Add up the gradients of a step. Return this rank's part of the global batch's mean loss, detached, ()."""
        total = torch.zeros((), dtype=self.precision.parameter_dtype, device=self.device)
        weight = torch.zeros((), dtype=torch.float64, device=self.device)
        last = len(batch.micro_batches) - 1
        term_weights = self._term_weights(batch) if self.objective.terms and last > 0 else None
        is_weighted = not (self.objective.weighted_by_samples or self.objective.terms)
        with training_only(self.loss_group):
            for number, micro_batch in enumerate(batch.micro_batches):
                without_sync = nullcontext() if number == last else self._without_sync()
                with without_sync, self._draws.following(micro_batch, self._loss_number):
                    with self.precision.autocast():
                        loss = self._wrapper(self.objective.measure, self.loss_group.name, micro_batch)
                    if self.objective.terms:
                        local_loss = self._total_of_terms(loss, term_weights)
                    else:
                        local_loss = loss.divided_by(batch.num_samples)
                    self.precision.scaler.scale(local_loss * self._loss_scale).backward()
                total += local_loss.detach()
                if is_weighted:
                    weight += loss.weight
        self._check_replaced()
        self._reduce(self.loss_group.parameters)
        if is_weighted:
            factor = weight_factor(batch.num_samples, weight / self._duplicates, self._sum_over)
            scale_gradients(self.loss_group.parameters, factor)
            total *= factor
        return total / self._duplicates

    def _check_replaced(self) -> None:
        """Raise JobFailed if the model has replaced a parameter: the optimizer would update the unused original."""
        if all(parameter.grad is not None for parameter in self.loss_group.parameters):
            return
        original = {name: parameter for parameter, name in self._names.items()}
        for name, parameter in self.module.named_parameters():
            if original.get(name, parameter) is not parameter:
                owner = self.module.get_submodule(name.rpartition(".")[0])
                raise JobFailed(
                    f"the model has replaced the parameter {name} of a {type(owner).__name__} in a training step, but "
                    "the optimizer updates the original parameter; change it in place"
                )

    def _total_of_terms(self, loss: Loss, total_weights: torch.Tensor | None) -> torch.Tensor:
        """Return this rank's part of the loss: the sum of the terms' means, each times its coefficient, ().

        total_weights: the weights of the terms over the whole step, (terms,); None if the step has one micro-batch.
        """
        if total_weights is None:
            assert isinstance(loss.weight, torch.Tensor)
            total_weights = self._sum_over(loss.weight / self._duplicates)
        coefficients = torch.tensor([*self.objective.terms.values()], dtype=total_weights.dtype)
        coefficients = coefficients.to(total_weights.device, non_blocking=True)
        factors = torch.where(total_weights > 0, coefficients / total_weights, 0.0)
        return (loss.value * factors.to(loss.value)).sum()

    def _term_weights(self, batch: StepBatch) -> torch.Tensor:
        """Return the weights of the terms over the whole step, (terms,), by passes that change no state.

        Each backward pass needs them, but they are known only after the forward passes of all micro-batches.
        """
        weights: Any = 0.0
        with restoring_state(self.module, self.objective), torch.no_grad(), self.precision.autocast():
            for micro_batch in batch.micro_batches:
                with self._draws.following(micro_batch, self._loss_number):
                    loss = self._evaluation_wrapper(self.objective.measure, self.loss_group.name, micro_batch)
                weights += loss.weight
        return self._sum_over(weights / self._duplicates)

    @torch.no_grad()
    def gradients(self) -> list[torch.Tensor]:
        """Return what this rank has of the gradients: whole, its shards, or the values of sparse ones."""
        local = [local_part(p.grad) for p in self.loss_group.parameters if p.grad is not None]
        return [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in local]

    def norm(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return norm_over_meshes(tensors)

    def skip(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, scheduled: Scheduled, want_norm: bool) -> torch.Tensor | None:
        return self.update.step(scheduled, want_norm)

    @property
    def learning_rate(self) -> float:
        return self.update.learning_rate

    def predict(self, micro_batch: MicroBatch) -> Prediction | None:
        self.module.eval()
        try:
            with torch.no_grad(), self.precision.autocast(), self._draws.following(micro_batch):
                prediction: Prediction = self._evaluation_wrapper(self.objective.evaluate, micro_batch)
                return prediction
        finally:
            self.module.train()

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self.module, *args)

    def state(self) -> LocalState:
        tensors = self._model_tensors().items()
        state = LocalState({MODEL + name: LocalChunk.of(tensor) for name, tensor in tensors if self.writes(tensor)})
        if is_first_rank():
            state |= self._extra_state()
        # If duplicated, each rank computes the same gradients itself; GPUs may round differently.
        if self._duplicates == 1 and not writes_all():
            state.replica_hashes = tensor_hashes(self.local_parameters())
        if self._local_optimizer is None:
            state |= optimizer_state(self.module, self.optimizer, self.writes)
        else:
            state |= optimizer_state(self.module, self._local_optimizer, lambda *_: True, groups_of=self.optimizer)
        return state | LocalState(facts={"scaler": self.precision.scaler.state_dict()})

    def writes(self, tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> bool:
        """Return True if this rank writes its part of a tensor of the model, or of a parameter's optimizer state."""
        return is_of_rank(tensor)

    def _model_tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers by full names, sharded as they are, without extra states."""
        # Its import takes 0.07 s, and the first step of a run does not need it.
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        self._after_write()  # get_model_state_dict must find shards, not gathered parameters
        return without_extra_state(get_model_state_dict(self.module))

    def _with_extra_state(self) -> dict[str, nn.Module]:
        """Return the modules whose extra state this rank writes."""
        return with_extra_state(self.module)

    def _extra_state(self) -> LocalState:
        try:
            return extra_state(self._with_extra_state())
        except ValueError as error:
            raise JobFailed(f"the checkpoint is not saved: {error}") from None

    def weights(self) -> dict[str, Any]:
        is_first = is_first_rank()
        tensors = ((name, whole(tensor)) for name, tensor in self._model_tensors().items())  # of one tensor at a time
        weights: dict[str, Any] = {name: tensor.detach().cpu() for name, tensor in tensors if is_first}
        return {**weights, **copy_extra_state(with_extra_state(self.module))} if is_first else {}

    def load_state(self, saved: SavedState) -> None:
        self.load_weights(saved)
        self.load_optimizer(saved)

    def load_optimizer(self, saved: SavedState) -> None:
        """Load everything of a checkpoint except the model."""
        load_optimizer_state(self.module, self._local_optimizer or self.optimizer, saved)
        if scaler := saved.facts.get("scaler"):
            self.precision.scaler.load_state_dict(dict(scaler))

    def load_weights(self, saved: SavedState) -> None:
        read_weights(saved, self._model_tensors())
        load_extra_state(saved, with_extra_state(self.module))

    def local_parameters(self) -> dict[str, torch.Tensor]:
        trained = [p for p in (*self.loss_group.parameters, *self.loss_group.other_parameters) if p.requires_grad]
        return {self._names[p]: p.detach() for p in trained}

    def parameters_written(self) -> None:
        self._after_write()


@contextmanager
def training_only(loss_group: LossGroup) -> Iterator[None]:
    """Let only the parameters that this loss trains require gradients.

    Shards are an exception, because FSDP decides what requires a gradient when it shards: their gradients are dropped
    afterwards.
    """
    whole = [parameter for parameter in loss_group.other_parameters if not isinstance(parameter, DTensor)]
    for parameter in whole:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in whole:
            parameter.requires_grad_(True)
        for parameter in loss_group.other_parameters:
            parameter.grad = None
