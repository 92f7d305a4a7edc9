"""task=evaluate: the metrics of a trained model, on any number of ranks and in any mode."""

import logging
from pathlib import Path

from rich.console import Console

from runner.config.schema import Config
from runner.distributed.world import World
from runner.fault_tolerance.checkpoint import restore_evaluated
from runner.runs.run_directory import CHECKPOINTS, RunDirectory
from runner.training.build import Experiment
from runner.training.evaluation import evaluate

log = logging.getLogger(__name__)


class Evaluate:
    """Evaluate a checkpoint of config.run, the newest or that of config.checkpoint.load, on config.split."""

    section = None
    reads_run = True
    reads_checkpoint = True
    needs_experiment = True
    trains = False
    picks_split = True
    min_world_size = 1

    def check(self, config: Config, world_size: int) -> list[str]:
        return []

    def run(
        self, config: Config, experiment: Experiment, world: World, directory: RunDirectory, console: Console
    ) -> dict[str, float]:
        assert config.run is not None
        spread = experiment.parallel.prepare(experiment.recipe, world)
        folder, own = Path(config.run) / CHECKPOINTS, config.ema.decay is None
        progress = restore_evaluated(folder, spread, world, config.checkpoint.load, own)
        directory.result.step, directory.result.epoch = progress.step, progress.epoch
        found = evaluate(experiment, spread, world, config.eval_batches)
        metrics = {name.replace("val/", f"{config.split}/", 1): value for name, value in found.items()}
        log.info("%s after step %d", config.run, progress.step)
        for name, value in metrics.items():
            log.info("%s %.6g", name, value)
        log.info("run directory: %s", directory.path)
        directory.log_metrics(progress.step, progress.epoch, metrics)
        return metrics
