"""A dry run that observes the random functions of a model, and finds the dim of the samples in their draws."""

import random
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import von_mises
from torch.utils import checkpoint

from runner.config.diagnostics.type_hints import show
from runner.errors import calling_line, first_line, quantity
from runner.input.batch import MicroBatch
from runner.input.rng import isolated, seed_all
from runner.objectives.objective import Objective
from runner.training.components import Components
from runner.training.draws.following import Draws, of_sample
from runner.training.draws.functions import DrawMode
from runner.training.draws.sample_order import find_order
from runner.training.model.deferred_init import probe
from runner.training.model.forward_state import restoring_state


class Draw(NamedTuple):
    """A call of a random function."""

    name: str
    shape: tuple[int, ...]
    line: str
    problem: str = ""  # why the draw cannot follow the samples
    is_recomputed: bool = False  # True within torch.utils.checkpoint, which may recompute the draw
    is_rejected: bool = False  # True if the draw is repeated until the numbers of all samples are accepted
    in_backward: bool = False  # True in a hook of a gradient


class ObservedDraws(DrawMode):
    """Observes the draws of a forward pass, and lets torch draw."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Draw] = []
        self.has_hooks = False  # True if the forward has registered hooks of gradients
        self.in_backward = False
        self._expected = torch.get_rng_state()

    def rows(self, function: Any, shape: Sequence[int], kwargs: Any, like: Tensor | None, in_order: bool) -> None:
        problem = "uses a custom generator" if kwargs.get("generator") is not None else ""
        files = {frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)}
        is_recomputed, is_rejected = (module.__file__ in files for module in (checkpoint, von_mises))
        line = calling_line()
        self.draws.append(
            Draw(function.__name__, tuple(shape), line, problem, is_recomputed, is_rejected, self.in_backward)
        )
        torch.default_generator.manual_seed(len(self.draws))  # later draws do not depend on this shape

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.check("code before a function of torch")
        self.has_hooks |= func is Tensor.register_hook
        num_draws = len(self.draws)
        result = super().call(func, args, kwargs)
        if len(self.draws) > num_draws:
            self._expected = torch.get_rng_state()
        self.check(getattr(func, "__name__", str(func)))
        return result

    def check(self, name: str) -> None:
        """Record a draw if any other code has changed the state of torch's generator."""
        state = torch.get_rng_state()
        if not torch.equal(state, self._expected):
            self.draws.append(Draw(name, (), calling_line(), "changes the state of torch's generator"))
        self._expected = state


def observe_draws(components: Components, compiles: bool | str, draws: Draws) -> tuple[list[str], list[str]]:
    """Record in `draws` the draws of model and objective, in training and in evaluation.

    Model and objective are called with two copies of the first sample, and if they draw random numbers, with three. The
    dim of a draw that grows is that of the samples. If other samples cause other draws, training logs a warning.

    Return a warning if a draw cannot follow the samples, and the names of the trained parameters that forward replaces.
    """
    module, objective, samples = components.module, components.objective, components.samples
    model = f"model={components.choices['model']}"
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    found: list[list[Draw]] = []
    replaced: list[str] = []
    others: list[object] = []  # the next numbers of NumPy and `random`

    def record(count: int) -> None:
        micro_batch = samples.batch([0] * count)
        with restoring_state(module, objective):
            seed_all(0)
            observed = ObservedDraws()
            found.append(observed.draws)
            replaced[:] = probe(module, _run, trained, observed, objective, micro_batch)
            others.append((np.random.bytes(16), random.getrandbits(128)))

    error: Exception | None = None
    try:
        record(2)
        with isolated():
            seed_all(0)
            if not found[0] and others[0] == (np.random.bytes(16), random.getrandbits(128)):
                return [], replaced
        record(3)
    except Exception as raised:  # training reports an error with two samples, if it occurs there
        error = raised
    problem = f"the dry run of random numbers fails ({first_line(error)})" if error else _compare(draws, *found)
    if not problem and others[0] != others[1]:
        problem = f"{model} or the objective draws numbers of NumPy or `random` for each sample"
    if not problem and compiles:
        problem = f"compile={show(compiles)} draws the random numbers of compiled code by torch's generator"
    if not problem and len(samples.source) > 1:
        with suppress(Exception):  # training reports an error with other samples
            problem = find_order(draws, components)
    draws.follows = not problem
    end = "so that results depend on the number of ranks and micro_batches"
    return [f"{problem}, {end}"] if problem else [], replaced


def _run(
    model: nn.Module, trained: set[str], observed: ObservedDraws, objective: Objective, micro_batch: MicroBatch
) -> list[str]:
    parameters = {name: tensor for name, tensor in model.named_parameters() if name in trained}
    with observed:
        for name in objective.losses:
            loss = objective.measure(model, name, micro_batch)
            if observed.has_hooks or _has_hooks(model):
                observed.in_backward = True
                with _dropping_gradients(model):
                    loss.value.sum().backward()
                observed.in_backward = False
        model.eval()
        objective.evaluate(model, micro_batch)
    model.train()  # also modules that the passes have added
    return [name for name, tensor in model.named_parameters() if parameters.get(name, tensor) is not tensor]


@contextmanager
def _dropping_gradients(model: nn.Module) -> Iterator[None]:
    """Drop the gradient of each parameter at once: the model may be larger than the memory of one rank."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.is_leaf]
    handles = [parameter.register_post_accumulate_grad_hook(drop) for parameter in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _has_hooks(model: nn.Module) -> bool:
    """Return True if the model has hooks of gradients, which may draw random numbers."""
    parts: list[Any] = [*model.modules(), *model.parameters()]
    return any(part._backward_hooks for part in parts) or any(part._backward_pre_hooks for part in model.modules())


def _compare(draws: Draws, two: list[Draw], three: list[Draw]) -> str:
    """Set `draws` from the draws for two and three samples. Return why a draw cannot follow the samples, or ""."""
    if [draw.name for draw in two] != [draw.name for draw in three]:
        return f"the number of random draws is {len(two)} for two samples and {len(three)} for three"
    for draw, larger in zip(two, three, strict=True):
        where = f"{draw.name} in {draw.line}"
        if draw.problem:
            return f"{where} {draw.problem}"
        is_of_gradient = draw.in_backward and not draw.is_recomputed
        draws.recomputes |= draw.is_recomputed
        draws.for_gradients |= is_of_gradient
        if draw.shape == larger.shape:
            if is_of_gradient:
                return f"{where} draws for a gradient of all samples"
            draws.common.add((draw.name, draw.shape))
            continue
        if draw.is_rejected:
            return f"{where} draws until the numbers of all samples are accepted"
        kind, pairs = (draw.name, len(draw.shape)), list(zip(draw.shape, larger.shape, strict=False))
        grown = [dim for dim, (size, size_of_three) in enumerate(pairs) if size != size_of_three]
        if len(grown) != 1 or 3 * pairs[grown[0]][0] != 2 * pairs[grown[0]][1] or draw.name == "randperm":
            return f"{where} draws {list(draw.shape)} numbers for two samples together"
        if draws.sample_dims.setdefault(kind, grown[0]) != grown[0]:
            return f"{where} has the samples along dim {grown[0]}, another call along dim {draws.sample_dims[kind]}"
        draws.of_samples.setdefault((draw.name, of_sample(draw.shape, grown[0], 2)), set()).add(draw.line)
    for name, shape in draws.common:
        dim = draws.sample_dims.get((name, len(shape)))
        for other, of_one in draws.of_samples:
            if dim is not None and other == name and len(of_one) == len(shape):
                count = shape[dim] // max(1, of_one[dim])
                if count and shape == tuple(n * count if d == dim else n for d, n in enumerate(of_one)):
                    same = f"the same shape for {quantity(count, 'sample')} in another call"
                    return f"{name} draws {list(shape)} numbers for all samples, and {same}"
    return ""
