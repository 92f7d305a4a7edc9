"""task=train: from the configuration, or from a checkpoint, to a trained model."""

import functools
import logging
from dataclasses import replace
from typing import Any

from rich.console import Console

from runner.config.debugging import BATCHES
from runner.config.differences import told
from runner.config.schema import Averaging, Config
from runner.distributed.world import World
from runner.fault_tolerance.checkpoint import restore, sweep
from runner.fault_tolerance.checkpointing import Checkpointing
from runner.fault_tolerance.finite_weights import FiniteWeights
from runner.fault_tolerance.writers import Writers
from runner.runs.monitor import LOSS, shown
from runner.runs.run_directory import RunDirectory
from runner.runs.train_state import ORDER, TrainState, available
from runner.tasks.past import Past, read_past
from runner.training.build import Experiment
from runner.training.callback import Callbacks, RunInfo
from runner.training.callbacks.anomalies import AnomalyDetection
from runner.training.callbacks.early_stop import EarlyStop
from runner.training.callbacks.profiler import Profiler
from runner.training.callbacks.progress_bar import ProgressBar
from runner.training.callbacks.pruning import Pruning
from runner.training.callbacks.recorder import Recorder
from runner.training.model_copy import copy_model
from runner.training.optimizers import DEFAULT
from runner.training.strategy import Spread
from runner.training.throughput import ThroughputMeter
from runner.training.trainer import Trainer, count_steps
from runner.training.weight_average import WeightAverage, average_of

log = logging.getLogger(__name__)


class Train:
    """Train, evaluate, keep checkpoints."""

    section = None
    reads_run = False
    reads_checkpoint = False
    needs_experiment = True
    trains = True
    picks_split = False
    min_world_size = 1

    def check(self, config: Config, world_size: int) -> list[str]:
        return []

    def run(
        self,
        config: Config,
        experiment: Experiment,
        world: World,
        directory: RunDirectory,
        console: Console,
        order: int = ORDER,
    ) -> dict[str, float]:
        """order: of the samples, for a run that begins; one that goes on keeps to its own."""
        for line in describe(config, experiment, world, directory):
            log.info("%s", line)
        for line in (*experiment.warnings, *_alone(experiment, world, directory)):
            log.warning("%s", line)
        spread = experiment.parallel.prepare(experiment.recipe, world)
        average = average_of(spread, experiment.recipe.module, config.ema)
        state = TrainState(step=0, epoch=0, step_in_epoch=0, batch_size=config.batch_size, order=order)
        if available(directory.checkpoints):
            state = restore(directory.checkpoints, spread, world, average=average)
            log.info("resuming after step %d", state.step)
            if state.batch_size != config.batch_size:
                state = _cut_anew(state, config)
        elif config.resume or directory.attempt.number > 1:
            log.info("the run has no checkpoint yet: it begins again at step 0")
        _keep_to(state.order, experiment)
        directory.result.order = state.order
        directory.commit(state.step)
        directory.result.step, directory.result.epoch = state.step, state.epoch
        if directory.writes:
            sweep(directory.checkpoints)
        directory.forget_after(state.step)
        meter = ThroughputMeter()
        recorder = Recorder(directory, experiment.logger, meter, metric_names(experiment))
        past = read_past(directory, experiment.monitor, world)
        callbacks = observers(config, experiment, spread, world, directory, console, meter, recorder, past, average)
        trainer = Trainer(
            config,
            experiment,
            spread,
            world,
            state,
            meter,
            callbacks,
            past.owes_evaluation(config, state),
            average,
        )
        metrics = trainer.train(
            RunInfo(
                config=config,
                directory=directory.path,
                rank=world.rank,
                world_size=world.world_size,
                first_step=state.step,
                num_steps=trainer.num_steps,
                steps_per_epoch=trainer.steps_per_epoch,
                copy_model=functools.partial(
                    copy_model, experiment.make_model, spread, experiment.recipe.precision.parameter_dtype, world
                ),
                log=recorder.log,
                monitor=experiment.monitor,
            )
        )
        ended = "finished"
        if trainer.stopped:
            ended, reason = callbacks.told_to_stop()
            directory.result.stopped = reason or None
            log.info("stopped after step %d%s", trainer.state.step, f": {reason}" if reason else "")
        directory.pruned = ended == "pruned"
        measured = [f"{name} {metrics[name]:.4f}" for name in shown([experiment.monitor], metrics)]
        how = f"pruned after step {directory.result.step}" if directory.pruned else "finished"
        log.info("%s: %s", how, ", ".join(measured))
        log.info("run directory: %s", directory.path)
        if any(directory.path.glob("events.out.tfevents.*")):  # whatever the logger is, TensorBoard shows it
            log.info("dashboard: tensorboard --logdir %s", directory.path.parent)
        return metrics


def _cut_anew(state: TrainState, config: Config) -> TrainState:
    """With another batch size: in the middle of an epoch, the first step whose samples are not all read already."""
    if state.step_in_epoch and not config.resume_force:
        raise ValueError(
            f"batch_size={config.batch_size}: the sound checkpoint was taken {state.step_in_epoch} steps into an epoch "
            f"with batch_size={state.batch_size}, which cannot change there; keep that, or add resume_force=true"
        )
    read = state.step_in_epoch * state.batch_size
    return replace(state, step_in_epoch=read // config.batch_size, batch_size=config.batch_size)


def _keep_to(order: int, experiment: Experiment) -> None:
    """Read the training samples in the order that the run was begun with."""
    loader = experiment.train_loader
    if order != loader.sampler.order:
        loader.read_by(replace(loader.sampler, order=order))
        log.info("the samples are in the order of the older version that the run was begun with")


def observers(
    config: Config,
    experiment: Experiment,
    spread: Spread,
    world: World,
    directory: RunDirectory,
    console: Console,
    meter: ThroughputMeter,
    recorder: Recorder,
    past: Past,
    average: WeightAverage | None,
) -> Callbacks:
    """The callbacks of a training run, the user's between those that show and those that save."""
    callbacks = Callbacks()
    callbacks.add("recorder", recorder)
    callbacks.add("progress_bar", ProgressBar(console if directory.writes else None, meter, experiment.monitor))
    if config.profile and directory.writes:
        callbacks.add("profiler", Profiler(world.device))
    if config.debug:
        callbacks.add("anomalies", AnomalyDetection())
    for name, callback in experiment.callbacks.items():
        callbacks.add(name, callback)
    if config.early_stop.patience is not None:
        patience, min_delta = config.early_stop.patience, config.early_stop.min_delta
        stop = EarlyStop(experiment.monitor, patience, min_delta, past.values)
        callbacks.add("early_stop", stop)
    if directory.pruner is not None:
        callbacks.add("pruning", Pruning(directory.pruner, asks=directory.writes))
    callbacks.add(
        "checkpointing",
        Checkpointing(
            config.checkpoint,
            spread,
            directory,
            meter,
            callbacks,
            experiment.monitor,
            past.kept,
            experiment.logger.flush,
            FiniteWeights(spread, world, config.on_nonfinite),
            Writers.of(world),
            average,
        ),
    )
    return callbacks


def metric_names(experiment: Experiment) -> list[str]:
    """What an evaluation gives, the monitor first."""
    losses = [LOSS, *(f"val/{name}" for name in experiment.objective.losses)]
    numbers = [f"val/{number}" for numbers in experiment.metrics.names.values() for number in numbers]
    return list(dict.fromkeys([experiment.monitor.name, *losses, *numbers]))


def describe(config: Config, experiment: Experiment, world: World, directory: RunDirectory) -> list[str]:
    """What is about to happen, a line each."""
    result, train, val = directory.result, experiment.train_loader, experiment.val_loader
    num_steps = count_steps(config, train.sampler.steps_per_epoch)
    device = " + ".join(map(str, dict.fromkeys(world.devices))) + (" each" if world.device.type != "cpu" else "")
    ranks = "1 process" if world.world_size == 1 else f"{world.world_size} processes"
    batch = f"{config.batch_size} samples per step"
    num_micro_batches = config.micro_batches * experiment.axes.micro_batches
    if experiment.axes.data_ranks > 1 or num_micro_batches > 1:
        batch += f" over {experiment.axes.data_ranks} ranks x {num_micro_batches} micro-batches"
    num_trained = sum(experiment.parameter_groups.values())
    trained = f"{num_trained:,} of them trained, " if num_trained < experiment.num_parameters else ""
    groups = [f"{name} {size:,}" for name, size in experiment.parameter_groups.items()]
    return [
        f"model    {result.model}, {experiment.num_parameters:,} parameters, {trained}{config.precision}",
        *([f"groups   {', '.join(groups)} parameters"] if len(groups) > 1 or not groups[0].startswith(DEFAULT) else []),
        *experiment.beginning,
        f"data     {result.data}, {train.sampler.num_samples:,} training and {val.sampler.num_samples:,} validation "
        f"samples{name_classes(train.dataset)}",
        f"world    {ranks} ({world.rank_info.found}), parallel={result.parallel}, on {device}",
        f"batch    {batch}, {num_steps:,} steps",
        *([_describe_average(config.ema)] if config.ema.decay is not None else []),
        *(told(key, *values) for key, values in directory.attempt.changed.items()),
        *(
            [f"debug    {BATCHES} batches an epoch and an evaluation, no loader workers, anomaly detection"]
            * config.debug
        ),
    ]


def _describe_average(ema: Averaging) -> str:
    warmup = f", warm-up {ema.warmup_steps}" if ema.warmup_steps else ""
    return f"ema      decay {ema.decay:g}{warmup}: evaluations are of the weights averaged over the steps"


def name_classes(dataset: Any) -> str:
    """Which label is which class, where the data set has numbered them itself, as torchvision's do."""
    classes = getattr(dataset, "classes", None)
    if not isinstance(classes, (list, tuple)) or not classes:
        return ""
    return (
        "; classes "
        + ", ".join(f"{number} {name}" for number, name in enumerate(classes[:10]))
        + (", ..." if len(classes) > 10 else "")
    )


def _alone(experiment: Experiment, world: World, directory: RunDirectory) -> list[str]:
    """That a mode which spreads over ranks has one; a line."""
    if world.world_size > 1:
        return []
    try:
        experiment.parallel.axes(2)
    except ValueError:
        return []  # it is for one process
    return [
        f"parallel={directory.result.parallel} has one process, and spreads nothing; to start more, type "
        "launcher=spawn launcher.nproc_per_node=2, or torchrun --nproc-per-node 2 -m runner"
    ]
