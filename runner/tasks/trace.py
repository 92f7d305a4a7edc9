"""task=trace: repeats steps of an earlier run, and records the outputs of its modules and the gradients.

`find_difference` compares the records of two runs, and names the first tensor that differs.
"""

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.distributed.tensor import DTensor

from runner.checkpoints.layout import choose_checkpoint
from runner.config.schema import Config
from runner.distributed.world import World
from runner.errors import JobFailed
from runner.input.pytree import named_tensors
from runner.jobs.continuation import copy_start
from runner.jobs.task import JobTask
from runner.optimization.parameter_patterns import counted
from runner.parallel.local_sgd import LocalSGD
from runner.parallel.parameter_server import ParameterServer
from runner.records.run_directory import CHECKPOINTS, RunDirectory
from runner.tasks.train import Train
from runner.training.build import Experiment
from runner.training.callbacks.contract import Callback, Progress, RunInfo, Update

TRACE = "trace"  # the directory of the records, in the run directory
ROOT = "the model"  # the name of the outermost module
SMALL = 0.1  # a gradient below this fraction of the largest one of the step may consist only of rounding errors
LISTED = 8  # samples or ranks in a line
Records = Mapping[int, Mapping[str, Any]]  # of a step and a loss, by rank


class Trace(JobTask):
    """The task that task=diff runs for both runs. Each rank writes a file for each recorded step."""

    reads_run = trains = True

    def __init__(self, first: int = 1, last: int = 1, checkpoint: int = 0):
        if not checkpoint < first <= last:
            raise ValueError(f"first={first} must be above checkpoint={checkpoint}, and at most last={last}")
        self.steps, self.checkpoint = range(first, last + 1), checkpoint

    def run(
        self, config: Config, experiment: Experiment, world: World, directory: RunDirectory, console: Console
    ) -> dict[str, float]:
        def copy() -> str:
            if self.checkpoint:
                saved = choose_checkpoint(Path(str(config.run)) / CHECKPOINTS, f"step_{self.checkpoint}")
                copy_start(saved, directory.path)
            return ""

        try:
            world.consensus.broadcast("trace", copy)
        except ValueError as error:
            raise JobFailed(f"run={config.run}: {error}") from None
        (directory.path / TRACE).mkdir(exist_ok=True)
        experiment.callbacks["trace"] = Tracer(experiment, world.rank, directory.path / TRACE, self.steps)
        logging.disable(logging.INFO)
        try:
            Train().run(config, experiment, world, directory, Console(quiet=True))
        except TraceComplete:
            return {}
        finally:
            logging.disable(logging.NOTSET)
        raise JobFailed(f"run={config.run} has no step {self.steps[-1]}")


class TraceComplete(Exception):
    """Raised on all ranks after the last recorded step, to end the training."""


class Tracer(Callback):
    """Records the inputs, the outputs of all modules and the gradients of the parameters, for some steps."""

    def __init__(self, experiment: Experiment, rank: int, directory: Path, steps: range):
        self._experiment, self._rank, self._directory, self._steps = experiment, rank, directory, steps
        self._step = 0
        self._record: dict[str, Any] = {}
        self._calls: dict[str, list[dict[str, torch.Tensor]]] = {}  # the outputs of each call, by module

    def on_start(self, run: RunInfo) -> None:
        module = self._experiment.recipe.module
        # Read before the first step: parameters that FSDP gathers later are other objects.
        self._parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        for name, submodule in module.named_modules():
            submodule.register_forward_hook(self._make_hook(name or ROOT))
        self._step = run.first_step + 1

    def before_forward(self) -> None:
        self._calls.clear()

    def allows_update(self, update: Update) -> bool:
        """Record a step. All ranks must call it, because the gradients of shards are gathered."""
        if self._step not in self._steps:
            return True
        batches = update.batch.micro_batches
        rows: dict[str, list[tuple[int, torch.Tensor]]] = {}  # by name: pairs of a micro-batch's number and its rows

        def add(name: str, number: int, tensor: torch.Tensor) -> None:
            if tensor.dim() and len(tensor) == batches[number].rows:
                rows.setdefault(name, []).append((number, _copy(tensor[: batches[number].num_samples])))

        for number, batch in enumerate(batches):
            for name, tensor in named_tensors(batch.data).items():
                add(f"tensor {name} of the batch" if name else "the batch", number, tensor)
        for module, calls in self._calls.items():
            if self._experiment.axes.sequence > 1:  # outputs of one rank are not comparable to those of another
                continue
            if batches and len(calls) % len(batches) == 0:  # the same number of calls for each micro-batch
                for position, outputs in enumerate(calls):
                    number, call = divmod(position, len(calls) // len(batches))
                    for name, tensor in outputs.items():
                        add(f"{module}{name}" + f", call {call + 1}" * (call > 0), number, tensor)
        scale = self._experiment.recipe.precision.scaler.get_scale()
        has_whole = not isinstance(self._experiment.parallel, LocalSGD | ParameterServer)
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None and has_whole}
        whole = {name: _copy(gradient) / scale for name, gradient in gradients.items()}
        self._record[update.name] = {
            "samples": [self._experiment.train_loader.dataset.dataset_indices(batch.indices) for batch in batches],
            "modules": [*self._calls],
            "rows": rows,
            "gradients": whole if self._experiment.axes.data_rank(self._rank) == 0 else {},
        }
        return True

    def after_step(self, now: Progress) -> None:
        if self._record:
            torch.save(self._record, self._directory / f"{now.step}.{self._rank}")
            self._record = {}
        self._step = now.step + 1
        if self._step == self._steps.stop:
            raise TraceComplete

    def _make_hook(self, name: str) -> Any:
        def record(module: nn.Module, inputs: Any, outputs: Any) -> None:
            # Ignore a forward without gradients, and a block that activation checkpointing recomputes in backward.
            is_forward = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
            if is_forward and self._step in self._steps:
                # Integers may be positions in the micro-batch, as in a PackedSequence.
                found = {n: t for n, t in named_tensors(outputs).items() if t.is_floating_point() or t.is_complex()}
                self._calls.setdefault(name, []).append({n: _copy(t) for n, t in found.items()})

        return record


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the whole tensor on the CPU. All ranks must call it for a sharded tensor."""
    whole: Any = tensor.detach()
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole.to_dense()
    return (torch.view_as_real(whole) if whole.is_complex() else whole).to("cpu", copy=True)


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
