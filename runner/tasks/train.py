"""task=train: train the model of the configuration, from its initial weights or from a checkpoint."""

import contextlib
import functools
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from runner.checkpoints.layout import TrainState, list_checkpoints
from runner.checkpoints.retention import remove_leftovers
from runner.checkpoints.save_coordination import SaveCoordinator
from runner.config.diagnostics.type_hints import show
from runner.config.schema import DEBUG_BATCHES, Config
from runner.distributed.world import World
from runner.errors import first_line, quantity
from runner.input.loader import Loader
from runner.input.sampler import count_steps
from runner.input.stream import UNKNOWN_LENGTH
from runner.jobs.continuation import read_past_evaluations
from runner.jobs.task import JobTask
from runner.optimization.optimizers import DEFAULT
from runner.paths import CONF
from runner.records.monitor import LOSS, Monitor, main_metrics
from runner.records.run_directory import CHOICE, RunDirectory
from runner.records.run_files import read_mapping
from runner.records.tables import format_number
from runner.training.build import Experiment
from runner.training.callbacks.buffer_check import BufferCheck
from runner.training.callbacks.checkpointing import Checkpointing
from runner.training.callbacks.contract import Callbacks, RunInfo
from runner.training.callbacks.early_stop import EarlyStop, Pruning
from runner.training.callbacks.ema import EMA
from runner.training.callbacks.metric_log import MetricLog
from runner.training.callbacks.nan_guard import NanGuard
from runner.training.callbacks.profiler import Profiler
from runner.training.callbacks.progress_bar import ProgressBar
from runner.training.callbacks.stream_position import StreamPosition
from runner.training.mode import ParallelModel
from runner.training.restore import copy_model, restore
from runner.training.state_copies import restore_copy
from runner.training.throughput import ThroughputMeter
from runner.training.trainer import Trainer

log = logging.getLogger(__name__)


class Train(JobTask):
    """Trains and evaluates the model, and saves checkpoints."""

    trains = True

    def run(
        self, config: Config, experiment: Experiment, world: World, directory: RunDirectory, console: Console
    ) -> dict[str, float]:
        if world.membership is None or world.membership.number == 0:
            _log_header(config, experiment, world, directory)
        parallel_model = experiment.parallel.prepare(experiment.recipe, world)
        meter = ThroughputMeter(elapsed_s=directory.elapsed_s if directory.writes else None)
        metric_log = MetricLog(directory, experiment.logger, meter, _evaluated_names(experiment))
        callbacks = make_all_callbacks(config, experiment, parallel_model, world, directory, console, meter, metric_log)
        state = _first_state(config, experiment, parallel_model, callbacks, world, directory)
        directory.commit(state.step)
        directory.record.step, directory.record.epoch = state.step, state.epoch
        meter.shortest_s = _shortest_seconds(config, experiment, world, directory)
        if directory.writes:
            remove_leftovers(directory.checkpoints)
        directory.drop_metrics_after(state.step, metric_log.num_lines)
        past = read_past_evaluations(directory, experiment.monitor, world)
        is_missing = past.is_evaluation_due(state, config.eval_every, config.eval_every_steps)
        trainer = Trainer(config, experiment, parallel_model, world, state, meter, callbacks, is_missing)
        dtype = experiment.recipe.precision.parameter_dtype
        metrics = trainer.train(
            RunInfo(
                config=config,
                directory=directory.path,
                rank=world.rank,
                world_size=world.world_size,
                first_step=state.step,
                num_steps=trainer.num_steps,
                steps_per_epoch=trainer.steps_per_epoch,
                copy_model=functools.partial(copy_model, experiment.make_model, parallel_model, dtype, world),
                log=metric_log.log,
                monitor=experiment.monitor,
                evaluations=past.values,
                checkpoints=past.checkpoints,
            )
        )
        if trainer.stopped:
            _record_stop(trainer, directory)
        _log_end(experiment.monitor, metrics, directory)
        return metrics


def _evaluated_names(experiment: Experiment) -> list[str]:
    """Return the names of an evaluation's metrics, the monitor first."""
    objective = experiment.recipe.objective
    losses = [LOSS, *(f"val/{name}" for name in (*objective.losses, *objective.value_names))]
    values = [f"val/{value}" for values in experiment.metrics.names.values() for value in values]
    return list(dict.fromkeys([experiment.monitor.name, *losses, *values]))


def _shortest_seconds(config: Config, experiment: Experiment, world: World, directory: RunDirectory) -> float | None:
    """Return the time that the run's GPUs need for a sample at their peak rates, and log the peak.

    Return None, and log the reason, if the model cannot be called on the meta device. Return None for CPUs and unknown
    GPUs, and on ranks that do not write.
    """
    if world.device.type != "cuda" or not directory.writes:
        return None
    # Their import takes 0.08 s, which runs on CPUs do not need.
    from runner.planning.costs import load_device, name_of_gpu
    from runner.planning.utilization import shortest_seconds

    directories = [CONF, *map(Path, directory.record.config_dirs)]
    if (gpu := name_of_gpu(directories)) is None:
        return None
    recipe, flops = experiment.recipe, load_device(gpu, directories).flops
    precision = "bf16" if config.precision == "float8" else config.precision  # some products stay in bf16
    try:
        seconds = shortest_seconds(
            experiment.make_model,
            config.freeze,
            recipe.objective,
            recipe.sample,
            flops,
            precision,
            config.tf32,
        )
    except Exception as error:  # custom code can raise anything
        log.info("mfu      not measured: the model cannot be called on the meta device (%s)", first_line(error))
        return None
    rate = flops.get(precision, flops["fp32"])
    log.info("mfu      relative to the peak of %.4g TFLOP/s of each %s (conf/device)", rate / 1e12, gpu)
    return seconds / (world.world_size * len(world.devices))


def _log_header(config: Config, experiment: Experiment, world: World, directory: RunDirectory) -> None:
    for line in describe(config, experiment, world, directory):
        log.info("%s", line)
    for line in experiment.warnings:
        log.warning("%s", line)
    if world.world_size == 1:
        with contextlib.suppress(ValueError):  # raised by modes that support only one process
            experiment.parallel.axes(2)
            log.warning(
                "parallel=%s has one process, so nothing is parallel; to start more, add launcher=spawn "
                "launcher.nproc_per_node=2, or use torchrun --nproc-per-node 2 -m runner",
                directory.record.parallel,
            )


def _first_state(
    config: Config,
    experiment: Experiment,
    parallel_model: ParallelModel,
    callbacks: Callbacks,
    world: World,
    directory: RunDirectory,
) -> TrainState:
    """Load what the run continues from: a copy in memory, its newest checkpoint or nothing. Return its position."""
    copied = restore_copy(directory.checkpoints, parallel_model, callbacks, world)
    if world.membership is not None and world.membership.number:
        directory.regrouped_because, directory.copied_at = world.membership.reason, world.membership.copied_at
        directory.attempt.reason = world.membership.describe()
        log.warning("%s", directory.attempt.reason)
    if copied is not None:
        return copied
    if list_checkpoints(directory.checkpoints):
        state = restore(directory.checkpoints, parallel_model, callbacks, world, config.init_from.path)
        log.info("resuming after step %d", state.step)
        steps_per_epoch = experiment.train_loader.sampler.steps_per_epoch
        return _in_epochs_of(state, config.batch_size, steps_per_epoch, config.resume_force)
    if config.resume or directory.attempt.number > 1:
        log.info("the run has no checkpoint yet: it restarts at step 0")
    return TrainState(step=0, epoch=0, step_in_epoch=0, batch_size=config.batch_size)


def _record_stop(trainer: Trainer, directory: RunDirectory) -> None:
    """Record that callbacks have stopped the run, and why."""
    reason = trainer.stop_reason
    directory.record.stopped = reason or None
    directory.stops_as = trainer.stops_as
    log.info("stopped after step %d%s", trainer.state.step, f": {reason}" if reason else "")


def _log_end(monitor: Monitor, metrics: Mapping[str, float], directory: RunDirectory) -> None:
    values = [f"{name} {format_number(metrics[name])}" for name in main_metrics([monitor], metrics)]
    if (best := directory.record.best) and best["step"] != directory.record.step:
        values.append(f"best {monitor.name} {format_number(best['value'])} after step {best['step']:.0f}")
    for name, fraction in (("mfu", directory.record.mfu), ("goodput", directory.record.goodput)):
        values += [f"{name} {format_number(fraction)}"] if fraction is not None else []
    end = directory.stops_as or "finished"
    end += f" after step {directory.record.step}" if end != "finished" else ""
    log.info("%s: %s", end, ", ".join(values))
    if directory.mirror is not None:
        log.info("address: %s", directory.mirror.address)
    log.info("run directory: %s", directory.path)
    if any(directory.path.glob("events.out.tfevents.*")):  # TensorBoard's files, also if a custom logger wrote them
        log.info("dashboard: tensorboard --logdir %s", directory.path.parent)


def _in_epochs_of(state: TrainState, batch_size: int, steps_per_epoch: int, resume_force: bool) -> TrainState:
    """Return the state of a resumed run, with its step in the epoch converted to this batch size.

    The run continues at the first step that has unread samples, possibly in the next epoch. Raises ValueError if the
    batch size changes within an epoch, without `resume_force`.
    """
    if state.batch_size != batch_size:
        if state.step_in_epoch and not resume_force:
            raise ValueError(
                f"batch_size={batch_size}: the newest intact checkpoint was saved {state.step_in_epoch} steps "
                f"into an epoch with batch_size={state.batch_size}, and the batch size cannot change within an epoch; "
                "keep it, or add resume_force=true"
            )
        samples_read = state.step_in_epoch * state.batch_size
        state = replace(state, step_in_epoch=samples_read // batch_size, batch_size=batch_size)
    if state.step_in_epoch >= steps_per_epoch:
        state = replace(state, epoch=state.epoch + 1, step_in_epoch=0)
    return state


def make_all_callbacks(
    config: Config,
    experiment: Experiment,
    parallel_model: ParallelModel,
    world: World,
    directory: RunDirectory,
    console: Console,
    meter: ThroughputMeter,
    metric_log: MetricLog,
) -> Callbacks:
    """Return the built-in and the custom callbacks in the order in which they are called; checkpoints come last."""
    callbacks = Callbacks()
    nan_guard = NanGuard(config.on_nonfinite, config.loss_spike, experiment, parallel_model, world)
    callbacks.add("nan_guard", nan_guard)
    if config.ema.decay is not None:
        ema = EMA(parallel_model, experiment.recipe.module, config.ema.decay, config.ema.warmup_steps)
        callbacks.add("ema", ema)
    callbacks.add("buffer_check", BufferCheck(experiment, parallel_model, world))
    callbacks.add("metric log", metric_log)
    callbacks.add("progress_bar", ProgressBar(console if directory.writes else None, meter, experiment.monitor))
    if config.profile and directory.writes:
        callbacks.add("profiler", Profiler(world.device))
    for name, callback in experiment.callbacks.items():
        callbacks.add(name, callback)
    if config.early_stop.patience is not None:
        patience, min_delta = config.early_stop.patience, config.early_stop.min_delta
        callbacks.add("early_stop", EarlyStop(experiment.monitor, patience, min_delta))
    if directory.pruner is not None:
        callbacks.add("pruning", Pruning(directory.pruner, decides=directory.writes))
    if experiment.train_loader.is_stream:
        callbacks.add("stream_position", StreamPosition(experiment.train_loader))
    checkpointing = Checkpointing(
        config.checkpoint,
        parallel_model,
        directory,
        meter,
        callbacks,
        experiment.monitor,
        experiment.logger.flush,
        nan_guard.check_weights,
        SaveCoordinator.of(world, directory.is_shared),
        experiment.base.share(world) if experiment.base is not None else None,
    )
    callbacks.add("checkpointing", checkpointing)
    return callbacks


def describe(config: Config, experiment: Experiment, world: World, directory: RunDirectory) -> list[str]:
    result, train, val = directory.record, experiment.train_loader, experiment.val_loader
    num_steps = count_steps(config.epochs, config.max_steps, train.sampler.steps_per_epoch)
    device = " + ".join(map(str, dict.fromkeys(world.devices))) + (" each" if world.device.type != "cpu" else "")
    ranks = "1 process" if world.world_size == 1 else f"{world.world_size} processes"
    batch = f"{quantity(config.batch_size, 'sample')} per step"
    num_micro_batches = config.micro_batches * experiment.axes.micro_batches
    if experiment.axes.data_ranks > 1 or num_micro_batches > 1:
        ending = "es" if num_micro_batches != 1 else ""
        batch += f" over {quantity(experiment.axes.data_ranks, 'rank')} x {num_micro_batches} micro-batch{ending}"
    num_trained = sum(experiment.parameter_groups.values())
    trained = f"{num_trained:,} of them trained, " if num_trained < experiment.num_parameters else ""
    precision = f"{config.precision}{_describe_tf32(config, world)}"
    groups = [f"{name} {size:,}" for name, size in experiment.parameter_groups.items()]
    warmup = f", warm-up {config.ema.warmup_steps}" if config.ema.warmup_steps else ""
    every = config.replay_every_steps
    average = f"ema      decay {config.ema.decay}{warmup}: evaluations use the weights averaged over the steps"
    return [
        f"model    {result.model}, {experiment.num_parameters:,} parameters, {trained}{precision}",
        *([f"groups   {', '.join(groups)} parameters"] if len(groups) > 1 or not groups[0].startswith(DEFAULT) else []),
        *experiment.header_lines,
        f"data     {result.data}, {_size_of(train)} training and {_size_of(val)} validation "
        f"samples{name_classes(train.dataset)}",
        *(f"data     {line}" for line in dict.fromkeys([*_header_lines(train.dataset), *_header_lines(val.dataset)])),
        *([_describe_stream(train)] if train.is_stream else []),
        f"world    {ranks} ({world.rank_info.source}), parallel={result.parallel}, on {device}",
        *([_describe_choice(directory)] if (directory.path / CHOICE).exists() else []),
        f"batch    {batch}, {quantity(num_steps, 'step')}",
        *([f"replay   every {every} steps, costs about {100 / every:.3g}% of a step's gradients"] if every else []),
        *([average] if config.ema.decay is not None else []),
        *([f"fork     of {config.fork}"] if config.fork else []),
        *(f"changed  {key} {show(was)} -> {show(now)}" for key, (was, now) in directory.attempt.changed.items()),
        *(
            [f"debug    {DEBUG_BATCHES} batches an epoch and an evaluation, no loader workers, anomaly detection"]
            * config.debug
        ),
    ]


def _describe_tf32(config: Config, world: World) -> str:
    """Return which operators use TensorFloat-32, for a log line, if the run computes in fp32 on a GPU."""
    if world.device.type != "cuda" or config.precision != "fp32":
        return ""
    used = {True: "matrices and convolutions in TF32", False: "without TF32"}
    return f" ({used.get(config.tf32, 'convolutions in TF32')})"


def _describe_choice(directory: RunDirectory) -> str:
    choice = read_mapping(directory.path / CHOICE)
    rates = sorted(choice["samples_per_second"].items(), key=lambda item: -item[1])
    return (
        f"auto     measured, in samples/s: {', '.join(f'{mode} {format_number(round(rate))}' for mode, rate in rates)}"
    )


def _size_of(loader: Loader) -> str:
    return f"{loader.sampler.num_samples:,}" if loader.sampler.num_samples < UNKNOWN_LENGTH else "a stream of"


def _describe_stream(loader: Loader) -> str:
    """Return the line about what reading a stream costs."""
    stream, num_ranks, num_workers = loader.dataset.dataset, loader.sampler.data_ranks, loader.num_workers
    is_split = stream.can_split and num_ranks > 1
    loads = stream.is_stateful and not is_split
    resumes = "loads the state of the stream" if loads else "reads again and skips what was used"
    readers = quantity(num_ranks, "rank") + (f" x {quantity(num_workers, 'worker')}" if num_workers else "")
    part = f"1/{num_ranks} of it" if is_split else "all of it"
    hint = "; split(index, count) of the dataset would divide it" if num_ranks > 1 and not is_split else ""
    return (
        f"stream   the samples of a step are the same on any number of ranks and workers; each of {readers} reads "
        f"{part}{hint}; a resumed run {resumes}"
    )


def name_classes(dataset: Any) -> str:
    """Return the class names for a log line, if the dataset has the attribute `classes`, as in torchvision."""
    classes = getattr(dataset, "classes", None)
    if not isinstance(classes, (list, tuple)) or not classes:
        return ""
    named = [f"{number} {name}" for number, name in enumerate(classes[:10])]
    return f"; classes {', '.join(named)}" + (", ..." if len(classes) > 10 else "")


def _header_lines(dataset: Any) -> list[str]:
    """Return the lines about itself that a dataset lists in its attribute `header_lines`, if it has one."""
    lines = getattr(dataset, "header_lines", None)
    return [str(line) for line in lines] if isinstance(lines, (list, tuple)) else []
