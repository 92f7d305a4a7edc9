"""task=measure: how fast a mode steps, what it holds and exchanges, and where its weights are after a few steps."""

import itertools

import torch
from rich.console import Console

from runner import checkpoint
from runner.build import Experiment
from runner.communication import KINDS, CommunicationCounter
from runner.config import Config
from runner.memory import peak_memory_mib
from runner.progress import Progress
from runner.run_dir import RunDirectory
from runner.speed import Speedometer
from runner.terminal import Bar
from runner.train import Trainer, count_steps
from runner.world import World

COUNTED_STEPS = 12  # whole rounds of a mode that exchanges every 2, 3, 4, 6 or 12 steps


class Measure:
    """What task=compare runs in each world; `compared_steps` come first, then the ones that are timed.

    Bytes are those of a step, on average over COUNTED_STEPS, on the rank that exchanges the most of the kind.
    """

    conducts = False
    section = None
    reads_run = False
    reads_checkpoint = False
    needs_experiment = True
    min_world_size = 1

    def __init__(self, compared_steps: int = 5, timed_steps: int = 20):
        for key, value in (("compared_steps", compared_steps), ("timed_steps", timed_steps)):
            if value < 1:
                raise ValueError(f"{key}={value} must be at least 1; try 20")
        self.compared_steps, self.timed_steps = compared_steps, timed_steps

    def run(
        self, config: Config, experiment: Experiment, world: World, directory: RunDirectory, console: Console
    ) -> dict[str, float]:
        spread = experiment.parallel.prepare(experiment.recipe, world)
        start = Progress(step=0, epoch=0, step_in_epoch=0, batch_size=config.batch_size)
        trainer = Trainer(config, experiment, spread, world, directory, Bar(None, 0, 0), start)
        steps_per_epoch = experiment.train_loader.sampler.steps_per_epoch
        num_steps = count_steps(config, steps_per_epoch)
        batches = itertools.chain.from_iterable(experiment.train_loader.steps(epoch) for epoch in itertools.count())

        def step(speed: Speedometer) -> None:
            trainer.step(next(batches), num_steps, steps_per_epoch, speed)

        for _ in range(self.compared_steps):
            step(Speedometer())
        state = spread.state()
        if directory.writes:
            checkpoint.save(directory.checkpoints, state, trainer.progress, keep=1)
        del state

        speed = Speedometer(warmup_steps=min(3, self.timed_steps - 1))
        for _ in range(self.timed_steps):
            step(speed)
        counter = CommunicationCounter()
        with counter:
            world.agree("counting", [])  # or a rank could ask the parameter server before that counts
            for _ in range(COUNTED_STEPS):
                step(Speedometer())
            world.agree("counted", [])

        facts = torch.zeros(world.world_size, 1 + len(KINDS), dtype=torch.float64, device=world.device)
        facts[world.rank, 0] = peak_memory_mib(world.device)
        facts[world.rank, 1:] = torch.tensor([counter.bytes[kind] / COUNTED_STEPS for kind in KINDS])
        memory, *exchanged = world.sum(facts).T.tolist()
        metrics = {f"memory_mib/rank_{rank}": mib for rank, mib in enumerate(memory)}
        metrics |= {f"bytes_per_step/{kind}": max(of) for kind, of in zip(KINDS, exchanged, strict=True) if any(of)}
        metrics["micro_batches"] = float(config.micro_batches * experiment.axes.micro_batches)
        rate = speed.samples_per_second
        assert rate is not None
        return metrics | {"samples_per_second": rate, "step_time_s": speed.seconds_per_step}
