"""task=measure: how fast a mode steps, what it holds and exchanges, and where its weights are after a few steps."""

import itertools

import torch
from rich.console import Console

from runner.config.schema import Config
from runner.distributed.traffic import KINDS, CommunicationCounter
from runner.distributed.world import World
from runner.fault_tolerance import checkpoint
from runner.fault_tolerance.writers import Writers
from runner.runs.loggers.several import Several
from runner.runs.run_directory import RunDirectory
from runner.runs.train_state import TrainState
from runner.training.build import Experiment
from runner.training.callback import Callbacks
from runner.training.callbacks.recorder import Recorder
from runner.training.throughput import ThroughputMeter, peak_memory_mib
from runner.training.trainer import Trainer
from runner.training.weight_average import average_of

COUNTED_STEPS = 12  # whole rounds of a mode that exchanges every 2, 3, 4, 6 or 12 steps


class Measure:
    """What task=compare runs in each world; `compared_steps` come first, then the ones that are timed.

    Bytes are those of a step, on average over COUNTED_STEPS, on the rank that exchanges the most of the kind.
    """

    section = None
    reads_run = False
    reads_checkpoint = False
    needs_experiment = True
    trains = False
    picks_split = False
    min_world_size = 1

    def __init__(self, compared_steps: int = 5, timed_steps: int = 20):
        for key, value in (("compared_steps", compared_steps), ("timed_steps", timed_steps)):
            if value < 1:
                raise ValueError(f"{key}={value} must be at least 1; try 20")
        self.compared_steps, self.timed_steps = compared_steps, timed_steps

    def check(self, config: Config, world_size: int) -> list[str]:
        return []

    def run(
        self, config: Config, experiment: Experiment, world: World, directory: RunDirectory, console: Console
    ) -> dict[str, float]:
        spread = experiment.parallel.prepare(experiment.recipe, world)
        start = TrainState(step=0, epoch=0, step_in_epoch=0, batch_size=config.batch_size)
        meter = ThroughputMeter(warmup_steps=self.compared_steps + min(3, self.timed_steps - 1))
        callbacks = Callbacks([("recorder", Recorder(directory, Several({}), meter))])
        average = average_of(spread, experiment.recipe.module, config.ema)
        trainer = Trainer(config, experiment, spread, world, start, meter, callbacks, average=average)
        batches = itertools.chain.from_iterable(experiment.train_loader.steps(epoch) for epoch in itertools.count())

        for _ in range(self.compared_steps):
            trainer.step(next(batches))
        checkpoint.save(directory.checkpoints, spread.state(), trainer.state, Writers.of(world))

        meter.pause()
        for _ in range(self.timed_steps):
            trainer.step(next(batches))
        rate, step_time_s = meter.samples_per_second, meter.seconds_per_step
        counter = CommunicationCounter()
        with counter:
            world.agreement.first_error("counting", [])  # or a rank could ask the parameter server before that counts
            for _ in range(COUNTED_STEPS):
                trainer.step(next(batches))
            world.agreement.first_error("counted", [])

        facts = torch.zeros(world.world_size, 1 + len(KINDS), dtype=torch.float64, device=world.device)
        facts[world.rank, 0] = peak_memory_mib(world.device)
        facts[world.rank, 1:] = torch.tensor([counter.bytes[kind] / COUNTED_STEPS for kind in KINDS])
        memory, *exchanged = world.collectives.sum(facts).T.tolist()
        metrics = {f"memory_mib/rank_{rank}": mib for rank, mib in enumerate(memory)}
        metrics |= {f"bytes_per_step/{kind}": max(of) for kind, of in zip(KINDS, exchanged, strict=True) if any(of)}
        metrics["micro_batches"] = float(config.micro_batches * experiment.axes.micro_batches)
        assert rate is not None
        return metrics | {"samples_per_second": rate, "step_time_s": step_time_s}
