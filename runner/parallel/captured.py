"""Training steps that are captured in CUDA graphs."""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves

from runner.checkpoints.saved_state import SavedState
from runner.errors import InputError, JobFailed
from runner.input.batch import MicroBatch, StepBatch
from runner.input.pytree import map_tensors, register_types, tensors
from runner.input.rng import host_generators
from runner.objectives.objective import LossGroup
from runner.optimization.lr_schedules import Scheduled
from runner.optimization.parameter_patterns import counted
from runner.parallel.replica import Replica
from runner.training.cuda_graph import OFF, Graph
from runner.training.mode import Recipe
from runner.training.model.forward_state import parts_of

log = logging.getLogger(__name__)

_INTERNAL = {*vars(torch.nn.Module()), "_pass_values"} - {"training"}  # attributes that are not compared
NUM_ATTEMPTS = 20  # steps without a capture after which a warning names the reason


class CapturedReplica(Replica):
    """A replica whose step is two CUDA graphs: one of the passes, and one of the update; see `cuda_graph`.

    Each replay reads its batch, and the numbers from which the draws of the samples are computed, from fixed tensors,
    and writes the gradients to fixed tensors. So what is called between the passes and the update, such as the NaN
    guard, works as without graphs. Steps that differ from the captured one in a value on the host are not replayed:
    the shapes of the batch, attributes of modules, the learning rate.
    """

    def __init__(self, recipe: Recipe, optimizer: torch.optim.Optimizer, loss_group: LossGroup):
        if len({parameter.device for parameter in recipe.module.parameters()}) > 1:
            raise InputError(f"cuda_graph=true does not work with a model on several devices; {OFF}")
        super().__init__(recipe, optimizer, loss_group)
        self._parts = parts_of(recipe.module, recipe.objective)
        modules = [part for part in self._parts if isinstance(part, torch.nn.Module)]
        self._tensors = [(by, name) for part in modules for by in (part._parameters, part._buffers) for name in by]
        self._counts: list[int] = []  # of attributes, by part
        self._attributes: list[tuple[Any, str]] = []  # parts, and names of attributes that are compared
        self._passes, self._updates = Graph(), Graph()
        self._can_repeat_updates = _can_repeat(optimizer)
        self._is_replayed = False  # the passes of the current step
        self._num_attempts = 0
        self._batch: StepBatch  # the fixed tensors that the passes read
        self._calls: list[list[int]] = []  # of `Draws`, in the captured passes
        self._last_calls: list[list[int]] = []  # in the last ordinary passes
        self._numbers = torch.empty(0, dtype=torch.int64)  # of `Draws.numbers`, for all micro-batches

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Compute on a side stream, as torch requires before a capture (Notes, "CUDA semantics")."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        signature = self._signature(batch)
        self._is_replayed = self._passes.is_due(signature)
        if not self._is_replayed:
            self._warn_if_never_captured()
            self._draws.calls = self._last_calls = []
            with self._on_side_stream():
                loss = super().forward_backward(batch)
            self._draws.calls = None
            return loss
        if signature == self._passes.signature:
            self._fill(batch)
        else:
            self._capture_passes(signature, batch)
        self._passes.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return torch.clone(self._passes.result)

    def _capture_passes(self, signature: list[Any], batch: StepBatch) -> None:
        self._calls = self._last_calls
        fixed = [MicroBatch(map_tensors(torch.clone, each.data), each.indices) for each in batch.micro_batches]
        self._batch = replace(batch, micro_batches=fixed)
        numbers = self._draw(batch)
        self._numbers = torch.cat([torch.empty(0, dtype=torch.int64), *numbers]).to(self.device)
        self._draws.given = iter(self._numbers.split([len(each) for each in numbers]))
        generators = host_generators()
        compute = functools.partial(super().forward_backward, self._batch)
        self._passes.capture(signature, compute)
        self._draws.given = None
        if generators != host_generators():
            raise JobFailed(f"cuda_graph=true: the step draws random numbers on the CPU, or seeds a generator; {OFF}")
        if changed := self._changes(self._signature(batch), signature):
            raise JobFailed(f"cuda_graph=true: the forward changes {changed}, which a graph cannot repeat; {OFF}")
        self._gradients = [(p, p.grad) for p in self.loss_group.parameters if p.grad is not None]
        # Tensors whose addresses the graph contains are not freed, even if an attribute gets another one.
        self._kept = tree_leaves([vars(part) for part in self._parts])

    def _fill(self, batch: StepBatch) -> None:
        """Write the tensors that the graph of the passes reads."""
        for fixed, given in zip(self._batch.micro_batches, batch.micro_batches, strict=True):
            for target, source in zip(tensors(fixed.data), tensors(given.data), strict=True):
                target.copy_(source)
        if numbers := self._draw(batch):
            self._numbers.copy_(torch.cat(numbers), non_blocking=True)

    def _draw(self, batch: StepBatch) -> list[torch.Tensor]:
        """Return the numbers of the draws of a step on the CPU; nothing if the draws do not follow the samples."""
        if not self._draws.follows:
            return []
        pairs = zip(batch.micro_batches, self._calls, strict=True)
        return [each for micro_batch, calls in pairs for each in self._draws.numbers(micro_batch, calls)]

    def step(self, scheduled: Scheduled, want_norm: bool) -> torch.Tensor | None:
        self.update.set_scheduled(scheduled)
        signature = self._options()
        if not (self._is_replayed and self._can_repeat_updates and self._updates.is_due(signature)):
            with self._on_side_stream():
                return self.update.apply(want_norm)
        if signature != self._updates.signature:
            groups = [group for group in self.optimizer.param_groups if "capturable" in group]
            before = [group["capturable"] for group in groups]
            for group in groups:
                group["capturable"] = True  # torch requires it for a capture; a fused update is the same
            self._updates.capture(signature, functools.partial(self.update.apply, want_norm=True))
            for group, value in zip(groups, before, strict=True):
                group["capturable"] = value
        self._updates.replay()
        self.skip()
        return self._updates.result.clone() if want_norm else None

    def load_optimizer(self, saved: SavedState) -> None:
        super().load_optimizer(saved)
        self._updates.forget()  # its graph contains the addresses of the state before

    def _options(self) -> list[Any]:
        """Return the options of the optimizer, and the number of the gradients that the update reads."""
        groups = [{**group, "params": None} for group in self.optimizer.param_groups]
        return [*groups, self._passes.number]

    def _signature(self, batch: StepBatch) -> list[Any]:
        """Return what the passes depend on on the host, except the values of the batch and its draws."""
        counts = [len(vars(part)) for part in self._parts]
        if counts != self._counts:
            self._attributes = [(part, name) for part in self._parts for name in vars(part) if name not in _INTERNAL]
            self._counts = counts
        values = [vars(part).get(name) for part, name in self._attributes]
        return [
            batch.num_samples,
            [*map(_describe, batch.micro_batches)],
            counts,
            [value if isinstance(value, (int, float, str)) else id(value) for value in values],
            [
                None if tensor is None else (id(tensor), tensor.data_ptr(), tensor.requires_grad)
                for tensors_by_name, name in self._tensors
                for tensor in [tensors_by_name.get(name)]
            ],
        ]

    def _changes(self, signature: list[Any], other: list[Any]) -> str:
        """Describe the attributes by which two signatures differ; empty if they are equal."""
        if signature == other:
            return ""
        names = [
            f"{name} of a {type(part).__name__}"
            for (part, name), value, before in zip(self._attributes, signature[3], other[3], strict=False)
            if value != before and signature[2] == other[2]
        ]
        return counted(names) or "the batch, a parameter, a buffer or a new attribute"

    def _warn_if_never_captured(self) -> None:
        self._num_attempts += 1
        if self._num_attempts == NUM_ATTEMPTS and not self._passes.number:
            changed = self._changes(self._passes.last, self._passes.before)
            log.warning("cuda_graph=true: no step was captured, because steps differ by %s", changed)


def _describe(micro_batch: MicroBatch) -> Any:
    """Return the structure of a micro-batch, and the shapes and other values of its leaves."""
    leaves, structure = tree_flatten(register_types(micro_batch.data))
    described = [
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        else leaf
        if isinstance(leaf, (int, float, str))
        else object()  # differs from all others
        for leaf in leaves
    ]
    return micro_batch.num_samples, structure, described


def _can_repeat(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an update depends only on tensors of the device and on the options of the parameter groups."""
    fused = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
    is_fused = type(optimizer) in fused and all(group["fused"] for group in optimizer.param_groups)
    return type(optimizer) is torch.optim.SGD or is_fused
