"""task=evaluate: the metrics of a trained model, on any number of ranks and in any mode."""

import logging
from pathlib import Path

from rich.console import Console

from runner.checkpoints.layout import TrainState
from runner.config.schema import Config
from runner.distributed.world import World
from runner.jobs.task import JobTask
from runner.records.run_directory import CHECKPOINTS, RunDirectory
from runner.training.build import Experiment
from runner.training.evaluation import evaluate
from runner.training.mode import ParallelModel
from runner.training.restore import restore_evaluated

log = logging.getLogger(__name__)


class Evaluate(JobTask):
    """Evaluates the checkpoint `config.checkpoint.load` of `config.run` on the split `config.split`."""

    reads_run = reads_checkpoint = picks_split = True

    def run(
        self, config: Config, experiment: Experiment, world: World, directory: RunDirectory, console: Console
    ) -> dict[str, float]:
        parallel_model, progress = restore_run(config, experiment, world, directory)
        found = evaluate(experiment, parallel_model, world, config.eval_batches)
        metrics = {name.replace("val/", f"{config.split}/", 1): value for name, value in found.items()}
        log.info("%s after step %d", config.run, progress.step)
        for name, value in metrics.items():
            log.info("%s %.6g", name, value)
        log.info("run directory: %s", directory.path)
        directory.log_metrics(progress.step, progress.epoch, metrics)
        return metrics


def restore_run(
    config: Config, experiment: Experiment, world: World, directory: RunDirectory
) -> tuple[ParallelModel, TrainState]:
    """Return the model with the weights that `config.run` evaluated, and their position. All ranks must call it."""
    assert config.run is not None
    parallel_model = experiment.parallel.prepare(experiment.recipe, world)
    checkpoints, unaveraged = Path(config.run) / CHECKPOINTS, config.ema.decay is None
    name, base = config.checkpoint.load, config.init_from.path
    progress = restore_evaluated(checkpoints, parallel_model, world, name, unaveraged, base)
    directory.record.step, directory.record.epoch = progress.step, progress.epoch
    return parallel_model, progress
