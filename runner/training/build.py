"""Construction of everything that a rank trains or evaluates with, in order, from the configuration."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from runner.checkpoints.base_weights import BaseWeights
from runner.config.instantiate import make_group
from runner.config.schema import DEBUG_BATCHES, SPLITS, Config
from runner.distributed.local.exchange import exchange_on_machine
from runner.distributed.sync_batch_norm import normalizes_in_evaluation
from runner.distributed.world import World
from runner.errors import InputError, as_input_error
from runner.input.batch import cast_floating
from runner.input.datasets import load_data
from runner.input.loader import Loader
from runner.input.pytree import map_tensors
from runner.input.rng import derive_seed
from runner.input.sampler import Sampler, count_steps
from runner.input.source import Source
from runner.objectives.objective import loss_groups
from runner.objectives.supervised import Supervised
from runner.optimization.float8 import convert_linears
from runner.optimization.lr_schedules import Schedule
from runner.optimization.optimizers import OptimizerFactory
from runner.optimization.parameter_patterns import counted, freeze
from runner.optimization.precision import Precision, convert
from runner.optimization.torch_schedules import make_schedule
from runner.process.freed_memory import return_freed_memory
from runner.records.loggers.contract import Logger
from runner.records.monitor import Direction, Monitor
from runner.training.callbacks.contract import Callback
from runner.training.components import (
    Components,
    attach_objective,
    check_gathers,
    check_train_metrics,
    choose_monitor,
    declared_directions,
    make_callbacks,
    make_logger,
    make_metrics,
    make_objective,
    make_parallel,
)
from runner.training.dry_run import check_all_used
from runner.training.first_samples import FirstSamples
from runner.training.metrics.confusion import Predictions, num_classes
from runner.training.metrics.metric_sums import MetricSums
from runner.training.mode import Axes, Parallel, Recipe, resolve
from runner.training.model.activation_checkpointing import checkpoint_activations
from runner.training.model.adapters import make_adapters, make_model
from runner.training.model.batch_norm import check_batch_sizes, describe_batch_norm, synchronize_as_configured
from runner.training.model.deferred_init import BuiltModel, build_deferred
from runner.training.model.device_map import place_submodules
from runner.training.model.initial_weights import InitialWeights
from runner.training.model.submodules import offered
from runner.training.preflight import Findings, run_dry
from runner.training.state_check import check_extra_state


@dataclass(frozen=True)
class Experiment:
    """Everything that one rank trains or evaluates with."""

    parallel: Parallel  # in this world and for this model
    recipe: Recipe
    make_model: Callable[[], nn.Module]  # constructs another model, with initial weights
    train_loader: Loader
    val_loader: Loader
    schedule: Schedule
    logger: Logger
    callbacks: dict[str, Callback]  # the custom callbacks, by name
    num_parameters: int
    parameter_groups: dict[str, int]  # number of trained parameters in each group of the optimizer
    metrics: MetricSums
    train_metrics: MetricSums | None
    monitor: Monitor  # the metric that compares runs
    directions: Mapping[str, Direction]  # of the metrics and losses, by name
    header_lines: list[str]  # about initial weights and frozen parameters
    warnings: list[str]
    num_classes: int | None  # None if it is no classification, or too many for a readable confusion matrix
    base: BaseWeights | None  # the frozen weights that checkpoints leave out, unless the run is resumed

    @property
    def axes(self) -> Axes:
        """The mesh of the mode."""
        return self.parallel.resolved_axes

    def keep_samples(self) -> None:
        """Allocate or share the memory of kept samples. All ranks must call it, after the process group is formed."""
        for cache in dict.fromkeys((self.train_loader.dataset.cache, self.val_loader.dataset.cache)):
            if cache is not None:
                cache.prepare(exchange_on_machine())

    def watch_predictions(self) -> Predictions | None:
        """Return empty counts of predictions for an evaluation, or None if the logger does not need them."""
        if self.num_classes is None or not self.logger.wants_predictions:
            return None
        loader = self.val_loader
        return Predictions(loader.dataset, self.num_classes, loader.device, loader.sampler.seed)


def build(
    config: Config,
    choices: Mapping[str, str],
    world: World,
    init_from: Path | None = None,
    trains: bool = True,
) -> Experiment:
    """Construct the experiment on this rank, with the initial weights of a file or checkpoint. All ranks must call it.

    With `trains`, also check what only training needs. Raises InputError for an invalid option and for options that do
    not fit each other. All ranks raise the same one.
    """
    assembly = Assembly(config, choices, world, trains)
    components = assembly.components
    recomputes = config.activation_checkpointing != "none"
    found = components.model.run(lambda: run_dry(components, recomputes, config.compile, trains))
    assembly.prepare_model(found, init_from)
    if trains and assembly.parallel.needs_all_gradients:
        local_size = config.batch_size // (assembly.axes.data_ranks * config.micro_batches)
        check_all_used(components, found.draws, local_size, assembly.to_device)
    assembly.adapt_model()
    return assembly.finish()


class Assembly:
    """An experiment under construction, whose methods are called in order. Each raises InputError for invalid options.

    Attributes:
        parallel: The mode in this world, and after `prepare_model` for this model.
        components: What the dry runs call.
        to_device: Returns the data of samples on the device, in the run's precision.
        header_lines, warnings: Of the experiment.
    """

    def __init__(
        self,
        config: Config,
        choices: Mapping[str, str],
        world: World,
        trains: bool = True,
        data: tuple[Source, Source] | None = None,
        may_defer: bool = True,
    ):
        """Construct mode, data, model and objective.

        trains: see `build`. data: the training data and the evaluated data, by default as configured. may_defer: a
        model of which no rank has the whole is built on the meta device.
        """
        self._config, self._choices, self._world, self._trains = config, choices, world, trains
        parallel = make_parallel(config.parallel, choices)
        self._train_data, self._val_data = data or load_data(config, choices, world)
        # Reports an unsuitable world size before the model is built.
        self.parallel = resolve(parallel, config, world.world_size)
        self._adapters = make_adapters(config.adapters, choices, config.freeze)
        torch.manual_seed(config.seed)
        self._make_model = functools.partial(make_model, choices, config.model, self._adapters)
        is_deferred = may_defer and (self.parallel.meta_init or self.parallel.is_placeholder)
        model = build_deferred(choices["model"], self._make_model) if is_deferred else BuiltModel(self._make_model())
        self._precision = Precision(config.precision, world.device)
        objective = make_objective(config.objective, config.loss, choices, self.parallel)
        check_gathers(objective, choices, config.micro_batches)
        samples = FirstSamples(self._train_data, config.seed, config.data.get("sample_shape"))
        indices = range(min(2, len(self._train_data))) if normalizes_in_evaluation(model.module) else [0]
        self._data_warnings = samples.check(choices, indices)
        self.components = Components(choices, self.parallel, model, objective, samples, indices)
        self.header_lines, self.warnings = list[str](), list[str]()

    @property
    def axes(self) -> Axes:
        """The mesh of the mode."""
        return self.parallel.resolved_axes

    @property
    def _module(self) -> nn.Module:
        return self.components.module

    def to_device(self, data: Any) -> Any:
        device, dtype = self._world.device, self._precision.parameter_dtype
        return map_tensors(lambda tensor: cast_floating(tensor.to(device), dtype), data)

    def prepare_model(self, found: Findings, init_from: Path | None = None) -> None:
        """Convert, freeze, check and initialize the model, given what the dry runs have found.

        init_from: the file or checkpoint with the initial weights.
        """
        config, choices, world, objective = self._config, self._choices, self._world, self.components.objective
        self._found = found
        found.draws.device = world.device
        self.warnings += [*self.components.model.warnings, *found.warnings]
        if self._trains:
            found.refuse_writes(choices, self.parallel, world)
        self._convert()
        frozen = freeze(config.freeze, self._module)
        if self._trains:
            check_extra_state(choices, self._module)
            found.state.refuse(choices, self._module, self.parallel, self.axes)
            self.warnings += found.state.warnings(choices, objective)
        if messages := self.parallel.check(self._module, config.activation_checkpointing):
            raise InputError(*messages)
        if self._trains and found.draws.recomputes and not self.parallel.can_recompute:
            raise InputError(
                f"parallel={choices['parallel']}: with its options, the recomputation of torch.utils.checkpoint in "
                f"model={choices['model']} may use other weights and random numbers; try parallel=ddp"
            )
        loss_groups(objective, self._module)  # checks the patterns
        self.warnings += self._data_warnings
        self.warnings += place_submodules(self._module, choices, self.parallel.spans_devices, world)
        self._initial, self._base = None, None
        if init_from is not None:
            names = self._adapters.base_names(self._module)
            self._initial = InitialWeights(config.init_from, init_from, self._module, names)
            self._base = self._initial.frozen(self._module, world.rank)
            self._initial.fill(self._module)
            self.header_lines += self._initial.describe()
            self.warnings += self._initial.warnings(self._module)
        self.header_lines += [*self._adapters.describe(self._module, config.init_from.path is not None), *frozen]
        with as_input_error():
            self.parallel = self.parallel.fit(self._module)

    def _convert(self) -> None:
        """Move the model to the device, and convert it to the run's precision and memory format."""
        config, model, dtype = self._config, self.components.model, self._precision.parameter_dtype
        attach_objective(model.module, self.components.objective, self._world.device, dtype)
        model.module.to(device=None if model.deferred else self._world.device)
        if changed := convert(model.module, dtype):
            self.warnings.append(
                f"precision={config.precision}: {counted(changed, 3)} of model={self._choices['model']} had another "
                f"dtype, and the conversion to {dtype} changes their values or format"
            )
        self._memory_format = _choose_memory_format(config.memory_format, model.module)
        model.module.to(memory_format=self._memory_format)

    def adapt_model(self) -> None:
        """Change what the forward does: BatchNorm over all ranks, recomputation, seeds of stages, and compilation."""
        config, module, draws = self._config, self._module, self._found.draws
        self.header_lines += convert_linears(module, self._world.device) if config.precision == "float8" else []
        synchronize_as_configured(config.sync_batchnorm, module, self.axes)
        if self._trains:
            self.warnings += describe_batch_norm(config.micro_batches, module, self.axes)
        checkpoint_activations(module, config.activation_checkpointing)
        if draws.follows and (why := self._seed_stages()):
            draws.follows = False
            self.warnings.append(
                f"parallel={self._choices['parallel']}: the random numbers of model={self._choices['model']} "
                f"depend on the number of ranks, because {why}"
            )
        if config.compile:
            module.compile(mode=None if config.compile is True else config.compile)

    def _seed_stages(self) -> str:
        """Let each stage of the model begin with its own seed. Return why draws cannot follow the samples, or ""."""
        draws, stages = self._found.draws, offered(self._module, "stages")
        is_known = not stages or draws.seed_stages(self._module, stages())
        if not self.parallel.draws_in_backward:
            if draws.recomputes:
                return "it calls torch.utils.checkpoint"
            if draws.for_gradients:
                return "hooks of its gradients draw them"
        return "" if is_known or self.axes.stage == 1 else "a stage begins with a module of another stage"

    def finish(self) -> Experiment:
        """Construct the optimizer, the loaders and what observes the run. Return the experiment."""
        config, objective, draws = self._config, self.components.objective, self._found.draws
        make_optimizer = OptimizerFactory(
            config.optimizer,
            self._choices,
            self._module,
            shards=self._trains and self.parallel.shards_matrices,
            splits=self._trains and self.parallel.splits_parameters,
            step_key=lambda: draws.key,
        )
        metrics = self._make_metrics()
        if config.train_metrics:
            check_train_metrics(self._choices, self.parallel, objective, metrics)
        names = [*objective.losses, *objective.terms]
        directions = declared_directions(metrics.metrics, names)
        monitor_direction = cast("Direction | None", config.monitor_direction)
        train_loader, val_loader = self._make_train_loader(), self._make_val_loader()
        steps_per_epoch = train_loader.sampler.steps_per_epoch
        num_steps = count_steps(config.epochs, config.max_steps, steps_per_epoch)
        self._check_batch_norm(train_loader.sampler, val_loader.sampler)
        return Experiment(
            parallel=self.parallel,
            recipe=self._make_recipe(make_optimizer),
            make_model=self._make_model,
            train_loader=train_loader,
            val_loader=val_loader,
            schedule=make_schedule(config.scheduler, self._choices, make_optimizer.options, num_steps, steps_per_epoch),
            logger=make_logger(config.logger),
            callbacks=make_callbacks(config.callbacks),
            num_parameters=sum(parameter.numel() for parameter in self._module.parameters()),
            parameter_groups=make_optimizer.num_parameters,
            metrics=metrics,
            train_metrics=self._make_metrics() if config.train_metrics else None,
            monitor=choose_monitor(config.monitor, monitor_direction, metrics, directions, names, objective.logged),
            directions=directions,
            header_lines=self.header_lines,
            warnings=self.warnings,
            num_classes=num_classes(self._found.forward.prediction),
            base=self._base,
        )

    def _check_batch_norm(self, train: Sampler, val: Sampler) -> None:
        """Raise InputError if BatchNorm would get a single sample in a step or in a batch of an evaluation."""
        config, found = self._config, self._found
        per_rank = config.sync_batchnorm is False or self.parallel.normalizes_per_rank
        if found.needs_two and self._trains:
            fixes = {"loader.drop_last=true": (replace(train, drop_last=True), per_rank)}
            fixes = fixes if config.loader.get("drop_last") is False else {}
            if not self.parallel.normalizes_per_rank:
                fixes["sync_batchnorm=auto"] = (train, False)
            count = functools.partial(count_steps, config.epochs, config.max_steps)
            check_batch_sizes(train, per_rank, count, fixes)
        if found.forward.needs_two:
            check_batch_sizes(val, per_rank, lambda steps: config.eval_batches or steps, {}, "batch of an evaluation")

    def _make_recipe(self, make_optimizer: OptimizerFactory) -> Recipe:
        found = self._found
        return Recipe(
            self._module,
            self.components.objective,
            make_optimizer,
            self._precision,
            self._config.clip_grad_norm,
            self._world.device,
            self.to_device(self.components.sample().data),
            materialize=functools.partial(_materialize, self.components.model, self._initial, self._world.device),
            differentiates=found.forward.differentiates,
            written=found.state.parameters,
            draws=found.draws,
        )

    def _make_metrics(self) -> MetricSums:
        objective, prediction = self.components.objective, self._found.forward.prediction
        loss = objective.function if isinstance(objective, Supervised) else None
        return make_metrics(self._config.metrics, loss, prediction.outputs, prediction.targets, self.axes.sequence)

    def _make_train_loader(self) -> Loader:
        config = self._config
        return self._make_loader(
            self._train_data,
            config.loader,
            seed=config.seed,
            micro_batches=config.micro_batches * self.axes.micro_batches,
            max_steps=DEBUG_BATCHES if config.debug else None,
        )

    def _make_val_loader(self) -> Loader:
        """Return a loader that reads each sample once."""
        config = self._config
        # Samples of different splits draw different random numbers.
        split = SPLITS.index(config.split)
        seed = derive_seed(config.seed, split) if split else config.seed
        each_once: dict[str, Any] = {"shuffle": False, "drop_last": False}
        if "weights" in config.loader:  # a custom loader may not have sample weights
            each_once["weights"] = None
        return self._make_loader(self._val_data, {**config.loader, **each_once}, seed)

    def _make_loader(self, dataset: Source, node: dict[str, Any], seed: int, **batches: Any) -> Loader:
        axes, size = self.axes, self._config.batch_size
        rank = axes.data_rank(self._world.rank)
        sampler = Sampler(len(dataset), size, data_rank=rank, data_ranks=axes.data_ranks, seed=seed, **batches)
        loader: Loader = make_group(
            self._choices,
            "loader",
            node,
            dataset=dataset,
            sampler=sampler,
            dtype=self._precision.parameter_dtype,
            device=self._world.device,
            memory_format=self._memory_format,
        )
        return loader


def _materialize(
    model: BuiltModel, initial: InitialWeights | None, device: torch.device, submodules: Iterable[nn.Module]
) -> None:
    """Create the initial weights of submodules on the device, if the model is deferred."""
    if model.deferred is not None:
        return_freed_memory()  # of submodules that were sharded since the last call
        pending = initial.pending(model.module) if initial is not None else []
        model.deferred.materialize(submodules, device, without_values=pending)
        if initial is not None:
            initial.fill(model.module)


def _choose_memory_format(name: str, module: nn.Module) -> torch.memory_format:
    convolves = any(isinstance(submodule, nn.Conv2d) for submodule in module.modules())
    if name == "channels_last" and not convolves:
        raise InputError("memory_format=channels_last has no effect on a model without Conv2d; try memory_format=auto")
    return torch.channels_last if convolves and name != "contiguous" else torch.contiguous_format
