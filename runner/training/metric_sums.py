"""The metrics of an evaluation: added up batch by batch on each rank, summed over the ranks, computed once."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from runner.config.diagnostics.own_line import first_line, own_line
from runner.distributed.world import World
from runner.errors import InputError
from runner.training.metric import Metric, Rows

_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
)


@dataclass(frozen=True)
class _Leaf:
    """A tensor of what a metric's `update` returns; of Rows the shape and the dtype of one row."""

    is_rows: bool
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Layout:
    """What one metric returns, as a sample has shown it."""

    metric: Metric
    structure: TreeSpec
    leaves: list[_Leaf]
    names: list[str]  # of its numbers


class MetricSums:
    """Metrics by name, tried on one sample's outputs and targets (first dim 1), and what they have added up.

    Raises InputError for a metric that fails on the sample, or gives no sums or no numbers.
    """

    def __init__(self, metrics: Mapping[str, Metric], outputs: Any, targets: Any):
        self.metrics = dict(metrics)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # one sample has not all classes, and some mind
            self._layouts = {name: _try(name, metric, outputs, targets) for name, metric in metrics.items()}
        self.reset(torch.device("cpu"))

    @property
    def names(self) -> dict[str, list[str]]:
        """The names of each metric's numbers: its own, or NAME/KEY for each of several."""
        return {name: layout.names for name, layout in self._layouts.items()}

    def reset(self, device: torch.device) -> None:
        """Begin anew, with sums on the device."""
        sizes = [torch.Size(leaf.shape).numel() for leaf in self._sums_leaves()]
        self._flat = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        self._rows: dict[str, list[list[tuple[int, torch.Tensor]]]] = {
            name: [[] for leaf in layout.leaves if leaf.is_rows] for name, layout in self._layouts.items()
        }
        self._num_added = 0

    def add(self, outputs: Any, targets: Any, indices: Sequence[int] = ()) -> None:
        """Count a batch of this rank's. indices: of its samples in the data, by which Rows are put in order.

        Raises ValueError where a metric's sums have another shape than before.
        """
        place = indices[0] if len(indices) else self._num_added
        self._num_added += 1
        added = []
        for name, layout in self._layouts.items():
            with _naming(name, "update"):
                leaves, structure = tree_flatten(layout.metric.update(outputs, targets))
                _check_same(layout, structure, leaves)
            rows = iter(self._rows[name])
            for leaf in leaves:
                if isinstance(leaf, Rows):
                    next(rows).append((place, leaf.tensor.detach()))
                else:
                    added.append(leaf.detach().to(self._flat).flatten())
        if added:
            self._flat += torch.cat(added)

    def flat(self) -> torch.Tensor:
        """All sums of all metrics after each other, (number of sums,) in float64; zeros where nothing was added."""
        return self._flat.clone()

    def compute(self, flat: torch.Tensor, world: World) -> dict[str, float]:
        """The numbers by name. flat: as `flat()` gives it, summed over the ranks. All ranks must call it."""
        parts = iter(flat.split([torch.Size(leaf.shape).numel() for leaf in self._sums_leaves()]))
        computed: dict[str, float] = {}
        for name, layout in self._layouts.items():
            rows = iter(self._rows[name])
            leaves = [
                _gather(next(rows), leaf, flat.device, world) if leaf.is_rows else next(parts).reshape(leaf.shape)
                for leaf in layout.leaves
            ]
            with _naming(name, "compute"):
                numbers = _named(name, layout.metric.compute(tree_unflatten(leaves, layout.structure)))
                if list(numbers) != layout.names:
                    raise ValueError(f"compute gave {list(numbers)}, and {layout.names} for one sample")
            computed |= numbers
        return computed

    def _sums_leaves(self) -> Iterator[_Leaf]:
        return (leaf for layout in self._layouts.values() for leaf in layout.leaves if not leaf.is_rows)


def _try(name: str, metric: Metric, outputs: Any, targets: Any) -> _Layout:
    """See what the metric makes of one sample, of it twice, and of the sums."""
    once = _run(name, "update", lambda: metric.update(outputs, targets))
    leaves, structure = tree_flatten(once)
    if not leaves or not all(_is_kept(leaf) for leaf in leaves):
        raise InputError(
            f"metrics.{name}: update must return a tensor of sums, or a pytree of them, not {_describe(once)}"
        )
    layout = _Layout(metric, structure, [_leaf(leaf) for leaf in leaves], [])
    pair = _twice(outputs), _twice(targets)
    doubles = all(given is not None for given in pair)
    again, structure = tree_flatten(
        _run(name, "update", lambda: metric.update(*(pair if doubles else (outputs, targets))))
    )
    try:
        _check_same(layout, structure, again)
    except ValueError as error:
        raise InputError(f"metrics.{name}: {error}") from None
    if doubles:
        _check_doubled(name, leaves, again)
    summed = [
        torch.cat([leaf.tensor] * 2) if isinstance(leaf, Rows) else leaf.double() + leaf.double() for leaf in leaves
    ]
    value = _run(name, "compute", lambda: metric.compute(tree_unflatten(summed, structure)))
    try:
        return _Layout(metric, structure, layout.leaves, list(_named(name, value)))
    except ValueError as error:
        raise InputError(f"metrics.{name}: {error}") from None


def _run(name: str, method: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # the user's code can fail in any way
        line = own_line(error)
        where = f" at {line}" if line else ""
        words = (isinstance(error, ValueError) and not line and str(error)) or first_line(error)
        raise InputError(f"metrics.{name}: {method} failed{where} for one sample: {words.splitlines()[0]}") from None


def _check_same(layout: _Layout, structure: TreeSpec, leaves: list[Any]) -> None:
    """Raises ValueError where the sums are not as they were for the sample."""
    found = [_leaf(leaf) for leaf in leaves if _is_kept(leaf)]
    if structure != layout.structure or len(found) != len(leaves):
        raise ValueError("update must return the same structure for every batch")
    for leaf, expected in zip(found, layout.leaves, strict=True):
        if (leaf.is_rows, leaf.shape) != (expected.is_rows, expected.shape):
            what = "rows" if leaf.is_rows else "sums"
            raise ValueError(
                f"update returned {what} of shape {list(leaf.shape)}, and {list(expected.shape)} for one sample; "
                "sum over the samples of a batch"
            )


def _check_doubled(name: str, once: list[Any], twice: list[Any]) -> None:
    """A mean is no sum: it would depend on how the samples are cut into batches."""
    for one, two in zip(once, twice, strict=True):
        if isinstance(one, Rows):
            continue
        one, two = one.double(), two.double()
        if one.isfinite().all() and two.isfinite().all() and not torch.allclose(2 * one, two, rtol=1e-3, atol=1e-6):
            raise InputError(
                f"metrics.{name}: update returned {_short(one)} for one sample and {_short(two)} for it twice; return "
                "sums over the samples, and divide in compute"
            )


def _is_kept(leaf: Any) -> bool:
    tensor = leaf.tensor if isinstance(leaf, Rows) else leaf
    is_real = isinstance(tensor, torch.Tensor) and tensor.dtype in _DTYPES
    return is_real and (tensor.dim() > 0 or not isinstance(leaf, Rows))


def _leaf(leaf: torch.Tensor | Rows) -> _Leaf:
    if isinstance(leaf, Rows):
        return _Leaf(True, tuple(leaf.tensor.shape[1:]), leaf.tensor.dtype)
    return _Leaf(False, tuple(leaf.shape), leaf.dtype)


def _twice(tree: Any) -> Any:
    """One sample as a batch of two; None where it is not made of tensors of one row alone."""
    leaves = tree_leaves(tree)
    if not leaves or not all(isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == 1 for leaf in leaves):
        return None
    return tree_map(lambda tensor: torch.cat([tensor, tensor]), tree)


def _named(name: str, value: Any) -> dict[str, float]:
    """Raises ValueError for what is no number, nor a mapping of them."""
    if isinstance(value, Mapping):
        return {f"{name}/{key}": _number(item) for key, item in value.items()}
    return {name: _number(value)}


def _number(value: Any) -> float:
    is_real = isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex()
    if is_real or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return float(value)
    raise ValueError(f"compute must return a number, or a mapping of numbers by name, not {_describe(value)}")


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__} ({str(value)[:40]})"


def _short(values: torch.Tensor) -> str:
    shown = [f"{value:.4g}" for value in values.flatten()[:3].tolist()]
    return ", ".join(shown) + (", ..." if values.numel() > 3 else "")


def _gather(kept: list[tuple[int, torch.Tensor]], leaf: _Leaf, device: torch.device, world: World) -> torch.Tensor:
    """The rows of all ranks, (number of rows, ...), by the first sample of the batch that they come from."""
    told = [(place, len(rows), _DTYPES.index(rows.dtype)) for place, rows in kept]
    batches = world.collectives.gather(torch.tensor(told, dtype=torch.int64, device=device).reshape(-1, 3)).tolist()
    # A rank without outputs does not know it: the sample was in float32, whatever the run's precision is.
    dtype = functools.reduce(torch.promote_types, {_DTYPES[number] for _, _, number in batches} or {leaf.dtype})
    empty = torch.empty((0, *leaf.shape), dtype=dtype, device=device)
    rows = world.collectives.gather(torch.cat([empty, *(rows.to(empty) for _, rows in kept)]))
    parts = rows.split([size for _, size, _ in batches])
    order = sorted(range(len(parts)), key=lambda number: batches[number][0])  # stable: by rank where places are equal
    return torch.cat([empty, *(parts[number] for number in order)])


@contextlib.contextmanager
def _naming(name: str, method: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        line = own_line(error)
        error.add_note(f"raised by metrics.{name} in {method}" + (f" at {line}" if line else ""))
        raise
