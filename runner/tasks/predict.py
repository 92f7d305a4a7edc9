"""task=predict: what a trained model says of each sample of a split, on any number of ranks and in any mode."""

import contextlib
import itertools
import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console

from runner.config.diagnostics.import_target import locate
from runner.config.schema import Config
from runner.distributed.world import World
from runner.errors import JobFailed
from runner.fault_tolerance.checkpoint import restore_evaluated
from runner.runs.run_directory import CHECKPOINTS, RunDirectory
from runner.tasks.prediction_columns import Columns, columns_of
from runner.tasks.prediction_files import SUFFIXES, File
from runner.tasks.train import name_classes
from runner.training.build import Experiment
from runner.training.objective import Objective
from runner.training.sampler import Pieces
from runner.training.strategy import Spread
from runner.training.supervised import Supervised

log = logging.getLogger(__name__)

ROUND = 8  # pieces that a rank computes before rank 0 gets them; ranks of a pipeline overlap in between


class Predict:
    """Writes what the checkpoint config.checkpoint.load of config.run says of config.split."""

    section = "predict"
    reads_run = True
    reads_checkpoint = True
    needs_experiment = True
    trains = False
    picks_split = True
    min_world_size = 1

    def check(self, config: Config, world_size: int) -> list[str]:
        kind, messages = config.predict.format, []
        if kind == "parquet" and find_spec("pyarrow") is None:
            messages.append(
                "predict.format=parquet needs pyarrow, not installed; pip install 'experiment-runner[table]', or try "
                "predict.format=csv"
            )
        if (output := config.predict.output) is not None and Path(output).suffix != SUFFIXES[kind]:
            what = f"a file that ends in {SUFFIXES[kind]}" if SUFFIXES[kind] else "a folder, of an array each"
            messages.append(
                f"predict.output={output} must be {what}, as predict.format={kind} writes; "
                f"try predict.output={Path(output).stem or 'predictions'}{SUFFIXES[kind]}"
            )
        elif output is not None and (Path(output).exists() if kind == "npy" else Path(output).is_dir()):
            found = "folder" if Path(output).is_dir() else "file"
            messages.append(f"predict.output={output} is a {found} that is there already; name one that is not")
        elif output is not None:
            there = next(folder for folder in Path(output).absolute().parents if folder.exists())
            if not there.is_dir():
                messages.append(f"predict.output={output}: {there} is a file and no folder; name another")
        objective = locate(config.objective["_target_"])
        if not issubclass(objective, Supervised) and objective.predict is Objective.predict:
            messages.append(
                f"objective: {objective.__name__} has no predict(model, batch) that returns outputs and targets, so "
                "that there is nothing to write; define it"
            )
        return messages

    def run(
        self, config: Config, experiment: Experiment, world: World, directory: RunDirectory, console: Console
    ) -> dict[str, float]:
        """Raises JobFailed for outputs that the format has no place for; then there is no file."""
        assert config.run is not None
        if config.precision == "fp64" and config.memory_format == "auto":
            # fsdp has weights in this format whatever the model's is, and by another one the last bit is another.
            experiment.recipe.module.to(memory_format=torch.contiguous_format)
            experiment.val_loader.memory_format = torch.contiguous_format
        if config.precision == "fp64" and config.threads is None:
            # Threads share a sum among them, and ranks on one machine share the threads.
            torch.set_num_threads(1)
        spread = experiment.parallel.prepare(experiment.recipe, world)
        folder, own = Path(config.run) / CHECKPOINTS, config.ema.decay is None
        progress = restore_evaluated(folder, spread, world, config.checkpoint.load, own)
        directory.result.step, directory.result.epoch = progress.step, progress.epoch
        named = config.predict.output
        path = Path(named).absolute() if named else directory.path / f"predictions{SUFFIXES[config.predict.format]}"
        num_samples = experiment.val_loader.sampler.num_samples
        file = File(config.predict.format, path, num_samples) if directory.writes else None
        try:
            names = _predict(experiment, spread, world, config.predict.batch_size, file)
            if file is not None:
                with _told():
                    file.keep()
        except BaseException:
            if file is not None:
                file.drop()
            raise
        log.info("%s after step %d, %s split: %d samples", config.run, progress.step, config.split, num_samples)
        log.info("columns  %s%s", ", ".join(names), name_classes(experiment.train_loader.dataset))
        log.info("written  %s", path)
        log.info("run directory: %s", directory.path)
        return {}


def _predict(experiment: Experiment, spread: Spread, world: World, size: int, file: File | None) -> list[str]:
    """Compute, collect and write. Returns the names of the columns, on the rank that writes. All ranks must call it.

    A rank keeps ROUND pieces of `size` samples at most, the one that writes those of all ranks.
    """
    loader, axes = experiment.val_loader, experiment.axes
    num_samples, step_size, own = loader.sampler.num_samples, size * axes.data_ranks, axes.data_rank(world.rank)
    loader.read_by(Pieces(num_samples, step_size, data_rank=own, data_ranks=axes.data_ranks, shuffle=False))
    counts, names = axes.counts(world.rank), list[str]()
    steps = loader.steps(epoch=0)
    for _ in range(0, loader.sampler.steps_per_epoch, ROUND):
        pieces: list[tuple[int, Columns]] = []
        for batch in itertools.islice(steps, ROUND):
            (micro_batch,) = batch.micro_batches
            prediction = spread.predict(micro_batch)  # all ranks must call it equally often
            if prediction is not None and counts and micro_batch.num_samples:
                with _told():
                    columns = columns_of(prediction.outputs, prediction.targets, micro_batch.indices)
                pieces.append((micro_batch.indices[0], columns))
        collected = world.collectives.collect(pieces)
        if file is None or collected is None:
            continue
        for _, columns in sorted(itertools.chain.from_iterable(collected), key=lambda piece: piece[0]):
            with _told():
                file.writer.add(columns)
            names = list(columns)
    return names


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What a format or a table has no place for is told in its one line, without where in the runner that was found."""
    try:
        yield
    except ValueError as error:
        raise JobFailed(str(error)) from None
