"""What a run that is resumed has come by: its evaluations, and of which of them there is a checkpoint."""

import json
import math
from dataclasses import dataclass

from runner.config.schema import Config
from runner.distributed.world import World
from runner.runs.monitor import Monitor
from runner.runs.run_directory import RunDirectory
from runner.runs.strict_json import dumps
from runner.runs.train_state import TrainState, available, step_of


@dataclass(frozen=True)
class Past:
    """The same on all ranks; of a new run there is nothing."""

    values: dict[int, float]  # the monitor's of each evaluation, by step
    checkpoints: list[int]  # steps

    @property
    def kept(self) -> dict[int, float]:
        """The values of what there is a checkpoint of."""
        return {step: value for step, value in self.values.items() if step in self.checkpoints}

    def owes_evaluation(self, config: Config, state: TrainState) -> bool:
        """Whether the run stopped before an evaluation that was due."""
        at_epoch_end = not state.step_in_epoch and state.epoch % config.eval_every == 0
        at_step = config.eval_every_steps is not None and state.step % config.eval_every_steps == 0
        return state.step > 0 and (at_epoch_end or at_step) and max(self.values, default=0) < state.step


def read_past(directory: RunDirectory, monitor: Monitor, world: World) -> Past:
    """All ranks must call it: rank 0 alone need see the directory."""

    def read() -> str:
        checkpoints = [step_of(path) for path in available(directory.checkpoints)]
        values = directory.evaluations(monitor.name) if checkpoints else {}
        return dumps([list(values.items()), checkpoints])

    values, checkpoints = json.loads(world.agreement.share("past", read))
    return Past({step: math.nan if value is None else value for step, value in values}, checkpoints)
