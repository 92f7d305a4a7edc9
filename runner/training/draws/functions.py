"""Replacements of the random functions of torch whose draws can follow the samples."""

import functools
import math
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from runner.input.rng import seed_torch
from runner.training.draws.generator import Rows


class DrawMode(TorchFunctionMode):
    """Calls `rows` for each random function, with the shape that it draws. If `rows` returns None, torch draws."""

    def rows(self, function: Any, shape: Sequence[int], kwargs: Any) -> Rows | None:
        raise NotImplementedError

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
    rows = mode.rows(func, [size if dim < whole else 1 for dim, size in enumerate(features.shape)], kwargs)
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


def _attend(mode: DrawMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Compute attention with dropout of its weights, by the implementation of torch that returns the weights."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    named = dict(zip(names, args, strict=False)) | kwargs
    p, value = named.pop("dropout_p", 0.0), named["value"]
    rows = mode.rows(func, [*named["query"].shape[:-1], named["key"].size(-2)], {}) if p > 0 else None
    if rows is None:
        return None
    if (mask := named.get("attn_mask")) is not None and mask.dtype == torch.bool:
        named["attn_mask"] = torch.zeros_like(mask, dtype=value.dtype).masked_fill(~mask, -torch.inf)
    _, weights = torch.ops.aten._scaled_dot_product_attention_math(**named)
    if named.get("enable_gqa"):
        value = value.repeat_interleave(weights.size(-3) // value.size(-3), -3)
    return (weights * rows.bernoulli(1 - p).to(weights).mul_(1 / (1 - p) if p < 1 else 0.0)) @ value


def _create(mode: DrawMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Create a tensor of uniform or normal numbers, of a given shape or of the shape of a tensor."""
    name, options = func.__name__, {key: kwargs[key] for key in kwargs if key not in ("generator", "requires_grad")}
    tensor = (torch.empty_like if name.endswith("like") else torch.empty)(*args, **options)
    rows = None if tensor.is_complex() else mode.rows(func, tensor.shape, kwargs)
    if rows is None:
        return None
    drawn = rows.normal(tensor.dtype) if name.startswith("randn") else rows.uniform(tensor.dtype)
    return tensor.copy_(drawn).requires_grad_(kwargs.get("requires_grad", False))


def _fill(mode: DrawMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Fill a tensor with uniform or normal numbers, or with samples of a Bernoulli distribution."""
    tensor, name, defaults = args[0], func.__name__, _ARGUMENTS[func.__name__]
    values = {**defaults, **dict(zip(defaults, args[1:], strict=False)), **kwargs}
    first, *rest = (values[key] for key in defaults)
    if isinstance(first, Tensor):
        return _draw_each(mode, func, args, kwargs)
    rows = None if tensor.is_complex() else mode.rows(func, tensor.shape, kwargs)
    if rows is None:
        return None
    if name == "bernoulli_":
        return tensor.copy_(rows.bernoulli(first))
    drawn, factor = (rows.uniform, rest[0] - first) if name == "uniform_" else (rows.normal, rest[0])
    return tensor.copy_(drawn(tensor.dtype) * factor + first)


def _draw_each(mode: DrawMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Call any other function of tensors or of a size once per sample, after seeding torch's generator."""
    given = [*args, *kwargs.values()]
    shapes = [value.shape for value in given if isinstance(value, Tensor)]
    if func.__name__ == "multinomial" and len(shapes[0]) == 1:
        return None  # the drawn numbers, not the weights, may have a dim of the samples
    sizes: list[Any] = [value for value in given if isinstance(value, (tuple, list))]
    shape = torch.broadcast_shapes(*shapes) if shapes else [*sizes, given[:1]][0]
    rows = mode.rows(func, shape, kwargs)
    if rows is None or not len(rows.keys):
        return None
    dim, seeds, device = rows.dim, rows.seeds(), rows.keys.device
    width = shape[dim] // len(seeds)

    def of_sample(value: Any, number: int) -> Any:
        if isinstance(value, Tensor) and value.dim() == len(shape) and value.size(dim) == shape[dim]:
            return value.narrow(dim, number * width, width)
        return [*value[:dim], width, *value[dim + 1 :]] if isinstance(value, (tuple, list)) else value

    parts = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for number, seed in enumerate(seeds):
            seed_torch(seed, device)
            named = {key: of_sample(value, number) for key, value in kwargs.items()}
            parts.append(func(*(of_sample(value, number) for value in args), **named))
    return args[0] if func.__name__.endswith("_") else torch.cat(parts, dim)


_ARGUMENTS = {"uniform_": {"from": 0.0, "to": 1.0}, "normal_": {"mean": 0.0, "std": 1.0}, "bernoulli_": {"p": 0.5}}
_BY_NAMES: dict[str, Callable[[DrawMode, Any, Any, Any], Any]] = {
    "dropout dropout_ feature_dropout feature_dropout_ alpha_dropout alpha_dropout_ feature_alpha_dropout": _drop,
    "feature_alpha_dropout_": _drop,
    "rand randn rand_like randn_like": _create,
    "uniform_ normal_ bernoulli_": _fill,
    "bernoulli normal multinomial poisson binomial _standard_gamma _sample_dirichlet randperm": _draw_each,
    "randint randint_like exponential_ geometric_ cauchy_ log_normal_ random_": _draw_each,
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
