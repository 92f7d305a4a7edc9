"""The one place where the configuration becomes objects, in order."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.config.debugging import BATCHES
from runner.config.instantiate import check_contract, make_group
from runner.config.schema import SPLITS, Config
from runner.distributed.local_exchange import exchange_here
from runner.distributed.sync_batch_norm import has_batch_norm, synchronize_batch_norm
from runner.distributed.world import World
from runner.errors import InputError
from runner.runs.loggers.protocol import Logger
from runner.runs.loggers.several import Several
from runner.runs.monitor import Monitor
from runner.training.activation_checkpointing import checkpoint_activations
from runner.training.augmentation import Augmented
from runner.training.build_metrics import choose_monitor, make_metrics
from runner.training.build_objective import attach, make_objective
from runner.training.callback import Callback
from runner.training.confusion import MAX_CLASSES, Predictions
from runner.training.datasets import load_data
from runner.training.deferred_init import build_deferred
from runner.training.device_map import place_parts
from runner.training.fit import fit, read_sample
from runner.training.freeze import freeze, moving_batch_norm
from runner.training.initial_weights import InitialWeights
from runner.training.kept_samples import KeptSamples
from runner.training.loader import Loader
from runner.training.metric_sums import MetricSums
from runner.training.objective import Objective, Prediction, check_patterns
from runner.training.optimizers import OptimizerFactory
from runner.training.precision import Precision
from runner.training.pytree import map_tensors
from runner.training.sampler import Sampler, mix
from runner.training.strategy import Axes, Parallel, Recipe, lay_out
from runner.training.supervised import Supervised

Schedule = Callable[[int, int, int], float]


@dataclass(frozen=True)
class Experiment:
    """Everything that one rank trains or evaluates with."""

    parallel: Parallel
    axes: Axes
    recipe: Recipe
    make_model: Callable[[], nn.Module]  # another one, with initial weights
    train_loader: Loader
    val_loader: Loader
    schedule: Schedule
    logger: Logger
    callbacks: dict[str, Callback]  # the user's, by name
    num_parameters: int
    parameter_groups: dict[str, int]  # how many parameters each group of the optimizer trains
    objective: Objective
    metrics: MetricSums
    monitor: Monitor  # what this run is compared with others by
    beginning: list[str]  # lines on where the weights come from, and which are not trained
    warnings: list[str]  # what the user should know before it starts
    num_classes: int | None  # of a classification that has few enough to watch each

    def share_samples(self) -> None:
        """Keep samples in memory that the ranks of this machine see. All ranks must call it, once they have a group."""
        loaded = [loader.dataset for loader in (self.train_loader, self.val_loader)]
        plain = [dataset.dataset if isinstance(dataset, Augmented) else dataset for dataset in loaded]
        for kept in {id(dataset): dataset for dataset in plain if isinstance(dataset, KeptSamples)}.values():
            kept.share(exchange_here())

    def watch_predictions(self) -> Predictions | None:
        """What an evaluation counts for the logger, if it wants that; on all ranks or on none."""
        if self.num_classes is None or not self.logger.wants_predictions:
            return None
        loader = self.val_loader
        return Predictions(loader.dataset, self.num_classes, loader.device, loader.sampler.seed)


def build(config: Config, choices: Mapping[str, str], world: World, init_from: Path | None = None) -> Experiment:
    """Make the experiment of this rank. All ranks must call it.

    init_from: a file with the weights to begin with, see runner.fault_tolerance.initial_weights.
    Raises InputError (the same on all ranks) for whatever a constructor refuses with a ValueError.
    """
    make = functools.partial(make_group, choices)
    parallel = make_parallel(config, choices)
    train_data, val_data = load_data(config, choices, world)
    lay_out(config, parallel, world.world_size)  # what cannot be is told before a large model is built

    torch.manual_seed(config.seed)
    # A mode that shards need not hold the whole model in memory: it makes the weights part by part.
    deferred, unable = None, ""
    if parallel.meta_init:
        module, deferred, unable = build_deferred(lambda: make("model", config.model))
    else:
        module = make("model", config.model)
    precision = Precision(config.precision, world.device)
    if deferred is not None:
        deferred.keep(module)
    objective = make_objective(config, choices, parallel)
    sample, notes = read_sample(config, choices, train_data)
    sample = map_tensors(_as_float32, sample)
    prediction = fit(config, choices, module, objective, sample, ragged=hasattr(train_data, "collate"))
    attach(module, objective, world.device, precision.parameter_dtype)
    module.to(device=None if deferred else world.device, dtype=precision.parameter_dtype)
    memory_format = _memory_format(config.memory_format, module)
    module.to(memory_format=memory_format)
    frozen = freeze(config.freeze, module)
    if messages := parallel.check(config, module):
        raise InputError(*messages)
    check_patterns(objective, module)
    warnings = notes + place_parts(module, choices, parallel.spans_devices, world)
    if unable:
        warnings.append(
            f"model={choices['model']} cannot be built without memory ({unable}), so that every rank builds all of "
            "it at the start; weights that its constructor loads can come from init_from=FILE instead"
        )
    initial = InitialWeights(config.init_from, init_from, module) if init_from is not None else None
    if initial is not None:
        initial.fill(module)
        warnings += initial.warn_of(frozen.names)
    axes = lay_out(config, parallel, world.world_size)  # which check may have fitted to the model
    if _synchronizes(config, module, axes):
        try:
            # A deferred model lies on no device yet.
            synchronize_batch_norm(module, device=world.device if deferred else None)
        except ValueError as error:
            raise InputError(f"sync_batchnorm={config.sync_batchnorm}: {error}") from None
    checkpoint_activations(module, config.activation_checkpointing)
    if config.compile:
        module.compile()

    make_optimizer = OptimizerFactory(config.optimizer, choices, module)

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
            precision=precision,
            device=world.device,
            memory_format=memory_format,
            cuts_empty=has_batch_norm(module),
        )

    def materialize(parts: Iterable[nn.Module]) -> None:
        if deferred is not None:
            deferred.materialize(parts, world.device)
            if initial is not None:
                initial.fill(module)

    loss = objective.function if isinstance(objective, Supervised) else None
    metrics = make_metrics(config, loss, prediction.outputs, prediction.targets)
    num_classes = _num_classes(prediction)
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
            map_tensors(lambda tensor: precision.cast(tensor.to(world.device)), sample),
            materialize=materialize,
        ),
        make_model=functools.partial(make, "model", config.model),
        train_loader=loader(
            train_data,
            {
                "seed": config.seed,
                "micro_batches": config.micro_batches * axes.micro_batches,
                "max_steps": BATCHES if config.debug else None,
            },
        ),
        val_loader=loader(
            val_data, {"seed": _evaluation_seed(config)}, shuffle=False, drop_last=False, **_each_once(config)
        ),
        schedule=make("scheduler", config.scheduler),
        logger=make_logger(config, choices),
        callbacks=make_callbacks(config),
        num_parameters=sum(p.numel() for p in module.parameters()),
        parameter_groups=make_optimizer.num_parameters,
        objective=objective,
        metrics=metrics,
        monitor=choose_monitor(config, metrics, list(objective.losses)),
        beginning=[*(initial.describe() if initial is not None else []), *frozen.describe()],
        warnings=warnings,
        num_classes=num_classes if num_classes is not None and num_classes <= MAX_CLASSES else None,
    )


def _each_once(config: Config) -> dict[str, Any]:
    """A loader of the user's own need not know weights."""
    return {"weights": None} if "weights" in config.loader else {}


def _evaluation_seed(config: Config) -> int:
    """Samples that are made up of random numbers are others in each split."""
    number = SPLITS.index(config.split)
    return mix(config.seed, number) if number else config.seed


def make_parallel(config: Config, choices: Mapping[str, str]) -> Parallel:
    """The mode. Raises InputError for an option that it refuses, and for what is no mode."""
    parallel: Parallel = make_group(choices, "parallel", config.parallel)
    check_contract(parallel, Parallel, "parallel")
    return parallel


def make_logger(config: Config, choices: Mapping[str, str]) -> Logger:
    """Those of the configuration, as one. Raises InputError for what is none, or refuses its options."""
    if "_target_" in config.logger:  # one of the user's own, without a name
        alone: Logger = make_group(choices, "logger", config.logger)
        check_contract(alone, Logger, "logger")
        return Several({choices.get("logger", "logger"): alone})
    made = {}
    for name, node in config.logger.items():
        key = f"logger.{name}"
        made[name] = make_group({key: node["_target_"]}, key, node)
        check_contract(made[name], Logger, key)
    return Several(made)


def make_callbacks(config: Config) -> dict[str, Callback]:
    """Those of the configuration, by name. Raises InputError for what is none, or refuses its options."""
    made = {}
    for name, node in config.callbacks.items():
        key, target = f"callbacks.{name}", node["_target_"]
        made[name] = make_group({key: target}, key, node)
        if not isinstance(made[name], Callback):
            raise InputError(f"{key}._target_={target}: no callback; derive it from runner.training.callback.Callback")
    return made


def _as_float32(tensor: torch.Tensor) -> torch.Tensor:
    """The model that is tried has been built, but not converted yet."""
    return tensor.float() if tensor.is_floating_point() else tensor


def _num_classes(prediction: Prediction) -> int | None:
    """Of a classification of whole samples; None for anything else."""
    outputs, targets = prediction.outputs, prediction.targets
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return None
    if targets.is_floating_point() or targets.dim() != 1 or outputs.dim() != 2:
        return None
    return outputs.size(1)


def _memory_format(name: str, module: nn.Module) -> torch.memory_format:
    convolves = any(isinstance(part, nn.Conv2d) for part in module.modules())
    if name == "channels_last" and not convolves:
        raise InputError("memory_format=channels_last has no effect on a model without Conv2d; try memory_format=auto")
    return torch.channels_last if convolves and name != "contiguous" else torch.contiguous_format


def _synchronizes(config: Config, module: nn.Module, axes: Axes) -> bool:
    if config.sync_batchnorm is True and not has_batch_norm(module):
        raise InputError("sync_batchnorm=true has no effect on a model without BatchNorm; try sync_batchnorm=auto")
    if config.sync_batchnorm is True and not moving_batch_norm(module):
        raise InputError(
            "sync_batchnorm=true has no effect where all BatchNorm layers keep their statistics, as frozen ones do; "
            "try sync_batchnorm=auto"
        )
    return config.sync_batchnorm is not False and axes.data_ranks > 1 and has_batch_norm(module)


def check_compiler(config: Config, device: torch.device) -> list[str]:
    """Why nothing can be compiled for the device, one message."""
    if not config.compile or device.type != "cpu":
        return []
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return ["compile=true needs a C++ compiler for the CPU, and none was found; install g++ or set compile=false"]
    return []
