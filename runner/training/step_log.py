"""What is logged of a step: summed over the ranks at once, and read from the device later."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from runner.config.schema import Config
from runner.distributed.world import World
from runner.input.batch import StepBatch
from runner.objectives.objective import PassValues
from runner.training.build import Experiment
from runner.training.callbacks.contract import Progress
from runner.training.evaluation import logged_means, with_total
from runner.training.throughput import StragglerMeter, ThroughputMeter, peak_memory_mib


class StepLog:
    """Measures the steps of this rank, and the metrics of the logged ones."""

    def __init__(self, config: Config, experiment: Experiment, world: World, meter: ThroughputMeter):
        self._experiment, self._world, self._meter = experiment, world, meter
        self._logs_skipped = config.on_nonfinite == "skip"
        self._straggler = StragglerMeter(world, experiment.axes)
        self._checksums: list[float] = []  # of this rank's samples, since the last logged step

    def begin_step(self) -> None:
        self._straggler.begin_step()

    def end_step(self, batch: StepBatch) -> None:
        self._straggler.end_step(batch.wait_s)
        if batch.checksum is not None or self._checksums:  # the list ends with the value of the logged step
            checksum = math.nan if batch.checksum is None else batch.checksum
            self._checksums.append(checksum if self._experiment.axes.reads_first(self._world.rank) else 0.0)

    def without_metrics(self, batch: StepBatch) -> None:
        """Record the time of a step that is not logged, when the device has computed it."""
        self._world.readings.then(lambda: self._meter.tick(batch))

    def with_metrics(
        self,
        now: Progress,
        losses: Mapping[str, torch.Tensor],
        norms: Mapping[str, torch.Tensor | None],
        pass_values: PassValues,
        batch: StepBatch,
        learning_rate: float,
    ) -> Progress:
        """Return the step with its metrics, which are filled in when the device has computed them.

        The metrics that a checkpoint contains are filled in, too. All ranks must call it.

        losses, norms: of each loss, this rank's part of its mean and the norm of its gradient if it was updated, ().
        """
        objective, train_metrics = self._experiment.recipe.objective, self._experiment.train_metrics
        local = torch.stack([*losses.values()])
        checksums = torch.tensor(self._checksums, dtype=torch.float64).to(local.device, non_blocking=True)
        sums = pass_values.sums(objective.value_names, self._world.device)
        parts = [local.double(), sums.flatten(), self._sums(pass_values), self._straggler.work_s(), checksums]
        sizes = [part.numel() for part in parts]
        summed = self._world.collectives.sum(torch.cat(parts))
        measured = {} if train_metrics is None else train_metrics.compute(summed.split(sizes)[2], self._world)
        own = [norm.to(summed, non_blocking=True).reshape(1) for norm in norms.values() if norm is not None]
        logged, metrics, of_samples = dict[str, float](), dict[str, float](), list[float]()
        self._checksums = []

        def use(values: torch.Tensor) -> None:
            totals, means, _, work_s, checksums, own = values.split([*sizes, len(values) - sum(sizes)])
            of_samples.extend(checksums.tolist())
            logged.update(with_total("train", dict(zip(losses, totals.to(local.dtype).tolist(), strict=True))))
            logged.update(logged_means("train", objective, means))
            logged.update({f"train/{name}": value for name, value in measured.items()})
            if self._logs_skipped:
                logged["train/skipped_steps"] = now.state.skipped_steps
            self._meter.tick(batch)
            metrics.update(logged)
            metrics["train/learning_rate"] = learning_rate
            metrics["train/grad_norm"] = math.hypot(*own.tolist()) if norms else math.nan
            metrics.update(self._meter.measured() | self._straggler.measured(work_s.tolist()))
            metrics["perf/memory_mib"] = peak_memory_mib(self._world.device)

        self._world.readings.add(torch.cat([summed, *own]), use)
        return replace(now, state=replace(now.state, logged=logged), known_metrics=metrics, checksums=of_samples)

    def _sums(self, values: PassValues) -> torch.Tensor:
        """Return the local sums of the metrics of the step; an empty tensor if they are not measured."""
        metrics = self._experiment.train_metrics
        if metrics is None or values.outputs is None:
            return torch.zeros(0, dtype=torch.float64, device=self._world.device)
        metrics.reset(self._world.device)
        for outputs, targets, indices in values.outputs if self._experiment.axes.counts(self._world.rank) else ():
            metrics.add(outputs, targets, indices)
        return metrics.flat()
