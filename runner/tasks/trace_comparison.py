"""Comparison of the records that task=trace has written for two runs: the name of the first tensor that differs."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runner.optimization.parameter_patterns import counted
from runner.tasks.trace import ROOT

SMALL = 0.1  # a gradient below this fraction of the largest one of the step may consist only of rounding errors
LISTED = 8  # samples or ranks in a line
Records = Mapping[int, Mapping[str, Any]]  # of a step and a loss, by rank


@dataclass(frozen=True)
class Difference:
    """The largest difference between two tensors, or between their rows of a sample."""

    difference: float
    values: tuple[float, float]
    sample: int  # the dataset's index
    ranks: tuple[int, int]  # of both runs, which computed the rows

    def __str__(self) -> str:
        return f"the largest difference is {self.difference:.1e}: {self.values[0]!r} in A, {self.values[1]!r} in B"


def find_difference(directories: tuple[Path, Path], steps: range, tolerance: float) -> tuple[str, list[str]]:
    """Return a line that names the first difference, empty if the runs agree, and the names that were not compared.

    tolerance: the difference that rounding explains, relative to the largest value of a tensor.
    """
    skipped: dict[str, None] = {}
    for step in steps:
        found = [
            {int(path.suffix[1:]): torch.load(path, weights_only=True) for path in directory.glob(f"{step}.*")}
            for directory in directories
        ]
        if not all(found):  # a run with fork= starts later
            continue
        one, other = (next(iter(of_rank.values())) for of_rank in found)
        for loss in (name for name in one if name in other):
            runs = [{rank: of_rank[rank][loss] for rank in sorted(of_rank)} for of_rank in found]
            for line in _differences(runs, tolerance, skipped):
                return f"step {step}{f', {loss}' * (loss != 'loss')}: {line}", [*skipped]
    return "", [*skipped]


def _differences(runs: Sequence[Records], tolerance: float, skipped: dict[str, None]) -> Iterator[str]:
    """Yield a line for each difference, in the order in which a step computes the tensors."""
    read = [{sample for record in run.values() for part in record["samples"] for sample in part} for run in runs]
    if read[0] != read[1]:
        only = [_listed("sample", samples) for samples in (read[0] - read[1], read[1] - read[0])]
        yield f"the runs read different samples: only A has {only[0]}, and only B has {only[1]}"
    # A record has the names in the order of the forward. Each rank of a pipeline has only the modules of its stages.
    records = [record for run in sorted(runs, key=len) for record in run.values()]
    for name in dict.fromkeys(name for record in records for name in record["rows"]):
        found, is_compared = _compare_rows(name, runs, tolerance)
        if found:
            samples = _listed("sample", (each.sample for each in found))
            ranks = [_listed("rank", (each.ranks[i] for each in found)) for i in (0, 1)]
            worst = max(found, key=lambda each: each.difference)
            yield f"{name} differs for {samples}, on {ranks[0]} in A and {ranks[1]} in B; {worst}"
        elif not is_compared:
            skipped[name] = None
    gradients = [{n: g for record in run.values() for n, g in record["gradients"].items()} for run in runs]
    largest = _largest(gradient for of_run in gradients for gradient in of_run.values())
    common = [name for name, g in gradients[0].items() if name in gradients[1] and g.shape == gradients[1][name].shape]
    skipped |= {f"the gradient of {name}": None for of_run in gradients for name in of_run if name not in common}
    modules = [*dict.fromkeys(name for record in records for name in record["modules"])]
    last = len(modules) - 1
    for position, name in sorted(((_position(name, modules), name) for name in common), reverse=True):
        one, other = gradients[0][name], gradients[1][name]
        worst = _worst(one, other)
        if worst.difference > tolerance * max(_largest([one, other]), SMALL * largest):
            computed_by = counted(modules[position : last + 1])
            yield f"the gradient of {name} differs; it is computed in the backward of {computed_by}; {worst}"
        last = position


def _position(parameter: str, modules: Sequence[str]) -> int:
    """Return the position of the innermost called module that contains the parameter, in the order of the forward."""
    while parameter and parameter not in modules:
        parameter = parameter.rpartition(".")[0]
    return modules.index(parameter or ROOT) if (parameter or ROOT) in modules else len(modules) - 1


def _compare_rows(name: str, runs: Sequence[Records], tolerance: float) -> tuple[list[Difference], bool]:
    """Return the differences of samples in a tensor, and whether any sample was compared."""
    one, other = (
        [
            (rank, record["samples"][number], rows.double())
            for rank, record in run.items()
            for number, rows in record["rows"].get(name, ())
        ]
        for run in runs
    )
    scale = _largest(rows for *_, rows in (*one, *other))
    found, is_compared = list[Difference](), False
    for (rank, samples, rows), (other_rank, other_samples, other_rows) in itertools.product(one, other):
        where = {sample: row for row, sample in enumerate(other_samples)}
        pairs = [(row, where[sample]) for row, sample in enumerate(samples) if sample in where]
        if pairs and rows.shape[1:] == other_rows.shape[1:]:
            is_compared = True
            both = rows[[i for i, _ in pairs]], other_rows[[j for _, j in pairs]]
            distances = _distance(*both).reshape(len(pairs), -1)
            for k in (distances > tolerance * scale).any(1).nonzero().flatten().tolist():
                found.append(_worst(both[0][k], both[1][k], samples[pairs[k][0]], (rank, other_rank)))
    return found, is_compared


def _largest(tensors: Iterable[torch.Tensor]) -> float:
    """Return the largest finite absolute value; 0 without one."""
    return max((float(each.abs().nan_to_num(posinf=0.0).max()) for each in tensors if each.numel()), default=0.0)


def _distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the absolute differences: 0 for equal values and for two NaN, infinity if only one value is finite."""
    are_equal = (one == other) | (one.isnan() & other.isnan())
    return torch.where(are_equal, 0.0, (one - other).abs().nan_to_num(math.inf))


def _worst(one: torch.Tensor, other: torch.Tensor, sample: int = 0, ranks: tuple[int, int] = (0, 0)) -> Difference:
    distances = _distance(one.double(), other.double()).flatten()
    where = int(distances.argmax()) if len(distances) else None
    values = [0.0, 0.0] if where is None else [float(tensor.flatten()[where]) for tensor in (one, other)]
    return Difference(0.0 if where is None else float(distances[where]), (values[0], values[1]), sample, ranks)


def _listed(noun: str, numbers: Iterable[int]) -> str:
    """Return the noun and the distinct numbers, for example "samples 3, 5"; "none" without a number."""
    distinct = [*map(str, sorted(set(numbers)))]
    return f"{noun}{'s' * (len(distinct) > 1)} {counted(distinct, LISTED)}" if distinct else "none"
