"""task=measure: the speed, memory and communication of a mode, and its weights after a few steps."""

import itertools

import torch
from rich.console import Console

from runner.checkpoints.layout import TrainState
from runner.checkpoints.save import save
from runner.checkpoints.save_coordination import SaveCoordinator
from runner.config.schema import Config
from runner.distributed.traffic import KINDS, CommunicationCounter
from runner.distributed.world import World
from runner.jobs.task import JobTask
from runner.records.loggers.composite import CompositeLogger
from runner.records.run_directory import RunDirectory
from runner.training.build import Experiment
from runner.training.callbacks.contract import Callbacks
from runner.training.callbacks.ema import EMA
from runner.training.callbacks.metric_log import MetricLog
from runner.training.callbacks.nan_guard import NanGuard
from runner.training.throughput import ThroughputMeter, peak_memory_mib
from runner.training.trainer import Trainer

COUNTED_STEPS = 12  # complete cycles of a mode that communicates every 2, 3, 4, 6 or 12 steps


class Measure(JobTask):
    """The task that task=compare runs for each mode and world size: saves weights after some steps, then times steps.

    Bytes are the average per step over COUNTED_STEPS steps, on the rank that exchanges the most bytes of a kind.
    """

    def __init__(self, compared_steps: int = 5, timed_steps: int = 20):
        for key, value, least in (("compared_steps", compared_steps, 0), ("timed_steps", timed_steps, 1)):
            if value < least:
                raise ValueError(f"{key}={value} must be at least {least}; try 20")
        self.compared_steps, self.timed_steps = compared_steps, timed_steps

    def run(
        self, config: Config, experiment: Experiment, world: World, directory: RunDirectory, console: Console
    ) -> dict[str, float]:
        parallel_model = experiment.parallel.prepare(experiment.recipe, world)
        start = TrainState(step=0, epoch=0, step_in_epoch=0, batch_size=config.batch_size)
        meter = ThroughputMeter(warmup_steps=self.compared_steps + min(3, self.timed_steps - 1))
        nan_guard = NanGuard(config.on_nonfinite, config.loss_spike, experiment, parallel_model, world)
        callbacks = Callbacks([("nan_guard", nan_guard)])
        if config.ema.decay is not None:
            ema = EMA(parallel_model, experiment.recipe.module, config.ema.decay, config.ema.warmup_steps)
            callbacks.add("ema", ema)
        callbacks.add("metric log", MetricLog(directory, CompositeLogger({}), meter))
        trainer = Trainer(config, experiment, parallel_model, world, start, meter, callbacks)
        batches = itertools.chain.from_iterable(experiment.train_loader.steps(epoch) for epoch in itertools.count())

        for _ in range(self.compared_steps):
            trainer.step(next(batches))
        world.readings.flush()
        if self.compared_steps:
            coordinator = SaveCoordinator.of(world, directory.is_shared)
            save(directory.checkpoints, parallel_model.state(), trainer.state, coordinator)

        meter.pause()
        for _ in range(self.timed_steps):
            trainer.step(next(batches))
        world.readings.flush()
        rate, step_time_s = meter.samples_per_second, meter.seconds_per_step
        counter = CommunicationCounter()
        with counter:
            # No rank may call the parameter server before the server has started counting.
            world.consensus.first_error("counting", [])
            for _ in range(COUNTED_STEPS if self.compared_steps else 0):
                trainer.step(next(batches))
            world.consensus.first_error("counted", [])

        facts = torch.zeros(world.world_size, 1 + len(KINDS), dtype=torch.float64, device=world.device)
        facts[world.rank, 0] = peak_memory_mib(world.device)
        facts[world.rank, 1:] = facts.new_tensor([counter.bytes[kind] / COUNTED_STEPS for kind in KINDS])
        memory, *exchanged = world.collectives.sum(facts).T.tolist()
        metrics = {f"memory_mib/rank_{rank}": mib for rank, mib in enumerate(memory)}
        metrics |= {f"bytes_per_step/{kind}": max(of) for kind, of in zip(KINDS, exchanged, strict=True) if any(of)}
        metrics["micro_batches"] = float(config.micro_batches * experiment.axes.micro_batches)
        assert rate is not None
        return metrics | {"samples_per_second": rate, "step_time_s": step_time_s}
