"""The training loop: steps, evaluations, and stopping. It depends neither on the mode nor on the number of ranks."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from runner.checkpoints.layout import TrainState
from runner.config.schema import Config
from runner.distributed.failures.signals import handling_signals, received
from runner.distributed.world import World
from runner.errors import Preempted
from runner.input.batch import StepBatch
from runner.input.checksum import NUM_STEPS
from runner.input.sampler import count_steps
from runner.objectives.objective import begin_passes
from runner.training.build import Experiment
from runner.training.callbacks.contract import STOPS, Callback, Callbacks, Outcome, Progress, RunInfo, Update
from runner.training.evaluation import evaluate
from runner.training.mode import ParallelModel
from runner.training.replay import Replay
from runner.training.state_copies import StateCopies
from runner.training.step_log import StepLog
from runner.training.throughput import ThroughputMeter


@dataclass
class Trainer:
    """The training of one run on one rank."""

    config: Config
    experiment: Experiment
    parallel_model: ParallelModel
    world: World
    state: TrainState
    meter: ThroughputMeter
    callbacks: Callbacks
    evaluation_is_missing: bool = False  # the resumed run was interrupted before an evaluation that was due
    stops_as: Outcome | None = None  # `stops_as` of the callback of any rank that ended the run before the last step
    stop_reason: str = ""  # on rank 0: that of the first rank whose callback ended the run
    step_log: StepLog = field(init=False)
    replay: Replay = field(init=False)
    copies: StateCopies = field(init=False)

    def __post_init__(self) -> None:
        self.step_log = StepLog(self.config, self.experiment, self.world, self.meter)
        self.replay = Replay(self.config.replay_every_steps, self.experiment.recipe, self.world)
        every_steps = self.config.elastic_every_steps
        has_parts = self.experiment.parallel.splits_optimizer_state or any(
            type(callback).state is not Callback.state for callback in self.experiment.callbacks.values()
        )
        self.copies = StateCopies(every_steps, self.parallel_model, self.callbacks, self.world, has_parts)

    @property
    def stopped(self) -> bool:
        return self.stops_as is not None

    @property
    def steps_per_epoch(self) -> int:
        return self.experiment.train_loader.sampler.steps_per_epoch

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of the whole run."""
        return count_steps(self.config.epochs, self.config.max_steps, self.steps_per_epoch)

    def train(self, run: RunInfo) -> dict[str, float]:
        """Train to the last step, and return the last metrics. All ranks must call it.

        Raises Preempted after a signal to any rank, after the state is saved, and Regroup if a process waits to join.
        """
        outcome: Outcome = "failed"
        self.experiment.train_loader.checksum_steps = NUM_STEPS
        # Each evaluation reads the same samples, so that those of the first one suffice.
        self.experiment.val_loader.checksum_steps = 0 if run.evaluations else NUM_STEPS
        with handling_signals(), torch.autograd.set_detect_anomaly(self.config.debug):
            try:
                self._start_vote()()  # a signal before the first step
                self.callbacks.on_start(run)
                self.meter.pause()
                evaluated = self._train()
                metrics = {**self.state.logged, **evaluated}  # `logged` also exists after a resume at the end
                outcome = self.stops_as or "finished"
            except Preempted:
                self.world.readings.flush()
                outcome = "preempted"
                raise
            except Exception:
                self.world.readings.flush_complete()  # their log lines, or the loss that is the cause
                raise
            finally:
                if outcome != "failed":
                    self.world.heartbeat.record("on_end of the callbacks")
                self.callbacks.on_end(Progress(self.state), outcome)
                if outcome != "failed":  # a launcher terminates all ranks when the first one has exited
                    self.world.shutdown.wait_for_all()
        return metrics

    def _train(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if self._callbacks_stop():
            return self._evaluate()
        if self.evaluation_is_missing and self.state.step < self.num_steps:
            metrics |= self._evaluate()
            if self.stopped:
                return metrics
        self._end_epoch()  # if the resumed run was interrupted before
        while self.state.step < self.num_steps:
            steps = self.experiment.train_loader.steps(self.state.epoch, self.state.step_in_epoch)
            for batch in itertools.islice(steps, self.num_steps - self.state.step):
                self.copies.before_step(self.state)
                finish_vote = self._start_vote(self.callbacks.is_due)
                self.step(batch)
                if finish_vote():
                    self.callbacks.call("when_due", Progress(self.state, readings=self.world.readings))
                if self._is_evaluation_due():
                    metrics |= self._evaluate()
                    if self.stopped:
                        return metrics
                elif self.callbacks.may_stop_after_steps and self._callbacks_stop():
                    return metrics | self._evaluate()
            self._end_epoch()
        return metrics | self._evaluate()  # also for a run that was resumed after its last step

    def _end_epoch(self) -> None:
        """Call after_epoch once after each epoch except the last."""
        state = self.state
        if not state.step_in_epoch and state.ended_epochs < state.epoch and state.step < self.num_steps:
            self.world.readings.flush()
            self.state = replace(state, ended_epochs=state.epoch)
            self.callbacks.call("after_epoch", Progress(self.state))
            self.meter.pause()

    def step(self, batch: StepBatch) -> None:
        """Make one optimizer step over all ranks."""
        step, num_steps = self.state.step, self.num_steps
        self.world.heartbeat.record(f"step {step + 1}")
        self.step_log.begin_step()
        is_logged = (step + 1) % self.config.log_every == 0 or step + 1 == num_steps
        # Each step has its own random numbers, so that no state needs to be saved.
        axes = self.experiment.axes
        self.experiment.recipe.draws.begin(self.config.seed, step, data_rank=axes.data_rank(self.world.rank))

        scheduled = self.experiment.schedule(step, num_steps, self.steps_per_epoch)
        keeps_outputs = is_logged and self.experiment.train_metrics is not None
        pass_values = begin_passes(self.experiment.recipe.objective, keeps_outputs)
        losses, norms = {}, {}
        for name, stepper in self.parallel_model.steppers.items():  # one, unless the objective has several losses
            self.callbacks.call("before_forward")
            losses[name] = self.replay.forward_backward(stepper, batch, step + 1)
            update = Update(name, losses[name], stepper.gradients, batch, self.state)
            if all(self.callbacks.call("allows_update", update)):
                norms[name] = stepper.step(scheduled, want_norm=is_logged)
            else:
                stepper.skip()
        skipped_steps = self.state.skipped_steps + (len(norms) < len(losses))
        self.state = replace(self.state.after_step(batch.ends_epoch), skipped_steps=skipped_steps)

        self.step_log.end_step(batch)
        now = Progress(self.state, updated=tuple(norms), is_logged=is_logged, readings=self.world.readings)
        if is_logged:
            learning_rate = self.parallel_model.learning_rate
            now = self.step_log.with_metrics(now, losses, norms, pass_values, batch, learning_rate)
            self.state = now.state
        else:
            self.step_log.without_metrics(batch)
        self.world.readings.end_step()
        self.callbacks.call("after_step", now)

    def _is_evaluation_due(self) -> bool:
        """Return True if the last step requires an evaluation. The evaluation at the end of the run is made anyway."""
        state, every_steps = self.state, self.config.eval_every_steps
        is_end_of_epoch = state.step_in_epoch == 0 and state.epoch % self.config.eval_every == 0
        is_due = is_end_of_epoch or (every_steps is not None and state.step % every_steps == 0)
        return is_due and state.step < self.num_steps

    def _evaluate(self) -> dict[str, float]:
        """Evaluate, and let callbacks stop the run. Return the metrics. All ranks must call it.

        An evaluation that the checkpoint of a resumed run includes is not repeated, so that callbacks count it once.
        """
        self.world.readings.flush()
        if self.state.evaluated:
            return self.state.evaluated
        self.world.heartbeat.record(f"the evaluation after step {self.state.step}")
        predictions, checksums = self.experiment.watch_predictions(), list[float]()
        with self.callbacks.evaluating():
            metrics = evaluate(
                self.experiment,
                self.parallel_model,
                self.world,
                self.config.eval_batches,
                predictions,
                self._start_vote,
                checksums,
            )
        self.experiment.val_loader.checksum_steps = 0
        self.state = replace(self.state, evaluated=metrics)
        now = Progress(self.state, metrics, predictions, checksums=checksums, is_logged=True)
        self.callbacks.call("after_evaluation", now)
        self._callbacks_stop()
        self.meter.pause()
        return metrics

    def _callbacks_stop(self) -> bool:
        """Return True if a callback of any rank stops the run here. All ranks must call it."""
        if self.callbacks.may_stop and not self.stopped and self.state.step < self.num_steps:
            reasons = self.callbacks.stop_reasons()
            votes = self.world.collectives.any_of_async(*(state in reasons for state in STOPS))()
            self.stops_as = next((state for state, any_votes in zip(STOPS, votes, strict=True) if any_votes), None)
            if self.stops_as:
                found = self.world.collectives.gather_objects(reasons.get(self.stops_as, "")) or []
                self.stop_reason = next(filter(None, found), "")
        return self.stopped

    def _start_vote(self, is_due: bool = False) -> Callable[[], bool]:
        """Start a vote in the background; return a function that waits for it. All ranks must call both.

        That function raises Preempted if a signal has reached any rank, and returns True if `is_due` is on any rank.
        """
        answers = self.world.collectives.any_of_async(received() is not None, is_due, self.copies.is_awaited())

        def finish_vote() -> bool:
            is_preempted, is_due_on_any, is_awaited_on_any = answers()
            self.copies.after_vote(is_awaited_on_any)
            if is_preempted:
                raise Preempted(received() or "a signal to another rank")
            return is_due_on_any

        return finish_vote
