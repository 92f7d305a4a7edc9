"""Construction of everything that a rank trains or evaluates with, in order, from the configuration."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.config.instantiate import make_group
from runner.config.schema import DEBUG_BATCHES, SPLITS, Config
from runner.distributed.local.exchange import exchange_on_machine
from runner.distributed.sync_batch_norm import RecordBatchNorm, has_batch_norm, normalizes_in_evaluation
from runner.distributed.world import World
from runner.errors import InputError
from runner.input.batch import MicroBatch, cast_floating
from runner.input.datasets import load_data
from runner.input.loader import Loader
from runner.input.pytree import map_tensors
from runner.input.rng import derive_seed
from runner.input.sampler import Sampler
from runner.input.source import Source
from runner.objectives.objective import Prediction, loss_groups
from runner.objectives.supervised import Supervised
from runner.optimization.optimizers import OptimizerFactory
from runner.optimization.parameter_patterns import counted, freeze
from runner.optimization.precision import Precision, convert
from runner.records.loggers.contract import Logger
from runner.records.monitor import Monitor
from runner.training.callbacks.contract import Callback
from runner.training.components import (
    attach_objective,
    check_train_metrics,
    choose_monitor,
    make_callbacks,
    make_logger,
    make_metrics,
    make_objective,
    make_parallel,
)
from runner.training.dry_run import check_all_used, read_sample
from runner.training.metrics.confusion import MAX_CLASSES, Predictions
from runner.training.metrics.metric_sums import MetricSums
from runner.training.mode import Axes, Parallel, Recipe, make_axes
from runner.training.model.activation_checkpointing import checkpoint_activations
from runner.training.model.batch_norm import describe_batch_norm, synchronize_as_configured
from runner.training.model.deferred_init import build_deferred, run_built
from runner.training.model.device_map import place_submodules
from runner.training.model.initial_weights import InitialWeights
from runner.training.model.submodules import offered
from runner.training.preflight import Findings, run_dry
from runner.training.state_check import check_extra_state


@dataclass(frozen=True)
class Experiment:
    """Everything that one rank trains or evaluates with."""

    parallel: Parallel
    axes: Axes
    recipe: Recipe
    make_model: Callable[[], nn.Module]  # constructs another model, with initial weights
    train_loader: Loader
    val_loader: Loader
    schedule: Callable[[int, int, int], float]  # see runner.optimization.lr_schedules
    logger: Logger
    callbacks: dict[str, Callback]  # the custom callbacks, by name
    num_parameters: int
    parameter_groups: dict[str, int]  # number of trained parameters in each group of the optimizer
    metrics: MetricSums
    train_metrics: MetricSums | None
    monitor: Monitor  # the metric that compares runs
    header_lines: list[str]  # about initial weights and frozen parameters
    warnings: list[str]
    num_classes: int | None  # None if it is no classification, or too many for a readable confusion matrix

    def share_samples(self) -> None:
        """Share the sample cache within this machine. All ranks must call it, after the process group is formed."""
        for cache in dict.fromkeys((self.train_loader.dataset.cache, self.val_loader.dataset.cache)):
            if cache is not None:
                cache.share(exchange_on_machine())

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
    data: tuple[Source, Source] | None = None,
) -> Experiment:
    """Construct the experiment on this rank, with the initial weights of a file or checkpoint. All ranks must call it.

    With `trains`, also check what only training needs. An imagined world leaves out checks of the values of tensors.
    Raises InputError for an invalid option and for options that do not fit each other. All ranks raise the same one.
    """
    make = functools.partial(make_group, choices)
    parallel = make_parallel(config, choices)
    train_data, val_data = data or load_data(config, choices, world)
    axes = make_axes(config, parallel, world.world_size)  # reports an unsuitable world size before the model is built

    torch.manual_seed(config.seed)
    make_model = functools.partial(make, "model", config.model)
    is_deferred = parallel.meta_init and not world.is_imagined  # then no rank materializes the whole model
    module, deferred, warnings = (
        build_deferred(choices["model"], make_model) if is_deferred else (make_model(), None, list[str]())
    )
    precision = Precision(config.precision, world.device)
    objective = make_objective(config, choices, parallel)
    indices = range(min(2, len(train_data))) if normalizes_in_evaluation(module) else [0]
    sample, data_warnings = read_sample(config, choices, train_data, indices)

    def inspect(module: nn.Module) -> Findings:
        batch = MicroBatch(sample, indices)
        with RecordBatchNorm():
            return run_dry(config, choices, module, objective, train_data, batch, parallel, world, trains)

    found, (module, deferred, warnings) = run_built((module, deferred, warnings), inspect)
    draws, prediction = found.draws, found.forward.prediction
    warnings += found.warnings
    if trains:
        found.refuse_writes(choices, parallel, world)
    attach_objective(module, objective, world.device, precision.parameter_dtype)
    module.to(device=None if deferred else world.device)
    if changed := convert(module, precision.parameter_dtype):
        warnings.append(
            f"precision={config.precision}: {counted(changed, 3)} of model={choices['model']} had another dtype, and "
            f"the conversion to {precision.parameter_dtype} changes their values or format"
        )
    memory_format = _memory_format(config.memory_format, module)
    module.to(memory_format=memory_format)
    frozen = freeze(config.freeze, module)
    if trains:
        check_extra_state(choices, module)
        found.state.refuse(choices, module, parallel, axes)
        warnings += found.state.warnings(choices, objective)
    if messages := parallel.check(config, module):
        raise InputError(*messages)
    if trains and draws.recomputes and not parallel.can_recompute:
        raise InputError(
            f"parallel={choices['parallel']}: with its options, the recomputation of torch.utils.checkpoint in "
            f"model={choices['model']} may use other weights and random numbers; try parallel=ddp"
        )
    loss_groups(objective, module)  # checks the patterns
    warnings += [*data_warnings, *place_submodules(module, choices, parallel.spans_devices, world)]
    initial = InitialWeights(config.init_from, init_from, module) if init_from is not None else None
    if initial is not None:
        initial.fill(module)
    axes = make_axes(config, parallel, world.world_size)  # `check` may have adapted the mode to the model

    def on_device(batch: Any) -> Any:
        return map_tensors(lambda tensor: cast_floating(tensor.to(world.device), precision.parameter_dtype), batch)

    if trains and parallel.needs_all_gradients and not world.is_imagined:
        local_size = config.batch_size // (axes.data_ranks * config.micro_batches)
        may_skip = bool(draws.common)
        check_all_used(config, choices, module, objective, train_data, local_size, on_device, world.device, may_skip)
    objective.is_distributed = world.world_size > 1
    # A deferred model is still on the meta device.
    synchronize_as_configured(config, module, axes, device=world.device if deferred else None)
    warnings += describe_batch_norm(config, module, axes) if trains else []
    checkpoint_activations(module, config.activation_checkpointing)
    if draws.follows and (stages := offered(module, "stages")):
        is_known = draws.seed_stages(module, stages())
        if axes.stage > 1 and not is_known:
            draws.follows = False
            other = "a stage begins with a module of another stage"
            why = "it calls torch.utils.checkpoint" if draws.recomputes else other
            warnings.append(
                f"parallel={choices['parallel']}: the random numbers of model={choices['model']} depend on the number "
                f"of ranks, because {why}"
            )
    if config.compile:
        module.compile()

    make_optimizer = OptimizerFactory(
        config.optimizer,
        choices,
        module,
        shards=trains and parallel.shards_matrices,
        splits=trains and parallel.splits_parameters,
        step_key=lambda: draws.key,
    )

    def loader(dataset: Any, batches: dict[str, Any], **options: Any) -> Loader:
        sampler = Sampler(
            len(dataset),
            config.batch_size,
            data_rank=axes.data_rank(world.rank),
            data_ranks=axes.data_ranks,
            **batches,
        )
        return make(
            "loader",
            {**config.loader, **options},
            dataset=dataset,
            sampler=sampler,
            dtype=precision.parameter_dtype,
            device=world.device,
            memory_format=memory_format,
            allow_empty=has_batch_norm(module),
        )

    def materialize(submodules: Iterable[nn.Module]) -> None:
        if deferred is not None:
            deferred.materialize(submodules, world.device)
            if initial is not None:
                initial.fill(module)

    # Samples of different splits draw different random numbers.
    split = SPLITS.index(config.split)
    evaluation_seed = derive_seed(config.seed, split) if split else config.seed
    # Each validation sample is read once. A custom loader may not have sample weights.
    each_once = {"shuffle": False, "drop_last": False} | ({"weights": None} if "weights" in config.loader else {})
    loss = objective.function if isinstance(objective, Supervised) else None
    measure = functools.partial(make_metrics, config, loss, prediction.outputs, prediction.targets)
    metrics = measure()
    if config.train_metrics:
        check_train_metrics(choices, parallel, objective, metrics)
    return Experiment(
        parallel=parallel,
        axes=axes,
        recipe=Recipe(
            module,
            objective,
            make_optimizer,
            precision,
            config.clip_grad_norm,
            world.device,
            on_device(sample),
            materialize=materialize,
            differentiates=found.forward.differentiates,
            written=found.state.parameters,
            draws=draws,
        ),
        make_model=make_model,
        train_loader=loader(
            train_data,
            {
                "seed": config.seed,
                "micro_batches": config.micro_batches * axes.micro_batches,
                "max_steps": DEBUG_BATCHES if config.debug else None,
            },
        ),
        val_loader=loader(val_data, {"seed": evaluation_seed}, **each_once),
        schedule=make("scheduler", config.scheduler),
        logger=make_logger(config),
        callbacks=make_callbacks(config),
        num_parameters=sum(p.numel() for p in module.parameters()),
        parameter_groups=make_optimizer.num_parameters,
        metrics=metrics,
        train_metrics=measure() if config.train_metrics else None,
        monitor=choose_monitor(config, metrics, [*objective.losses, *objective.terms], objective.logged),
        header_lines=[*(initial.describe() if initial is not None else []), *frozen],
        warnings=warnings,
        num_classes=_num_classes(prediction),
    )


def _num_classes(prediction: Prediction) -> int | None:
    """Return the number of classes if whole samples are classified and a confusion matrix is readable; else None."""
    outputs, targets = prediction.outputs, prediction.targets
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return None
    is_class = not targets.is_floating_point() and targets.dim() == 1 and outputs.dim() == 2
    return outputs.size(1) if is_class and 1 < outputs.size(1) <= MAX_CLASSES else None


def _memory_format(name: str, module: nn.Module) -> torch.memory_format:
    convolves = any(isinstance(submodule, nn.Conv2d) for submodule in module.modules())
    if name == "channels_last" and not convolves:
        raise InputError("memory_format=channels_last has no effect on a model without Conv2d; try memory_format=auto")
    return torch.channels_last if convolves and name != "contiguous" else torch.contiguous_format
