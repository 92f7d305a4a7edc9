"""Replacements of the random functions of torch whose draws can follow the samples."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.pyfunctorch import (
    VmapInterpreter,
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
)
from torch.overrides import TorchFunctionMode

from runner.input.rng import seed_torch
from runner.training.draws.distributions import FILLS, bernoulli, multinomial
from runner.training.draws.generator import Rows


class DrawMode(TorchFunctionMode):
    """Calls `rows` for each random function, with the shape that it draws. If `rows` returns None, torch draws."""

    def rows(
        self, function: Any, shape: Sequence[int], kwargs: Any, like: Tensor | None, in_order: bool
    ) -> Rows | None:
        """Return the random numbers of a tensor of this shape.

        Args:
            function: The random function.
            shape: The shape that it draws.
            kwargs: Its keyword arguments.
            like: A tensor with the same samples along the same dim, if the function has one.
            in_order: True if torch's generator draws the numbers of a sample, one after the other.
        """
        raise NotImplementedError

    def draw(
        self, function: Any, shape: Sequence[int], kwargs: Any, like: Tensor | None = None, in_order: bool = False
    ) -> Rows | None:
        """Call `rows`. The iterations of torch.vmap(randomness="different") become the first dims of the shape."""
        interpreters = [each for each in retrieve_all_functorch_interpreters() if isinstance(each, VmapInterpreter)]
        if not interpreters:
            return self.rows(function, shape, kwargs, like, in_order)
        vmaps = sorted((each.level(), each.batch_size()) for each in interpreters if each.randomness() == "different")
        if in_order and vmaps:
            return None
        with temporarily_clear_interpreter_stack():
            rows = self.rows(function, [*(size for _, size in vmaps), *shape], kwargs, None, in_order)
        return None if rows is None else replace(rows, levels=tuple(level for level, _ in vmaps))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # compiled code uses torch's generator
            return func(*args, **(kwargs or {}))
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if (replacement := REPLACEMENTS.get(func)) is not None:
            result = replacement(self, func, args, kwargs)
            return func(*args, **kwargs) if result is None else result
        if isinstance(func, FunctionType) and (unchecked := _unchecked(func)) is not None:
            with self:
                return unchecked(*args, **kwargs)
        return func(*args, **kwargs)


@functools.cache
def _unchecked(function: FunctionType) -> Callable[..., Any] | None:
    """Return a copy of a Python function of torch that calls random functions, such as F.dropout; None for others.

    The original function passes itself to the active mode, and torch deactivates the mode during that call. The copy
    does not check for an active mode, so that the mode also handles the functions that the copy calls.
    """
    checks = {name: lambda *_: False for name in function.__globals__ if name.startswith("has_torch_function")}
    if not checks or _NAMES.isdisjoint(function.__code__.co_names):
        return None
    scope = {**function.__globals__, **checks}
    copied = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _drop(mode: DrawMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Drop elements, or whole channels (feature_...); alpha_... also preserves mean and variance."""
    named = dict(zip(("input", "p", "train"), args, strict=False)) | kwargs
    features, p, name = named["input"], named["p"], func.__name__
    if not named["train"] or p == 0:
        return None
    whole = 2 if "feature" in name else features.dim()
    rows = mode.draw(func, [size if dim < whole else 1 for dim, size in enumerate(features.shape)], kwargs, features)
    if rows is None:
        return None
    kept = rows.bernoulli(1 - p).to(features)
    scale, shift = (1 / (1 - p) if p < 1 else 0.0), None
    if "alpha" in name:  # torch's formula: dropped elements are set to the lower limit of SELU
        limit = 1.7580993408473766
        scale = 1 / math.sqrt((limit**2 * p + 1) * (1 - p)) if p < 1 else 0.0
        shift = (kept - 1 + p) * (limit * scale)
    factor = kept.mul_(scale)
    result = features.mul_(factor) if name.endswith("_") else features * factor
    return result if shift is None else result.add_(shift)


def _leak(mode: DrawMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Multiply elements that are not positive by random slopes."""
    named = dict(zip(("input", "lower", "upper", "training"), args, strict=False)) | kwargs
    features, low, high = named["input"], named.get("lower", 1 / 8), named.get("upper", 1 / 3)
    rows = mode.draw(func, features.shape, kwargs, features) if named.get("training") else None
    if rows is None:
        return None
    slopes = rows.uniform(features.dtype) * (high - low) + low
    factor = torch.where(features.detach() <= 0, slopes, 1.0)
    return features.mul_(factor) if func.__name__.endswith("_") else features * factor


def _attend(mode: DrawMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Compute attention with dropout of its weights, by the implementation of torch that returns the weights."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    named = dict(zip(names, args, strict=False)) | kwargs
    p, value = named.pop("dropout_p", 0.0), named["value"]
    query, shape = named["query"], [*named["query"].shape[:-1], named["key"].size(-2)]
    rows = mode.draw(func, shape, {}, query) if p > 0 else None
    if rows is None:
        return None
    if (mask := named.get("attn_mask")) is not None and mask.dtype == torch.bool:
        named["attn_mask"] = torch.zeros_like(mask, dtype=value.dtype).masked_fill(~mask, -torch.inf)
    _, weights = torch.ops.aten._scaled_dot_product_attention_math(**named)
    if named.get("enable_gqa"):
        value = value.repeat_interleave(weights.size(-3) // value.size(-3), -3)
    return (weights * rows.bernoulli(1 - p).to(weights).mul_(1 / (1 - p) if p < 1 else 0.0)) @ value


def _create(mode: DrawMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Create a tensor of uniform or normal numbers or of integers, of a given shape or of the shape of a tensor."""
    name, bounds = func.__name__, list[Any]()
    options = {key: kwargs[key] for key in kwargs if key not in ("generator", "requires_grad", "low", "high")}
    if name.startswith("randint"):  # (input, low, high) or (low, high, size); low is optional
        bounds = [value for value in args if not isinstance(value, (Tensor, tuple, list))]
        args = [value for value in args if isinstance(value, (Tensor, tuple, list))]
        bounds += [kwargs[key] for key in ("low", "high") if key in kwargs]
        if name == "randint" and "out" not in kwargs and kwargs.get("dtype") is None:
            options["dtype"] = torch.int64
    tensor = (torch.empty_like if name.endswith("like") else torch.empty)(*args, **options)
    like = args[0] if args and isinstance(args[0], Tensor) else None
    rows = None if tensor.is_complex() else mode.draw(func, tensor.shape, kwargs, like)
    if rows is None:
        return None
    if bounds:
        drawn = rows.integers(*[0, *map(int, bounds)][-2:])
    else:
        drawn = rows.normal(tensor.dtype) if name.startswith("randn") else rows.uniform(tensor.dtype)
    drawn = drawn.to(tensor) if rows.levels else tensor.copy_(drawn)
    return drawn.requires_grad_() if kwargs.get("requires_grad") else drawn


def _fill(mode: DrawMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Fill a tensor with random numbers of a distribution."""
    tensor, *given = args
    defaults, draw = FILLS[func.__name__]
    if func.__name__ == "random_" and len(given) == 1:
        given = [0, *given]
    values = {**defaults, **dict(zip(defaults, given, strict=False)), **kwargs}
    rows = None if tensor.is_complex() else mode.draw(func, tensor.shape, kwargs)
    return None if rows is None else tensor.copy_(draw(rows, tensor.dtype, *(values[key] for key in defaults)))


def _sample(mode: DrawMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Return samples of normal or Bernoulli distributions with these parameters."""
    names = ("mean", "std", "size") if func.__name__ == "normal" else ("input", "p")
    named = dict(zip(names, args, strict=False)) | kwargs
    given = [named[name].detach() for name in names if isinstance(named.get(name), Tensor)]
    shape = named["size"] if "size" in named else torch.broadcast_shapes(*(tensor.shape for tensor in given))
    rows = mode.draw(func, shape, kwargs, next((tensor for tensor in given if tensor.shape == shape), None))
    if rows is None:
        return None
    dtype = kwargs.get("dtype") or (given[0].dtype if given else torch.get_default_dtype())
    if func.__name__ == "normal":
        mean, std = (value.detach() if isinstance(value, Tensor) else value for value in map(named.get, names[:2]))
        drawn = rows.normal(dtype) * (1.0 if std is None else std) + (0.0 if mean is None else mean)
    else:
        drawn = bernoulli(rows, dtype, named.get("p", given[0])).to(dtype)
    return drawn if kwargs.get("out") is None else kwargs["out"].copy_(drawn)


def _choose(mode: DrawMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Return samples of multinomial distributions."""
    named = dict(zip(("input", "num_samples", "replacement"), args, strict=False)) | kwargs
    weights, count, replacement = named["input"].detach(), named["num_samples"], named.get("replacement", False)
    is_common = weights.dim() == 1  # then the drawn indices, not the weights, may have a dim of the samples
    if is_common and not replacement:
        return None
    shape = [*weights.shape[:-1], count] if replacement else weights.shape
    rows = mode.draw(func, shape, kwargs, None if is_common else weights)
    if rows is None:
        return None
    if not rows.levels and not (weights.amin() >= 0 and weights.sum(-1).min() > 0 and weights.sum().isfinite()):
        return None  # torch reports invalid weights
    drawn = multinomial(rows, weights, replacement)[..., :count]
    return drawn if kwargs.get("out") is None else kwargs["out"].copy_(drawn)


def _draw_each(mode: DrawMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Call any other function once per sample, after seeding torch's generator."""
    given = [*args, *kwargs.values()]
    shapes = [value.shape for value in given if isinstance(value, Tensor)]
    shape = torch.broadcast_shapes(*shapes) if shapes else given[:1]
    rows = mode.draw(func, shape, kwargs, in_order=True)
    if rows is None or not len(rows.keys):
        return None
    dim, seeds, device = rows.dim, rows.seeds(), rows.keys.device
    width = shape[dim] // len(seeds)

    def of_sample(value: Any, number: int) -> Any:
        is_of_samples = isinstance(value, Tensor) and value.dim() == len(shape) and value.size(dim) == shape[dim]
        return value.narrow(dim, number * width, width) if is_of_samples else value

    parts = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for number, seed in enumerate(seeds):
            seed_torch(seed, device)
            named = {key: of_sample(value, number) for key, value in kwargs.items()}
            parts.append(func(*(of_sample(value, number) for value in args), **named))
    return torch.cat(parts, dim)


# Functions for which torch's generator draws the numbers of a sample one after the other.
IN_ORDER = ("poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "randperm")
_BY_NAMES: dict[str, Callable[[DrawMode, Any, Any, Any], Any]] = {
    "dropout dropout_ feature_dropout feature_dropout_ alpha_dropout alpha_dropout_ feature_alpha_dropout": _drop,
    "feature_alpha_dropout_": _drop,
    "rrelu rrelu_": _leak,
    "rand randn randint rand_like randn_like randint_like": _create,
    " ".join(FILLS): _fill,
    "bernoulli normal": _sample,
    "multinomial": _choose,
    " ".join(IN_ORDER): _draw_each,
}
REPLACEMENTS = {F.scaled_dot_product_attention: _attend} | {
    getattr(owner, name): replacement
    for names, replacement in _BY_NAMES.items()
    for name in names.split()
    for owner in (torch, Tensor)
    if hasattr(owner, name)
}
# Backward is included, because torch.utils.checkpoint may recompute a random function there.
_NAMES = {function.__name__ for function in REPLACEMENTS} | {"backward", "_engine_run_backward"}
