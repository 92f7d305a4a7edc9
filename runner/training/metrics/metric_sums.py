"""The metrics of an evaluation: added up batch by batch on each rank, summed over the ranks, then computed."""

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from runner.distributed.world import World
from runner.errors import InputError, failed_with, raised_by
from runner.input.pytree import describe
from runner.training.metrics.contract import Metric, Rows
from runner.training.model.positions import possible_pairs

DTYPES = (  # of sums and rows, which other ranks receive as an index of this list
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
)


class _TriedMetric:
    """A metric and the structure of its sums and values, which one sample determines."""

    def __init__(self, name: str, metric: Metric, outputs: Any, targets: Any):
        self._name, self._metric = name, metric
        once = self._try("update", outputs, targets)
        leaves, self._structure = tree_flatten(once)
        self.layouts = [_layout(leaf) for leaf in leaves]
        if not leaves or None in self.layouts:
            raise InputError(
                f"metrics.{name}: update must return a tensor of sums, or a pytree of them, not {describe(once)}"
            )
        if (pair := _twice((outputs, targets))) is not None:
            self._check_doubled(leaves, self._leaves(self._try("update", *pair)))
        summed = [
            torch.cat([leaf.tensor] * 2) if isinstance(leaf, Rows) else leaf.double() + leaf.double() for leaf in leaves
        ]
        self.names = list(self._named(self._try("compute", tree_unflatten(summed, self._structure))))

    def update(self, outputs: Any, targets: Any) -> list[torch.Tensor | Rows]:
        """Return the sums of a batch. Raise InputError if they have another structure than those of one sample."""
        with raised_by(f"metrics.{self._name}", "update"):
            return self._leaves(self._metric.update(outputs, targets))

    def compute(self, sums: list[torch.Tensor]) -> dict[str, float]:
        """Return the values by full name, given the sums over all samples."""
        with raised_by(f"metrics.{self._name}", "compute"):
            return self._named(self._metric.compute(tree_unflatten(sums, self._structure)))

    def _try(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._metric, method)(*arguments)
        except Exception as error:  # custom code can raise anything
            raise InputError(f"metrics.{self._name}: {method} fails for one sample{failed_with(error)}") from None

    def _leaves(self, sums: Any) -> list[torch.Tensor | Rows]:
        leaves, structure = tree_flatten(sums)
        if structure != self._structure or [_layout(leaf) for leaf in leaves] != self.layouts:
            raise InputError(
                f"metrics.{self._name}: update returned {describe(sums)}, and another structure or shape for one "
                "sample; sum over the samples of a batch"
            )
        return leaves

    def _check_doubled(self, once: list[Any], twice: list[Any]) -> None:
        """Raise InputError for means, which would depend on how the samples are split into batches."""
        sums = [(one.double(), two.double()) for one, two in zip(once, twice, strict=True) if not isinstance(one, Rows)]
        if not all(torch.allclose(2 * one, two, rtol=1e-3, atol=1e-6, equal_nan=True) for one, two in sums):
            raise InputError(
                f"metrics.{self._name}: update must return twice the values for a batch of one sample twice; return "
                "sums over the samples, and divide in compute"
            )

    def _named(self, value: Any) -> dict[str, float]:
        if isinstance(value, Mapping):
            return {f"{self._name}/{key}": self._number(number) for key, number in value.items()}
        return {self._name: self._number(value)}

    def _number(self, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                f"metrics.{self._name}: compute must return a number, or a mapping of numbers by name, not a value of "
                f"type {describe(value)}"
            ) from None


class MetricSums:
    """Metrics by name and their sums so far. Each is tried on one sample's outputs and targets (first dim 1)."""

    def __init__(self, metrics: Mapping[str, Metric], outputs: Any, targets: Any):
        self.metrics = dict(metrics)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # some metrics warn that one sample does not have all classes
            self._tried = {name: _TriedMetric(name, metric, outputs, targets) for name, metric in metrics.items()}
        self.reset(torch.device("cpu"))

    @property
    def names(self) -> dict[str, list[str]]:
        """The names of each metric's values: its own name, or NAME/KEY for each of several values."""
        return {name: metric.names for name, metric in self._tried.items()}

    @torch.no_grad()
    def not_of_parts(self, outputs: Any, targets: Any, parts: Sequence[range]) -> list[str]:
        """Return the metrics that keep rows, or whose sums are not those of parts of the positions, dim 1, together."""
        ends = [slice(part.start, part.stop) for part in parts]

        def differ(whole: torch.Tensor | Rows, *of_parts: Any) -> bool:
            if isinstance(whole, Rows):
                return True
            return not torch.allclose(sum(each.double() for each in of_parts), whole.double(), rtol=1e-3, atol=1e-6)

        found: dict[str, None] = {}
        for possible, compared in possible_pairs(outputs, targets):
            for name, metric in self._tried.items():
                of_parts = [metric.update(possible[:, end], compared[:, end]) for end in ends]
                if any(map(differ, metric.update(possible, compared), *of_parts)):
                    found[name] = None
        return [*found]

    def reset(self, device: torch.device) -> None:
        """Set the sums to zero, on the device."""
        layouts = [layout for metric in self._tried.values() for layout in metric.layouts]
        self._sizes = [shape.numel() for is_rows, shape in layouts if not is_rows]
        self._flat = torch.zeros(sum(self._sizes), dtype=torch.float64, device=device)
        # The tensors of each Rows, with the index of the first sample of their batch.
        self._rows: list[list[tuple[int, torch.Tensor]]] = [[] for is_rows, _ in layouts if is_rows]

    def add(self, outputs: Any, targets: Any, indices: Sequence[int]) -> None:
        """Add a local batch. `compute` sorts Rows by `indices`, the positions of the samples in their split."""
        rows, added = iter(self._rows), []
        for metric in self._tried.values():
            for leaf in metric.update(outputs, targets):
                if isinstance(leaf, Rows):
                    next(rows).append((indices[0], leaf.tensor.detach()))
                else:
                    added.append(leaf.detach().to(self._flat).flatten())
        if added:
            self._flat += torch.cat(added)

    def flat(self) -> torch.Tensor:
        """Return the sums of all metrics, concatenated: (number of sums,) in float64."""
        return self._flat.clone()

    def compute(self, flat: torch.Tensor, world: World) -> dict[str, float]:
        """Return the values by name, given `flat()` summed over the ranks. All ranks must call it."""
        sums, rows = iter(flat.split(self._sizes)), iter(self._rows)
        computed: dict[str, float] = {}
        for metric in self._tried.values():
            leaves = [
                _gather(next(rows), shape, flat.device, world) if is_rows else next(sums).reshape(shape)
                for is_rows, shape in metric.layouts
            ]
            computed |= metric.compute(leaves)
        return computed


def _layout(leaf: Any) -> Any:
    """Return (True, shape of one row) for Rows, (False, shape) for sums, and None for anything else."""
    tensor = leaf.tensor if isinstance(leaf, Rows) else leaf
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in DTYPES:
        return None
    if isinstance(leaf, Rows):
        return (True, tensor.shape[1:]) if tensor.dim() else None
    return False, tensor.shape


def _twice(tree: Any) -> Any:
    """Return a batch that contains the sample twice, or None if a leaf is not a tensor of one row."""
    if not all(isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == 1 for leaf in tree_leaves(tree)):
        return None
    return tree_map(lambda tensor: torch.cat([tensor, tensor]), tree)


def _gather(
    kept: list[tuple[int, torch.Tensor]], shape: torch.Size, device: torch.device, world: World
) -> torch.Tensor:
    """Return the rows of all ranks, (number of rows, ...), in the order of the first samples of their batches."""
    local = [(first, len(rows), DTYPES.index(rows.dtype)) for first, rows in kept]
    batches = world.collectives.gather(torch.tensor(local, dtype=torch.int64, device=device).reshape(-1, 3)).tolist()
    # A rank without outputs gets the dtype from the others; the first sample was in float32 under any precision.
    dtype = functools.reduce(torch.promote_types, [DTYPES[number] for _, _, number in batches] or [torch.float64])
    empty = torch.empty((0, *shape), dtype=dtype, device=device)
    rows = world.collectives.gather(torch.cat([empty, *(rows.to(empty) for _, rows in kept)]))
    parts = rows.split([size for _, size, _ in batches])
    order = sorted(range(len(parts)), key=lambda number: batches[number][0])  # stable: by rank among equals
    return torch.cat([empty, *(parts[number] for number in order)])
