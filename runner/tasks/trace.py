"""task=trace: repeats steps of an earlier run, and records the outputs of its modules and the gradients."""

import logging
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
from runner.parallel.local_sgd import LocalSGD
from runner.parallel.parameter_server import ParameterServer
from runner.records.run_directory import CHECKPOINTS, RunDirectory
from runner.tasks.train import Train
from runner.training.build import Experiment
from runner.training.callbacks.contract import Callback, Progress, RunInfo, Update

TRACE = "trace"  # the directory of the records, in the run directory
ROOT = "the model"  # the name of the outermost module


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
