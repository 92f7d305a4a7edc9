"""The loop: step, evaluate, vote to stop. It does not ask which mode it runs in, nor how many ranks there are."""

import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch

from runner.config.schema import Config
from runner.distributed.signals import StopRequest
from runner.distributed.world import World
from runner.errors import Preempted
from runner.runs.train_state import TrainState
from runner.training.batch import StepBatch
from runner.training.build import Experiment
from runner.training.callback import Callbacks, Moment, Outcome, RunInfo
from runner.training.drawing import seed_step
from runner.training.evaluation import evaluate, with_total
from runner.training.non_finite import Guard
from runner.training.sampler import mix
from runner.training.straggler import Straggler
from runner.training.strategy import Spread
from runner.training.throughput import ThroughputMeter, peak_memory_mib
from runner.training.weight_average import WeightAverage


@dataclass
class Trainer:
    """One run's training on one rank."""

    config: Config
    experiment: Experiment
    spread: Spread
    world: World
    state: TrainState
    meter: ThroughputMeter
    callbacks: Callbacks = field(default_factory=Callbacks)
    owes_evaluation: bool = False  # the run that is resumed stopped between an epoch and its evaluation
    average: WeightAverage | None = None  # evaluated in the place of the weights
    stopped: bool = False  # by a callback, before the last step
    stop: StopRequest = field(default_factory=StopRequest)
    guard: Guard = field(init=False)
    straggler: Straggler = field(init=False)

    def __post_init__(self) -> None:
        self.guard = Guard(self.config, self.experiment, self.world)
        self.straggler = Straggler(self.world, self.experiment.axes)

    @property
    def steps_per_epoch(self) -> int:
        return self.experiment.train_loader.sampler.steps_per_epoch

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return count_steps(self.config, self.steps_per_epoch)

    def train(self, run: RunInfo) -> dict[str, float]:
        """Train to the end. Returns the last metrics. All ranks must call it.

        Raises Preempted after a signal to any rank, when the state is saved.
        """
        outcome: Outcome = "failed"
        with self.stop:
            try:
                self._ask_to_stop()()  # before the first step there is nothing to save
                self.callbacks.on_start(run)
                evaluated = self._train()
                metrics = {**self.state.logged, **evaluated}  # also of a run that was resumed at its end
                outcome = self.callbacks.told_to_stop()[0] if self.stopped else "finished"
            except Preempted:
                outcome = "preempted"
                raise
            finally:
                self.callbacks.on_end(Moment(self.state), outcome)
                if outcome == "preempted":  # a launcher ends all ranks once the first one has ended
                    self.world.agreement.wait_for_all("saved")
        return metrics

    def _train(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if self._asked_to_end():
            return self._evaluate()
        if self.owes_evaluation and self.state.step < self.num_steps:
            metrics |= self._evaluate()
            if self.stopped:
                return metrics
        while self.state.step < self.num_steps:
            steps = self.experiment.train_loader.steps(self.state.epoch, self.state.step_in_epoch)
            for batch in itertools.islice(steps, self.num_steps - self.state.step):
                stop_if_asked = self._ask_to_stop()
                self.step(batch)
                if stop_if_asked():
                    self.callbacks.when_due(Moment(self.state))
                if self._is_due_within_epoch():
                    metrics |= self._evaluate()
                    if self.stopped:
                        return metrics
            if self.state.step == self.num_steps:
                break  # what ends the run follows, also for one that is resumed at its end
            if self.state.epoch % self.config.eval_every == 0:
                metrics |= self._evaluate()
                if self.stopped:
                    return metrics
            self.callbacks.after_epoch(Moment(self.state))
            self.meter.pause()
        return metrics | self._evaluate()

    def step(self, batch: StepBatch) -> None:
        """One optimizer step over the whole world."""
        step, num_steps = self.state.step, self.num_steps
        self.world.trace.at(f"step {step + 1}")
        self.straggler.begin_step()
        due = (step + 1) % self.config.log_every == 0 or step + 1 == num_steps
        # Dropout draws from a stream of its own for each step and data rank: a resumed run needs no state of it.
        # NumPy and random likewise, from which a model or an objective may draw.
        key = mix(self.config.seed, step, self.experiment.axes.data_rank(self.world.rank) or 0)
        seed_step(key, self.world.device)

        lr_factor = self.experiment.schedule(step, num_steps, self.steps_per_epoch)
        losses, norms = {}, {}
        for name, turn in self.spread.turns.items():  # one, unless the objective has several losses
            self.guard.begin()
            losses[name] = turn.forward_backward(batch)
            if self.guard.allows(name, losses[name], turn, batch, self.state):
                norms[name] = turn.step(lr_factor, want_norm=due)
            else:
                turn.skip()

        if self.average is not None and norms:
            self.average.update()
        skipped = [name for name in losses if name not in norms]
        self.state = self.guard.after(self.state.after_step(self.steps_per_epoch), skipped)
        self.straggler.end_step(batch.wait_s)
        logged: dict[str, float] = {}
        if due:
            shares = torch.stack([*losses.values()])
            sums, *work_s = self.world.collectives.sum_together(shares, *self.straggler.work_s())
            logged = with_total("train", dict(zip(losses, sums.to(shares.dtype).tolist(), strict=True)))
            if self.guard.skips:
                logged["train/skipped_steps"] = self.state.skipped_steps
            self.state = replace(self.state, logged=logged)
        self.meter.tick(batch)
        measured = dict(logged)
        if due:
            measured |= {
                "train/learning_rate": self.spread.learning_rate,
                "train/grad_norm": total_norm(norms) if norms else math.nan,
            }
            measured |= self.meter.measured() | self.straggler.measured(*work_s)
            measured["perf/memory_mib"] = peak_memory_mib(self.world.device)
        self.callbacks.after_step(Moment(self.state, measured))

    def _is_due_within_epoch(self) -> bool:
        """Whether an evaluation follows the step; at the end of an epoch and of the run that is decided there."""
        every, state = self.config.eval_every_steps, self.state
        if every is None or state.step % every or state.step == self.num_steps:
            return False
        return state.step_in_epoch > 0 or state.epoch % self.config.eval_every > 0

    def _evaluate(self) -> dict[str, float]:
        """The metrics of the validation data; a callback may ask to stop after them. All ranks must call it."""
        self.world.trace.at(f"the evaluation after step {self.state.step}")
        predictions = self.experiment.watch_predictions()
        batches = self.config.eval_batches
        with nullcontext() if self.average is None else self.average.in_place():
            metrics = evaluate(self.experiment, self.spread, self.world, batches, predictions, self._ask_to_stop)
        self.callbacks.after_evaluation(Moment(self.state, metrics, predictions))
        self._asked_to_end()
        self.meter.pause()
        return metrics

    def _asked_to_end(self) -> bool:
        """Whether a callback of any rank wants the run to end here. All ranks must call it."""
        if self.callbacks.may_stop and self.state.step < self.num_steps:
            self.stopped = self.world.collectives.any_later(self.callbacks.want_to_stop)()
        return self.stopped

    def _ask_to_stop(self) -> Callable[[], bool]:
        """Start asking whether a signal came to any rank; the result, when called, raises Preempted then.

        It returns whether a callback of any rank is due. All ranks must call both.
        """
        answers = self.world.collectives.any_of_later(self.stop.received is not None, self.callbacks.is_due)

        def stop_if_asked() -> bool:
            stopping, is_due = answers()
            if stopping:
                raise Preempted(self.stop.received or "a signal to another rank")
            return is_due

        return stop_if_asked


def total_norm(norms: Mapping[str, float | None]) -> float:
    """The norm of the gradients of all turns of a step."""
    return math.hypot(*(norm for norm in norms.values() if norm is not None))


def count_steps(config: Config, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run."""
    return min(config.epochs * steps_per_epoch, config.max_steps or config.epochs * steps_per_epoch)
