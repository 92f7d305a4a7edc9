"""Synchronization of batch norm: in training, `batch_norm` normalizes over the batches of all ranks."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from runner.distributed.batch_norm_over_ranks import batch_norm_over
from runner.distributed.module_class import subclass_of


@dataclass
class _Usage:
    """How the forward of a module uses batch_norm. RecordBatchNorm adds it to the module's attributes."""

    calls: bool = False
    calls_in_training: bool = False
    uses_batch_in_evaluation: bool = False
    trains_without: bool = False  # although it derives from _BatchNorm


def _usage(module: nn.Module) -> _Usage:
    usage: _Usage = vars(module).get("_batch_norm_usage") or _Usage()
    return usage


class _Call(NamedTuple):
    """The arguments of a call of batch_norm."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


def _read(func: Any, args: Any, kwargs: Any) -> _Call | None:
    """Return the arguments if the function is batch_norm; else None."""
    if func is F.batch_norm:
        return _Call(*args, **kwargs)
    if func is torch.batch_norm:
        names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
        named = dict(zip(names, args, strict=False)) | kwargs  # without cudnn_enabled
        return _Call(**{name: named[name] for name in names})
    return None


def is_batch_norm(module: nn.Module) -> bool:
    """Return True for a BatchNorm layer, and for another layer whose forward has called batch_norm in the dry run."""
    has_parts = any([*part.parameters(), *part.buffers()] for part in module.children())
    return isinstance(module, _BatchNorm) or (_usage(module).calls and not has_parts)


def has_batch_norm(model: nn.Module) -> bool:
    """Return True if the model has BatchNorm layers, or if a forward has called batch_norm in the dry run."""
    return any(_calls_batch_norm(module) for module in model.modules())


def _calls_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) or _usage(module).calls


def trains_batch_norm(model: nn.Module) -> bool:
    """Return True if batch norm uses the statistics of the batch in training, because not all layers are frozen."""
    return any(module.training and _calls_batch_norm(module) for module in model.modules())


def normalizes_in_evaluation(model: nn.Module) -> bool:
    """Return True if the model has BatchNorm without running statistics, which uses those of each batch instead."""
    return any(_uses_batch_in_evaluation(module) for module in model.modules())


def _uses_batch_in_evaluation(module: nn.Module) -> bool:
    lacks_statistics = isinstance(module, _BatchNorm) and module.running_mean is None
    return lacks_statistics or _usage(module).uses_batch_in_evaluation


class RecordBatchNorm(TorchFunctionMode):
    """Records which modules' forward calls batch_norm, such as a layer that does not derive from nn.BatchNorm2d.

    The modules have the result as an attribute on exit, and not earlier, because dry runs restore all attributes.
    """

    def __enter__(self) -> "RecordBatchNorm":
        self._running: list[nn.Module] = []
        self._found: defaultdict[nn.Module, _Usage] = defaultdict(_Usage)
        self._hooks = [
            register_module_forward_pre_hook(lambda module, inputs: self._running.append(module)),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for hook in self._hooks:
            hook.remove()
        for module, usage in self._found.items():
            vars(module)["_batch_norm_usage"] = usage  # without `__setattr__`, which a model may override

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._running.pop()
        if isinstance(module, _BatchNorm) and module.training:
            self._found[module].trains_without |= not self._found[module].calls_in_training

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._running and (call := _read(func, args, kwargs)) is not None:
            module = self._running[-1]
            usage = self._found[module]
            usage.calls = True
            usage.calls_in_training |= module.training
            usage.uses_batch_in_evaluation |= call.training and not module.training
        return func(*args, **kwargs)


class CountValues(TorchFunctionMode):
    """Finds the fewest values per channel from which batch_norm computes statistics; torch refuses a single one."""

    fewest: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = _read(func, args, kwargs)
        if func is F.batch_norm and call is not None and call.training:
            values = call.input.numel() // max(1, call.input.size(1))
            self.fewest = values if self.fewest is None else min(self.fewest, values)
        return func(*args, **kwargs)


def synchronize_batch_norm(model: nn.Module) -> nn.Module:
    """Let batch norm in training normalize over the whole batch of all ranks. Return `model`.

    This changes the modules whose forward calls batch_norm: BatchNorm layers, their subclasses, and those that
    RecordBatchNorm has found. Only the class of the object changes, so that its parameters, buffers and hooks, and all
    references to it stay valid. Call it before DDP or FSDP wraps the model. The process group need not exist yet.

    Raises ValueError, before any change, for a layer whose forward computes the statistics of the batch itself.
    """
    modules: list[Any] = []
    for name, module in model.named_modules():
        if isinstance(module, SyncBatchNorm) or not _calls_batch_norm(module):
            continue
        if _usage(module).trains_without or isinstance(module, LazyModuleMixin):
            raise ValueError(
                f"{name or 'model'}={type(module).__name__} cannot be synchronized over ranks, because its forward "
                "does not call batch_norm in training; use nn.BatchNorm1d, 2d or 3d, or sync_batchnorm=false"
            )
        modules.append(module)
    for each in modules:
        each.uses_batch_in_evaluation = _uses_batch_in_evaluation(each)
        kind: Any = type(each)
        each.__class__ = subclass_of(kind, SyncBatchNorm)
        each.process_group = None  # all ranks
    return model


def use_group(model: nn.Module, process_group: dist.ProcessGroup) -> None:
    """Let the model's synchronized layers normalize over these ranks, which read different samples."""
    for module in model.modules():
        if isinstance(module, SyncBatchNorm):
            module.process_group = process_group


def keeps_all_buffers(model: nn.Module) -> bool:
    """Return True if all buffers are statistics of synchronized BatchNorm layers, which are identical on all ranks."""
    layers = [each for each in model.modules() if isinstance(each, SyncBatchNorm) and isinstance(each, _BatchNorm)]
    kept = {id(statistic) for layer in layers for statistic in statistics_of(layer)}
    return all(id(buffer) in kept for buffer in model.buffers())


def statistics_of(layer: _BatchNorm) -> list[Tensor | None]:
    """Return the running statistics of the layer."""
    return [layer.running_mean, layer.running_var, layer.num_batches_tracked]


class SyncBatchNorm(nn.Module):
    """A module whose calls of batch_norm use the samples of all ranks of the group; combined with the module's class.

    If batch_norm uses the statistics of the batch, all ranks must call the module, also those without samples.
    Otherwise, such as in evaluation with running statistics, nothing changes.
    """

    process_group: dist.ProcessGroup | None
    uses_batch_in_evaluation: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        uses_batch = self.training or self.uses_batch_in_evaluation
        if not (uses_batch and dist.is_initialized() and dist.get_world_size(self.process_group) > 1):
            return super().forward(*args, **kwargs)
        return self._forward_synchronized(*args, **kwargs)

    # Collectives and the count of samples would break the graph in a dozen places. torch.compiler.disable would import
    # the compiler now, which takes 0.6 s, also in commands that do not train.
    @torch._disable_dynamo
    def _forward_synchronized(self, *args: Any, **kwargs: Any) -> Any:
        with _Synchronize(self.process_group):
            return super().forward(*args, **kwargs)


class _Synchronize(TorchFunctionMode):
    """Replaces batch_norm by `batch_norm_over` the ranks of the group if it uses the statistics of the batch."""

    def __init__(self, group: dist.ProcessGroup | None):
        super().__init__()
        self._group = group

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = _read(func, args, kwargs)
        if call is None or not call.training:
            return func(*args, **kwargs)
        is_counted = not any(isinstance(mode, Uncounted) for mode in _get_current_function_mode_stack())
        counted = call.input if is_counted else call.input[:0]
        statistics = (call.running_mean, call.running_var)
        normalized = batch_norm_over(
            *(self._group, counted, *statistics, call.weight, call.bias, call.momentum, call.eps)
        )
        return normalized if is_counted else torch.cat([normalized, call.input])


class Uncounted(TorchFunctionMode):
    """Keeps a batch out of the statistics of batch norm, synchronized or not, because its samples are not counted."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = _read(func, args, kwargs or {})
        if call is None or not call.training:
            return func(*args, **(kwargs or {}))
        num_channels, like = call.input.size(1), call.input if call.weight is None else call.weight
        statistics = like.new_zeros(num_channels), like.new_ones(num_channels)
        return F.batch_norm(call.input, *statistics, call.weight, call.bias, eps=call.eps)
