"""The loop and the evaluation. Neither asks which mode it runs in, nor how many ranks there are."""

import itertools
import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from runner import checkpoint
from runner.build import Experiment
from runner.config import Config
from runner.loader import StepBatch
from runner.losses import batch_loss
from runner.memory import peak_memory_mib
from runner.parallel.protocol import Spread
from runner.predictions import Predictions
from runner.progress import Progress
from runner.run_dir import RunDirectory
from runner.sampler import mix
from runner.signals import StopRequest
from runner.speed import Speedometer
from runner.terminal import Bar
from runner.world import World

log = logging.getLogger(__name__)


class Preempted(Exception):
    """A signal asked the run to stop; it has saved what its last step made."""


@dataclass
class Trainer:
    """One run's training on one rank."""

    config: Config
    experiment: Experiment
    spread: Spread
    world: World
    directory: RunDirectory
    bar: Bar
    progress: Progress
    saved_step: int | None = None  # the last one that this process has taken a checkpoint of
    owes_evaluation: bool = False  # the run that it goes on with stopped between an epoch and its evaluation
    stop: StopRequest = field(default_factory=StopRequest)
    # Entered while it trains; gives what is called after each step.
    watching: AbstractContextManager[Callable[[], None]] = field(default_factory=lambda: nullcontext(lambda: None))

    def train(self) -> dict[str, float]:
        """Train to the end. Returns the last metrics. All ranks must call it.

        Raises Preempted after a signal to any rank, when the state is saved.
        """
        config, loader = self.config, self.experiment.train_loader
        steps_per_epoch = loader.sampler.steps_per_epoch
        num_steps = count_steps(config, steps_per_epoch)
        speed = Speedometer()
        metrics: dict[str, float] = {}

        with self.bar, self.stop, self.watching as after_step:
            if self.owes_evaluation and self.progress.step < num_steps:
                metrics |= self._evaluate(metrics, speed)
                if self._is_pruned(metrics):
                    return metrics
                speed.pause()
            while self.progress.step < num_steps:
                steps = loader.steps(self.progress.epoch, self.progress.step_in_epoch)
                for batch in itertools.islice(steps, num_steps - self.progress.step):
                    stop_if_asked = self._ask_to_stop()
                    metrics |= self.step(batch, num_steps, steps_per_epoch, speed)
                    after_step()
                    stop_if_asked()
                    if config.checkpoint.every_steps and self.progress.step % config.checkpoint.every_steps == 0:
                        self._save()
                        speed.pause()
                if self.progress.step < num_steps:  # else what ends the run follows, also for one resumed at its end
                    if self.progress.epoch % config.eval_every == 0:
                        metrics |= self._evaluate(metrics, speed)
                        if self._is_pruned(metrics):
                            self._save()
                            return metrics
                    if self.progress.epoch % config.checkpoint.every_epochs == 0:
                        self._save()
                    speed.pause()
            metrics |= self._evaluate(metrics, speed)
            self._save()
        self.directory.result.samples_per_second = speed.samples_per_second
        return metrics

    def step(self, batch: StepBatch, num_steps: int, steps_per_epoch: int, speed: Speedometer) -> dict[str, float]:
        """One optimizer step over the whole world. Returns its metrics where they are due, else nothing."""
        step = self.progress.step
        due = (step + 1) % self.config.log_every == 0 or step + 1 == num_steps
        # Dropout draws from a stream of its own for each step and data rank: a resumed run needs no state of it.
        torch.manual_seed(mix(self.config.seed, step, self.experiment.axes.data_rank(self.world.rank) or 0))

        lr_factor = self.experiment.schedule(step, num_steps, steps_per_epoch)
        loss = self.spread.forward_backward(batch)
        grad_norm = self.spread.step(lr_factor, want_norm=due)

        self.progress = _next(self.progress, steps_per_epoch)
        self.directory.result.step, self.directory.result.epoch = self.progress.step, self.progress.epoch
        metrics = {"train/loss": self.world.sum(loss).item()} if due else {}
        speed.tick(batch)
        if due:
            assert grad_norm is not None
            rates = {"train/learning_rate": self.config.optimizer["lr"] * lr_factor, "train/grad_norm": grad_norm}
            self._log(metrics | rates | speed.measured() | {"perf/memory_mib": peak_memory_mib(self.world.device)})
            self.bar.update(
                step + 1, f"loss {metrics['train/loss']:.4f}  {speed.samples_per_second or 0:,.0f} samples/s"
            )
        return metrics

    def _evaluate(self, metrics: dict[str, float], speed: Speedometer) -> dict[str, float]:
        seen = self.experiment.watch_predictions()
        evaluated = evaluate(self.experiment, self.spread, self.world, seen, self._ask_to_stop)
        self._log(evaluated)
        if seen and self.directory.writes:
            self.experiment.logger.predictions(self.progress.step, seen)
        log.info(_epoch_line(self.progress, metrics | evaluated, speed.samples_per_second))
        return evaluated

    def _ask_to_stop(self) -> Callable[[], None]:
        """Start asking whether a signal came to any rank; the result, when called, saves and raises Preempted then.

        All ranks must call both.
        """
        stopping = self.world.any_later(self.stop.received is not None)

        def stop_if_asked() -> None:
            if stopping():
                self._save()
                self.world.agree("saved", [])  # a launcher ends all ranks once the first one has ended
                raise Preempted(self.stop.received or "a signal to another rank")

        return stop_if_asked

    def _is_pruned(self, metrics: dict[str, float]) -> bool:
        """Whether rank 0's judge, where there is one, gives this run up. All ranks must call it."""
        judge = self.directory.judge
        if judge is not None:
            given_up = self.directory.writes and judge(self.progress.step, metrics)
            self.directory.pruned = self.world.any_later(given_up)()
        return self.directory.pruned

    def _log(self, metrics: dict[str, float]) -> None:
        self.directory.log_metrics(self.progress.step, _epoch_of(self.progress), metrics)
        if self.directory.writes:
            self.experiment.logger.scalars(self.progress.step, metrics)

    def _save(self) -> None:
        """Take a checkpoint, once per step. All ranks must call it."""
        if self.saved_step == self.progress.step:  # the end of an epoch may be the end of the run
            return
        self.saved_step = self.progress.step
        state = self.spread.state()
        if self.directory.writes:
            self.experiment.logger.flush()
            checkpoint.save(self.directory.checkpoints, state, self.progress, self.config.checkpoint.keep)
            self.directory.result.weights_sha256 = checkpoint.weights_sha256(state["model"])


def evaluate(
    experiment: Experiment,
    spread: Spread,
    world: World,
    seen: Predictions | None = None,
    ask_to_stop: Callable[[], Callable[[], None]] = lambda: lambda: None,
) -> dict[str, float]:
    """val/loss and, for classes, val/accuracy over the validation data, each sample once. All ranks must call it.

    ask_to_stop: called before each batch; what it returns is called afterwards, and raises to give the evaluation up.
    """
    loader = experiment.val_loader
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)  # of the losses, of the hits, of the samples
    shares = loader.sampler.shares(epoch=0)
    asked: deque[Callable[[], None]] = deque()
    for batch in loader.steps(epoch=0):
        asked.append(ask_to_stop())
        for micro_batch in batch.micro_batches:
            indices = next(shares)  # of the samples in the data
            outputs = spread.predict(micro_batch.inputs)  # (N, num_outputs), N = 0 where this rank's share is empty
            if outputs is None:
                continue
            mean = batch_loss(experiment.recipe.loss, outputs, micro_batch.targets)
            sums[0] += mean.double() * len(outputs)
            if experiment.classifies:
                sums[1] += (outputs.argmax(-1) == micro_batch.targets).sum()
            sums[2] += len(outputs)
            if seen:
                seen.add(outputs, micro_batch.targets, indices)
        if len(asked) == experiment.axes.stage:  # the first stage is so many batches further on than the last one
            asked.popleft()()
    if seen:
        seen.gather(world)
    loss_sum, correct, count = world.sum(sums).tolist()
    metrics = {"val/loss": loss_sum / count}
    return metrics | {"val/accuracy": correct / count} if experiment.classifies else metrics


def count_steps(config: Config, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run."""
    return min(config.epochs * steps_per_epoch, config.max_steps or config.epochs * steps_per_epoch)


def _next(progress: Progress, steps_per_epoch: int) -> Progress:
    in_epoch = progress.step_in_epoch + 1
    epoch = progress.epoch + in_epoch // steps_per_epoch
    return Progress(progress.step + 1, epoch, in_epoch % steps_per_epoch, progress.batch_size)


def _epoch_of(progress: Progress) -> int:
    """The epoch that the last step was in, counted from 1."""
    return progress.epoch + bool(progress.step_in_epoch)


def _epoch_line(progress: Progress, metrics: dict[str, float], rate: float | None) -> str:
    named = {name: metrics[name] for name in ("train/loss", "val/loss", "val/accuracy") if name in metrics}
    words = [f"epoch {_epoch_of(progress):3d}  step {progress.step:6d}"]
    words += [f"{name} {value:.4f}" for name, value in named.items()]
    return "  ".join(words + ([f"{rate:,.0f} samples/s"] if rate else []))
