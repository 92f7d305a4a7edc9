"""Adapter for metrics of torchmetrics: their states become sums and rows, and they never use a process group."""

import copy
from typing import Any

import torch

from runner.errors import InputError
from runner.input.batch import widen_integers
from runner.input.pytree import tensors
from runner.training.metrics.contract import Rows, Sums, Value
from runner.training.metrics.metric_sums import DTYPES

_MAX_DIMS = 6  # of a tensor in a list with dist_reduce_fx=None


def is_torchmetric(metric: object) -> bool:
    """Return True for a metric of torchmetrics, without importing torchmetrics."""
    return any(base.__module__ == "torchmetrics.metric" and base.__name__ == "Metric" for base in type(metric).__mro__)


class TorchMetric:
    """A metric of torchmetrics. States reduced by sum are sums; all others are rows.

    With dist_reduce_fx=None, the tensors of a list are gathered, and a tensor is stacked. torchmetrics stacks one per
    rank; the runner stacks one per batch.

    Raises InputError, with the metric's key, for other states, whose reduction over ranks is unknown.
    """

    def __init__(self, key: str, metric: Any):
        from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

        self.higher_is_better: bool | None = metric.higher_is_better
        self._metric = copy.deepcopy(metric)
        self._metric.set_dtype(torch.float64)  # float32 sums would depend on their order
        for name, default in metric._defaults.items():
            if isinstance(default, torch.Tensor) and not default.is_floating_point():
                self._metric._defaults[name] = default.clone()  # counts stay integers
        self._metric.sync_on_compute = self._metric._to_sync = False  # MetricSums has summed already
        self._metric.compute_with_cache = False
        of_lists = {None: "list", dim_zero_cat: "cat"}
        of_tensors = {None: "stack", dim_zero_sum: "sum", dim_zero_max: "amax", dim_zero_min: "amin"}
        self._kinds: dict[str, str] = {}  # by state
        for name, reduction in metric._reductions.items():
            kinds = of_lists if isinstance(metric._defaults[name], list) else of_tensors
            if reduction not in kinds:
                raise InputError(
                    f"{key}: its state {name} with dist_reduce_fx={reduction} cannot be computed over ranks; a state "
                    "must be reduced by sum, max, min or None, or be a list reduced by cat"
                )
            self._kinds[name] = kinds[reduction]

    def update(self, outputs: Any, targets: Any) -> Sums:
        """Return the states after `update(preds, target)` with only this batch."""
        device = next((tensor.device for tensor in tensors(outputs)), None)
        if device is not None and device != self._metric.device:
            self._metric.to(device)
        self._metric.reset()
        # Tensors in a structure, such as the masks of objects, may have to be uint8.
        self._metric.update(outputs, widen_integers(targets) if isinstance(targets, torch.Tensor) else targets)
        sums: dict[str, Any] = {}
        for name, kind in self._kinds.items():
            state = getattr(self._metric, name)
            if kind == "sum":
                sums[name] = state.clone()
            elif kind == "list":
                sums[name] = _pack(state, self._metric.device)
            else:
                sums[name] = Rows(torch.cat([*map(torch.atleast_1d, state)]) if kind == "cat" else state[None])
        return sums

    def compute(self, sums: dict[str, torch.Tensor]) -> Value:
        """Return the value that torchmetrics computes; a vector, as with average=none, becomes a mapping by index."""
        self._metric.reset()
        for name, kind in self._kinds.items():
            default, state = self._metric._defaults[name], sums[name]
            if kind == "cat":
                value: Any = [state]
            elif kind == "list":
                value = _unpack(*state)
            elif kind == "sum":
                value = state.to(default.dtype)
            elif len(state) == 0:
                value = default[None] if kind == "stack" else default
            else:
                value = (state if kind == "stack" else getattr(state, kind)(0)).to(default.dtype)
            setattr(self._metric, name, value)
        self._metric._update_count = 1  # otherwise it warns that `update` was not called
        computed: torch.Tensor | float | dict[str, Any] = self._metric.compute()
        if isinstance(computed, torch.Tensor) and computed.dim() == 1:
            return {str(index): number for index, number in enumerate(computed)}
        # Vectors of varying length, such as the classes of mAP, are not logged.
        if isinstance(computed, dict) and "list" in self._kinds.values():
            return {key: number for key, number in computed.items() if torch.as_tensor(number).dim() == 0}
        return computed


def _pack(state: list[torch.Tensor], device: torch.device) -> tuple[Rows, Rows]:
    """Return the elements of tensors of any shapes, (number of elements,), and dtype, dims and shape of each tensor."""
    heads = [[DTYPES.index(t.dtype), t.dim(), *t.shape, *[0] * (_MAX_DIMS - t.dim())] for t in state]
    values = [torch.zeros(0, dtype=torch.float64, device=device), *(t.double().flatten() for t in state)]
    return Rows(torch.cat(values)), Rows(torch.tensor(heads, dtype=torch.int64, device=device).view(-1, 2 + _MAX_DIMS))


def _unpack(values: torch.Tensor, heads: torch.Tensor) -> list[torch.Tensor]:
    shapes = [(DTYPES[dtype], torch.Size(dims[:count])) for dtype, count, *dims in heads.tolist()]
    parts = values.split([shape.numel() for _, shape in shapes])
    return [part.to(dtype).reshape(shape) for part, (dtype, shape) in zip(parts, shapes, strict=True)]
