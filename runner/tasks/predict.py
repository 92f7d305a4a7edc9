"""task=predict: the outputs of a trained model for each sample of a split, on any number of ranks and in any mode."""

import contextlib
import itertools
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from runner.config.diagnostics.import_target import locate
from runner.config.schema import Config, Predicting
from runner.distributed.sync_batch_norm import normalizes_in_evaluation, use_group
from runner.distributed.world import World
from runner.errors import JobFailed, require_packages
from runner.input.loader import Loader
from runner.input.sampler import BlockSampler
from runner.jobs.task import JobTask
from runner.objectives.objective import Objective
from runner.objectives.supervised import Supervised
from runner.records.run_directory import RunDirectory
from runner.tasks.evaluate import restore_run
from runner.tasks.prediction_files import OUTPUT, SUFFIXES, TARGET, Columns, columns_of, writing
from runner.tasks.train import name_classes
from runner.training.build import Experiment
from runner.training.mode import ParallelModel

log = logging.getLogger(__name__)

ROUND = 8  # pieces that a rank computes before rank 0 collects them; pipeline stages overlap within a round


class Predict(JobTask):
    """Writes the outputs of the checkpoint `config.checkpoint.load` of `config.run` for the split `config.split`."""

    section = "predict"
    reads_run = reads_checkpoint = picks_split = needs_outputs = True

    def check(self, config: Config, world_size: int) -> list[str]:
        kind, messages = config.predict.format, []
        if kind == "parquet":
            require_packages("predict.format=parquet", "table", "pyarrow")
        if (output := config.predict.output) is not None and Path(output).suffix != SUFFIXES[kind]:
            rule = f"end in {SUFFIXES[kind]}" if SUFFIXES[kind] else "have no suffix"
            messages.append(f"predict.output={output} must {rule} with format={kind}")
        elif output is not None and (Path(output).is_dir() or (kind == "npy" and Path(output).exists())):
            messages.append(f"predict.output={output} must not exist yet; choose another path")
        objective = locate(config.objective["_target_"])
        if isinstance(objective, type) and (why := _lacks_predict(objective)):  # not a factory
            messages.append(why)
        return messages

    def run(
        self, config: Config, experiment: Experiment, world: World, directory: RunDirectory, console: Console
    ) -> dict[str, float]:
        """Write the predictions. Raise JobFailed, and leave no file, if the format cannot store them."""
        if why := _lacks_predict(type(experiment.recipe.objective)):
            raise JobFailed(why)
        if config.precision == "fp64" and config.memory_format == "auto":
            # fsdp keeps weights in this format, and the last bit depends on the format.
            experiment.recipe.module.to(memory_format=torch.contiguous_format)
            experiment.val_loader.memory_format = torch.contiguous_format
        if config.precision == "fp64" and config.threads is None:
            # Sums depend on the number of threads, which depends on the number of ranks on the machine.
            torch.set_num_threads(1)
        parallel_model, progress = restore_run(config, experiment, world, directory)
        named = config.predict.output
        path = Path(named).absolute() if named else directory.path / f"predictions{SUFFIXES[config.predict.format]}"
        num_samples = experiment.val_loader.sampler.num_samples
        file = writing(config.predict.format, path, num_samples) if directory.writes else contextlib.nullcontext()
        with file as writer:
            names = _predict(experiment, parallel_model, world, config.predict, writer)
        log.info("%s after step %d, %s split: %d samples", config.run, progress.step, config.split, num_samples)
        log.info("columns  %s%s", ", ".join(names), name_classes(experiment.train_loader.dataset))
        log.info("written  %s", path)
        log.info("run directory: %s", directory.path)
        return {}


def _predict(
    experiment: Experiment, parallel_model: ParallelModel, world: World, options: Predicting, writer: Any
) -> list[str]:
    """Compute, collect and write the predictions, and return the names of the columns. All ranks must call it.

    A rank keeps at most ROUND pieces of `predict.batch_size` samples; rank 0, which has the writer, keeps those of all
    ranks.
    """
    loader, axes = experiment.val_loader, experiment.axes
    if dist.is_initialized() and normalizes_in_evaluation(experiment.recipe.module):
        use_group(experiment.recipe.module, dist.new_subgroups(1)[0])  # each rank normalizes its own pieces
    num_samples, own = loader.sampler.num_samples, axes.data_rank(world.rank)
    step_size, by_sample = options.batch_size * axes.data_ranks, set[str]()
    if options.format == "jsonl":
        by_sample = _find_lists(loader, parallel_model, min(num_samples, 2), reads=own is not None)
    loader.use_sampler(BlockSampler(num_samples, step_size, data_rank=own, data_ranks=axes.data_ranks, shuffle=False))
    counts, names = axes.counts(world.rank), list[str]()
    steps = loader.steps(epoch=0)
    for _ in range(0, loader.sampler.steps_per_epoch, ROUND):
        pieces: list[tuple[int, Columns]] = []
        for batch in itertools.islice(steps, ROUND):
            (micro_batch,) = batch.micro_batches
            prediction = parallel_model.predict(micro_batch)  # all ranks must make the same number of calls
            if prediction is not None and counts and micro_batch.num_samples:
                indices = loader.dataset.dataset_indices(micro_batch.indices)
                columns = columns_of(prediction.outputs, prediction.targets, indices, by_sample)
                pieces.append((micro_batch.indices[0], columns))
        collected = world.collectives.gather_objects(pieces)
        if writer is None or collected is None:
            continue
        for _, columns in sorted(itertools.chain.from_iterable(collected), key=lambda piece: piece[0]):
            writer.add(columns)
            names = list(columns)
    return names


def _find_lists(loader: Loader, parallel_model: ParallelModel, num_samples: int, reads: bool) -> set[str]:
    """Return which of TARGET and OUTPUT are lists with an element per sample. All ranks must call it.

    The length of such a list is the number of samples for one sample and for two. A collated list, or the list of the
    outputs of a model, has the same length for both. reads: this rank reads samples; all of them read the same.
    """
    found = {TARGET, OUTPUT}
    for count in range(1, num_samples + 1):
        loader.use_sampler(BlockSampler(count, count, data_rank=0 if reads else None, shuffle=False))
        ((micro_batch,),) = (batch.micro_batches for batch in loader.steps(epoch=0))
        prediction = parallel_model.predict(micro_batch)
        trees = {} if prediction is None else {TARGET: prediction.targets, OUTPUT: prediction.outputs}
        found &= {name for name, tree in trees.items() if isinstance(tree, list) and len(tree) == count}
    return found


def _lacks_predict(objective: type) -> str | None:
    """Return why an objective of this class has no predictions, or None if it has."""
    if issubclass(objective, Supervised) or getattr(objective, "predict", None) is not Objective.predict:
        return None
    return (
        f"objective: {objective.__name__} has no predict(model, batch) that returns outputs and targets, so there is "
        "nothing to write; define it"
    )
