"""Where a run stands, as its checkpoints tell; readable without torch."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

PROGRESS = "progress.json"


@dataclass(frozen=True)
class TrainState:
    """A point between two steps of a run. The order of the samples from there on follows from it and the seed."""

    step: int  # optimizer steps done
    epoch: int  # epochs done
    step_in_epoch: int  # steps done of the epoch after that
    batch_size: int  # the one that step_in_epoch counts in

    def after_step(self, steps_per_epoch: int) -> "TrainState":
        """Where the run stands one optimizer step further on."""
        in_epoch = self.step_in_epoch + 1
        epoch = self.epoch + in_epoch // steps_per_epoch
        return replace(self, step=self.step + 1, epoch=epoch, step_in_epoch=in_epoch % steps_per_epoch)


def available(folder: Path) -> list[Path]:
    """The complete checkpoints in a run's folder of them, oldest first."""
    steps = [(int(m[1]), p) for p in folder.glob("step_*") if (m := re.fullmatch(r"step_(\d+)", p.name))]
    return [path for _, path in sorted(steps)]


def read_train_state(path: Path) -> TrainState:
    """Of one checkpoint. Raises OSError or ValueError where it cannot be read."""
    return TrainState(**json.loads((path / PROGRESS).read_text()))
