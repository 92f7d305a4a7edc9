"""The one place where the configuration becomes objects, in order."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from runner.config.instantiate import check_contract, make_group
from runner.config.schema import Config
from runner.distributed.sync_batch_norm import has_batch_norm, synchronize_batch_norm
from runner.distributed.world import World
from runner.errors import InputError
from runner.runs.loggers.protocol import Logger
from runner.training.callback import Callback
from runner.training.confusion import MAX_CLASSES, Predictions
from runner.training.datasets import load_data
from runner.training.deferred_init import Deferred, probe
from runner.training.device_map import place_parts
from runner.training.loader import Loader
from runner.training.losses import Auto, are_log_probabilities
from runner.training.optimizers import OptimizerFactory
from runner.training.precision import Precision
from runner.training.sampler import Sampler
from runner.training.strategy import Axes, Parallel, Recipe, lay_out

Schedule = Callable[[int, int, int], float]


@dataclass(frozen=True)
class Experiment:
    """Everything that one rank trains or evaluates with."""

    parallel: Parallel
    axes: Axes
    recipe: Recipe
    train_loader: Loader
    val_loader: Loader
    schedule: Schedule
    logger: Logger
    callbacks: dict[str, Callback]  # the user's, by name
    num_parameters: int
    parameter_groups: dict[str, int]  # how many parameters each group of the optimizer trains
    classifies: bool  # the targets are classes, so that accuracy means something
    warnings: list[str]  # what the user should know before it starts
    num_classes: int | None  # of a classification that has few enough to watch each

    def watch_predictions(self) -> Predictions | None:
        """What an evaluation counts for the logger, if it wants that; on all ranks or on none."""
        if self.num_classes is None or not self.logger.wants_predictions:
            return None
        return Predictions(self.val_loader.dataset, self.num_classes, self.val_loader.device)


def build(config: Config, choices: Mapping[str, str], world: World) -> Experiment:
    """Make the experiment of this rank. All ranks must call it.

    Raises InputError (the same on all ranks) for whatever a constructor refuses with a ValueError.
    """
    make = functools.partial(make_group, choices)
    parallel = make_parallel(config, choices)
    train_data, val_data = load_data(config, choices, world)
    lay_out(config, parallel, world.world_size)  # what cannot be is told before a large model is built

    torch.manual_seed(config.seed)
    # A mode that shards need not hold the whole model in memory: it makes the weights part by part.
    deferred = Deferred() if parallel.meta_init else None
    with deferred or contextlib.nullcontext():
        module: nn.Module = make("model", config.model)
    loss = make("loss", config.loss)
    loss = _fit(config, module, loss, train_data)
    precision = Precision(config.precision, world.device)
    if deferred is not None:
        deferred.keep(module)
    module.to(device=None if deferred else world.device, dtype=precision.parameter_dtype)
    memory_format = _memory_format(config.memory_format, module)
    module.to(memory_format=memory_format)
    if messages := parallel.check(config, module):
        raise InputError(*messages)
    warnings = place_parts(module, choices, parallel.spans_devices, world)
    axes = lay_out(config, parallel, world.world_size)  # which check may have fitted to the model
    if _synchronizes(config, module, axes):
        try:
            # A deferred model lies on no device yet.
            synchronize_batch_norm(module, device=world.device if deferred else None)
        except ValueError as error:
            raise InputError(f"sync_batchnorm={config.sync_batchnorm}: {error}") from None
    if config.compile:
        module.compile()

    make_optimizer = OptimizerFactory(config.optimizer, choices, module)

    def loader(dataset: Any, batches: dict[str, Any], **options: Any) -> Loader:
        sampler = Sampler(
            len(dataset),
            config.batch_size,
            data_rank=axes.data_rank(world.rank),
            data_ranks=axes.data_ranks,
            seed=config.seed,
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
        )

    target, num_classes = torch.as_tensor(train_data[0][1]), config.data["num_outputs"]
    classifies = not target.is_floating_point()
    one_class_each = classifies and target.dim() == 0
    sample = precision.cast(train_data[0][0][None].to(world.device))
    return Experiment(
        parallel=parallel,
        axes=axes,
        recipe=Recipe(
            module,
            make_optimizer,
            loss,
            precision,
            config.clip_grad_norm,
            world.device,
            sample,
            materialize=functools.partial(deferred.materialize, device=world.device)
            if deferred
            else lambda parts: None,
        ),
        train_loader=loader(train_data, {"micro_batches": config.micro_batches * axes.micro_batches}),
        val_loader=loader(val_data, {}, shuffle=False, drop_last=False),
        schedule=make("scheduler", config.scheduler),
        logger=make_logger(config, choices),
        callbacks=make_callbacks(config),
        num_parameters=sum(p.numel() for p in module.parameters()),
        parameter_groups=make_optimizer.num_parameters,
        classifies=classifies,
        warnings=warnings,
        num_classes=num_classes if one_class_each and num_classes <= MAX_CLASSES else None,
    )


def make_parallel(config: Config, choices: Mapping[str, str]) -> Parallel:
    """The mode. Raises InputError for an option that it refuses, and for what is no mode."""
    parallel: Parallel = make_group(choices, "parallel", config.parallel)
    check_contract(parallel, Parallel, "parallel")
    return parallel


def make_logger(config: Config, choices: Mapping[str, str]) -> Logger:
    """Raises InputError for an option that it refuses, and for what is no logger."""
    logger: Logger = make_group(choices, "logger", config.logger)
    check_contract(logger, Logger, "logger")
    return logger


def make_callbacks(config: Config) -> dict[str, Callback]:
    """Those of the configuration, by name. Raises InputError for what is none, or refuses its options."""
    made = {}
    for name, node in config.callbacks.items():
        key, target = f"callbacks.{name}", node["_target_"]
        made[name] = make_group({key: target}, key, node)
        if not isinstance(made[name], Callback):
            raise InputError(f"{key}._target_={target}: no callback; derive it from runner.training.callback.Callback")
    return made


def _fit(config: Config, module: nn.Module, loss: Any, train_data: Any) -> nn.Module:
    """Try model and loss on one sample, before anything is written. Returns the loss; Auto is replaced by one.

    Raises InputError when they do not take each other.
    """
    sample, target = train_data[0]
    inputs, targets = sample[None], torch.as_tensor(target)[None]
    shape = tuple(config.data["sample_shape"])
    if tuple(sample.shape) != shape:
        raise InputError(f"data.sample_shape={list(shape)} but the data's samples have {list(sample.shape)}")
    random_state = torch.get_rng_state()
    module.eval()
    try:
        with torch.no_grad():
            outputs = probe(module, inputs)
            if isinstance(loss, Auto):
                loss = loss.choose(targets, outputs)
            if isinstance(loss, nn.NLLLoss) and not are_log_probabilities(outputs):
                raise InputError("loss=nll needs a model that ends in log_softmax; try loss=cross_entropy")
            if isinstance(loss, nn.MSELoss) and outputs.shape != targets.shape:
                raise InputError(
                    f"loss=mse compares numbers of one shape, but the model gives {list(outputs.shape[1:])} and the "
                    f"data {list(targets.shape[1:])}; try loss=auto"
                )
            value = loss(outputs, targets)
    except (RuntimeError, TypeError, IndexError) as error:
        raise InputError(
            f"model, data and loss do not fit: for a sample of shape {list(shape)} they fail with: "
            f"{str(error).splitlines()[0]}"
        ) from None
    finally:
        module.train()
        torch.set_rng_state(random_state)
    if value.dim() != 0:
        raise InputError(f"loss must give one number per batch, not {list(value.shape)}; set its reduction to mean")
    return loss


def _memory_format(name: str, module: nn.Module) -> torch.memory_format:
    convolves = any(isinstance(part, nn.Conv2d) for part in module.modules())
    if name == "channels_last" and not convolves:
        raise InputError("memory_format=channels_last has no effect on a model without Conv2d; try memory_format=auto")
    return torch.channels_last if convolves and name != "contiguous" else torch.contiguous_format


def _synchronizes(config: Config, module: nn.Module, axes: Axes) -> bool:
    if config.sync_batchnorm is True and not has_batch_norm(module):
        raise InputError("sync_batchnorm=true has no effect on a model without BatchNorm; try sync_batchnorm=auto")
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
