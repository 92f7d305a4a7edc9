"""The plan of one rank: its memory, its messages and its operators, from real steps on fake tensors."""

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from runner.checkpoints.layout import TrainState
from runner.config.schema import Config
from runner.distributed.backend import as_backend
from runner.distributed.world import World
from runner.input.batch import MicroBatch, StepBatch
from runner.input.device_samples import DeviceSamples
from runner.input.pytree import map_tensors, tensors
from runner.input.source import Source
from runner.objectives.objective import Objective
from runner.planning.forwards import Forwards
from runner.planning.imagined_world import imagined_world, replace_tensors
from runner.planning.memory import ACTIVATIONS, COMMUNICATION, GRADIENTS, OPTIMIZER, PARAMETERS, REST, MemoryTracker
from runner.planning.timeline import Message, Operator, Timeline
from runner.training.build import Assembly, Experiment
from runner.training.callbacks.contract import Callbacks
from runner.training.callbacks.ema import EMA
from runner.training.mode import Axes, ParallelModel
from runner.training.throughput import ThroughputMeter
from runner.training.trainer import Trainer

MANY = 10**9  # a number of steps that a plan never reaches: no step is logged or the last one
MANY_ROWS = 64  # factor of the samples in a micro-batch
MakeData = Callable[[int], Any]  # the data of a micro-batch, given its number of samples


@dataclass(frozen=True)
class ModeConfig:
    """The configuration of a mode, the chosen option of each group, and the overrides from which it is composed."""

    config: Config
    choices: Mapping[str, str]
    overrides: Sequence[str] = ()


@dataclass(frozen=True)
class RankPlan:
    """The memory and the events of one rank."""

    rank: int
    axes: Axes
    memory: Mapping[str, int]  # bytes at the peak of a step, by kind (runner.planning.memory.KINDS)
    num_samples: int  # of a step, over all ranks
    rows: int  # the samples of its largest local micro-batch: as many as any rank has
    bytes_per_row: float | None  # memory per sample of a large micro-batch; None for a rank without samples
    bytes_between: int  # memory between two steps
    bytes_per_step: Mapping[str, float]  # exchanged, by collective, averaged over the steps of a round
    events: Sequence[Counter[Operator] | Message] = field(repr=False)  # of a round, in order

    @property
    def peak(self) -> int:
        return sum(self.memory.values())


def plan_rank(
    composed: ModeConfig,
    data: tuple[Source, Source],
    rank: int,
    world_size: int,
    on_gpu: bool = False,
    forwards: Forwards | None = None,
) -> RankPlan:
    """Plan one rank. Raises InputError as `build` does, and any exception of model and objective.

    data: of load_data. on_gpu: the ranks compute on GPUs. forwards: those of other ranks, which are not repeated.
    """
    config = replace(composed.config, metrics={}, monitor=None, train_metrics=False)
    config = replace(config, log_every=MANY, max_steps=MANY, epochs=MANY)
    backend, tracker = as_backend(config.backend), MemoryTracker(on_cpu=not on_gpu)
    with imagined_world(rank, world_size, backend, on_gpu) as world, tracker:
        imagined = ImaginedSource.of_source(data[0]), ImaginedSource.of_source(data[1])
        experiment = _build(config, composed.choices, world, imagined, forwards or Forwards())
        module, round_steps = experiment.recipe.module, experiment.parallel.round_steps
        num_planned = min(2, round_steps)  # all steps of a round except the last are identical
        trainer = _make_trainer(config, experiment, _prepare(experiment, world, tracker, num_planned), world)
        make_data = _data_maker(experiment, imagined[0])
        batch, bytes_per_row = _batch(experiment, make_data), None
        rows = max(micro_batch.num_samples for micro_batch in batch.micro_batches)
        tracker.mark([*module.parameters(), *module.buffers()], PARAMETERS)

        def step_with_many_rows() -> float:
            """Return the bytes per sample: with many samples, activations determine the peak."""
            before = tracker.reset_peak()
            trainer.step(_batch(experiment, make_data, MANY_ROWS))
            return (sum(tracker.peak().values()) - before) / (MANY_ROWS * rows)

        with _marking(tracker), contextlib.closing(experiment.train_loader), contextlib.closing(experiment.val_loader):
            is_pipeline = experiment.axes.stage > 1
            if rows and not is_pipeline:  # a pipeline would keep buffers for as many samples
                bytes_per_row = step_with_many_rows()
            else:
                trainer.step(batch)
            ahead = _read_ahead(experiment, make_data, batch, on_gpu)
            tracker.reset_peak()  # the first step has created the state of the optimizer
            counts = (1, round_steps - 1)[:num_planned]  # the end of a round, and the rest
            events, exchanged = _observe_round(functools.partial(trainer.step, batch), counts)
            memory = _with_rest(tracker.peak(), _bytes_kept(data))
            if experiment.axes.data_rank(rank) is None:  # a server computes no activations: it receives gradients
                memory[COMMUNICATION], memory[ACTIVATIONS] = memory[COMMUNICATION] + memory[ACTIVATIONS], 0
            del ahead  # smaller with smaller micro-batches
            between = tracker.reset_peak() + _bytes_kept(data)
            if rows and is_pipeline:
                bytes_per_row = step_with_many_rows()
    return RankPlan(
        rank,
        experiment.axes,
        memory,
        batch.num_samples,
        rows,
        bytes_per_row,
        between,
        {kind: count / round_steps for kind, count in exchanged.items()},
        events,
    )


def _bytes_kept(data: tuple[Source, Source]) -> int:
    """Return the memory of the samples that keep_samples=device keeps."""
    return sum(cache.num_bytes for cache in {each.cache for each in data} if isinstance(cache, DeviceSamples))


def _with_rest(memory: dict[str, int], num_bytes: int) -> dict[str, int]:
    return {**memory, REST: memory[REST] + num_bytes}


def _make_trainer(config: Config, experiment: Experiment, parallel_model: ParallelModel, world: World) -> Trainer:
    callbacks = Callbacks([])
    if config.ema.decay is not None:
        average = EMA(parallel_model, experiment.recipe.module, config.ema.decay, config.ema.warmup_steps)
        callbacks.add("ema", average)
    start = TrainState(step=0, epoch=0, step_in_epoch=0, batch_size=config.batch_size)
    return Trainer(config, experiment, parallel_model, world, start, ThroughputMeter(), callbacks)


def _observe_round(
    step: Callable[[], None], counts: Sequence[int]
) -> tuple[list[Counter[Operator] | Message], Counter[str]]:
    """Make a step for each count, the number of identical steps. Return the events and the bytes by collective."""
    events, exchanged = list[Counter[Operator] | Message](), Counter[str]()
    for count in counts:
        with Timeline() as timeline:
            step()
        events += count * timeline.events
        exchanged.update({kind: count * size for kind, size in timeline.bytes.items()})
    return events, exchanged


def _build(
    config: Config, choices: Mapping[str, str], world: World, data: tuple[Source, Source], forwards: Forwards
) -> Experiment:
    """Construct the experiment as `runner.training.build.build` does, without what depends on the values of tensors."""
    assembly = Assembly(config, choices, world, data=data, may_defer=False)
    assembly.prepare_model(forwards.run(config, assembly.components))
    assembly.adapt_model()
    return assembly.finish()


def without_forward(composed: ModeConfig) -> ModeConfig:
    """Return the configuration with an objective that does not call the model, for one whose forward cannot run."""
    objective = {"_target_": f"{WithoutForward.__module__}.{WithoutForward.__qualname__}"}
    return replace(composed, config=replace(composed.config, objective=objective))


class WithoutForward(Objective):
    """An objective with gradients of all parameters, but without activations."""

    def __init__(self, loss: Any = None):
        self._unused = loss  # so that any loss=... is valid

    def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        parameters = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
        return torch.stack([p.sum().real.double() for p in parameters]).sum(), 1


class ImaginedSource(Source):
    """A source that reads real samples, and returns batches of fake tensors."""

    @classmethod
    def of_source(cls, source: Source) -> "ImaginedSource":
        return cls(**{each.name: getattr(source, each.name) for each in fields(source) if each.init})

    def read(self, *args: Any, **options: Any) -> Any:
        with _disable_current_modes():
            batch = super().read(*args, **options)
        return map_tensors(torch.clone, batch)


def _batch(experiment: Experiment, make_data: MakeData, times: int = 1) -> StepBatch:
    """Return a batch as large as that of any data rank, with `times` as many samples in each local micro-batch.

    The batch of a parameter server has no samples.
    """
    loader = experiment.train_loader
    sampler = loader.sampler
    if sampler.data_rank is not None:
        sampler = replace(sampler, data_rank=sampler.data_ranks - 1)  # no part of an uneven split is larger
    micro_batches = []
    for positions in sampler.positions(0):
        count = times * len(positions)
        data = make_data(count or 1)
        micro_batches.append(MicroBatch(data, range(count)))
    return StepBatch(micro_batches, sampler.step_size(0), 0.0)


def _read_ahead(experiment: Experiment, make_data: MakeData, batch: StepBatch, on_gpu: bool) -> Any:
    """Return data of the size that is at most on the device for later steps."""
    loader, (first, *rest) = experiment.train_loader, batch.micro_batches
    num_in_epoch = loader.sampler.steps_per_epoch * len(batch.micro_batches)
    count = min(loader.batches_at_once(sum(tensor.nbytes for tensor in tensors(first.data))), num_in_epoch)
    rows = first.num_samples * max(0, count - 1 - len(rest))
    if on_gpu and not isinstance(loader.dataset.cache, DeviceSamples):  # the loader copies the next read ahead
        rows += first.num_samples * (len(batch.micro_batches) if loader.is_stream else count)
    return make_data(rows)


def _data_maker(experiment: Experiment, source: Source) -> MakeData:
    """Return a function that creates the data of a micro-batch, all of whose samples have the shapes of the first two.

    A dim that is larger for two samples than for one grows with their number.
    """
    loader = experiment.train_loader
    few = [0], [0, min(1, len(source) - 1)]
    one, two = ([tensor.shape for tensor in tensors(source.read(indices, seed=loader.seed))] for indices in few)

    def make_data(rows: int) -> Any:
        grown = iter(zip(one, two, strict=True))

        def grow(tensor: torch.Tensor) -> torch.Tensor:
            size = [n + (rows - 1) * (m - n) for n, m in zip(*next(grown), strict=True)]
            return loader.to_device(tensor.new_empty(size))

        return map_tensors(grow, source.read([0], seed=loader.seed))

    return make_data


def _prepare(experiment: Experiment, world: World, tracker: MemoryTracker, round_steps: int) -> ParallelModel:
    """Let the mode, with rounds of this many steps, prepare the model.

    The rank creates its own part of the model if a real rank does.
    """
    recipe, parallel = experiment.recipe, copy.copy(experiment.parallel)
    parallel.round_steps, parallel.captures = round_steps, False
    if experiment.parallel.meta_init:
        tracker.leave_out([*recipe.module.parameters(), *recipe.module.buffers()])
        recipe = replace(recipe, materialize=functools.partial(_materialize, done=set[nn.Module]()))
    return parallel.prepare(recipe, world)


def _materialize(submodules: Iterable[nn.Module], done: set[nn.Module]) -> None:
    """Create the tensors of the submodules that are not done, as runner.training.model.deferred_init does."""
    modules = dict.fromkeys(module for submodule in submodules for module in submodule.modules())
    parts = [module for module in modules if module not in done]
    done.update(parts)
    replace_tensors(parts, torch.empty_like)


@contextlib.contextmanager
def _marking(tracker: MemoryTracker) -> Iterator[None]:
    """Mark the parameters, the gradients and the state of each optimizer that steps in this context."""

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        tracker.mark(parameters, PARAMETERS)
        tracker.mark([parameter.grad for parameter in parameters], GRADIENTS)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        tracker.mark([tensor for state in optimizer.state.values() for tensor in state.values()], OPTIMIZER)

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
