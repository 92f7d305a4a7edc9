"""task=train: from the configuration, or from a checkpoint, to a trained model."""

import logging

from rich.console import Console

from runner.build import Experiment
from runner.config import Config
from runner.progress import Progress, available
from runner.report.records import read_trial
from runner.run_dir import CONFIG, RunDirectory
from runner.tasks.restore import restore
from runner.terminal import Bar
from runner.train import Trainer, count_steps
from runner.world import World

log = logging.getLogger(__name__)


class Train:
    """Train, evaluate, keep checkpoints."""

    conducts = False
    section = None
    reads_run = False
    reads_checkpoint = False
    needs_experiment = True
    min_world_size = 1

    def __init__(self) -> None:
        pass

    def run(
        self, config: Config, experiment: Experiment, world: World, directory: RunDirectory, console: Console
    ) -> dict[str, float]:
        for line in describe(config, experiment, world, directory):
            log.info("%s", line)
        for line in experiment.warnings:
            log.warning("%s", line)
        spread = experiment.parallel.prepare(experiment.recipe, world)
        progress = Progress(step=0, epoch=0, step_in_epoch=0, batch_size=config.batch_size)
        if available(directory.checkpoints):
            progress = restore(directory.checkpoints, spread, world)
            log.info("going on after step %d", progress.step)
            directory.result.step, directory.result.epoch = progress.step, progress.epoch
        directory.forget_after(progress.step)
        owes_evaluation = False
        if progress.step > 0 and progress.step_in_epoch == 0 and progress.epoch % config.eval_every == 0:
            last = world.share("evaluated", lambda: str(directory.last_evaluation()))
            owes_evaluation = int(last) < progress.step
        if directory.writes:
            experiment.logger.open(str(directory.path), progress.step, read_trial(directory.path))
            if progress.step == 0:
                text = (directory.path / CONFIG).read_text()
                experiment.logger.text("configuration", "\n".join("    " + line for line in text.splitlines()))
        num_steps = count_steps(config, experiment.train_loader.sampler.steps_per_epoch)
        bar = Bar(console if directory.writes else None, num_steps, progress.step)
        trainer = Trainer(config, experiment, spread, world, directory, bar, progress, owes_evaluation=owes_evaluation)
        if config.profile and directory.writes and progress.step < num_steps:
            from runner.profiling import profiling

            trainer.watching = profiling(directory.path, num_steps - progress.step, world.device)
        finished = False
        try:
            metrics = trainer.train()
            finished = True
        finally:
            if directory.writes:
                experiment.logger.close(finished)
        accuracy = f"val/accuracy {metrics['val/accuracy']:.4f}, " if "val/accuracy" in metrics else ""
        how = f"pruned after step {directory.result.step}" if directory.pruned else "finished"
        log.info("%s: %sval/loss %.4f", how, accuracy, metrics["val/loss"])
        log.info("run directory: %s", directory.path)
        log.info("dashboard: tensorboard --logdir %s", directory.path.parent)
        return metrics


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
    return [
        f"model    {result.model}, {experiment.num_parameters:,} parameters, {config.precision}",
        f"data     {result.data}, {train.sampler.num_samples:,} training and {val.sampler.num_samples:,} validation "
        "samples",
        f"world    {ranks} ({world.place.found}), parallel={result.parallel}, on {device}",
        f"batch    {batch}, {num_steps:,} steps",
    ]
