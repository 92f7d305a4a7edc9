"""Where a run stands, as its checkpoints tell; readable without torch."""

import json
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from runner.runs.strict_json import numbers

PROGRESS = "progress.json"
LAST, BEST = "last", "best"  # links beside the checkpoints, which name one of them
STEP = re.compile(r"step_(\d+)")
# How the samples of an epoch are ordered (runner.training.sampler), as checkpoints and results record it. Where none is
# recorded it is the older way, which a run that was begun with it keeps to.
OLDER_ORDER, ORDER = 1, 2


@dataclass(frozen=True)
class TrainState:
    """A point between two steps of a run. The order of the samples from there on follows from it and the seed."""

    step: int  # optimizer steps done
    epoch: int  # epochs done
    step_in_epoch: int  # steps done of the epoch after that
    batch_size: int  # the one that step_in_epoch counts in
    skipped_steps: int = 0  # of those done, without an update: see on_nonfinite
    recent_losses: dict[str, list[float]] = field(default_factory=dict)  # by name, of the last steps: see loss_spike
    logged: dict[str, float] = field(default_factory=dict)  # the losses of the newest step whose losses were logged
    order: int = ORDER  # of the samples, from the first step of the run to its last

    def after_step(self, steps_per_epoch: int) -> "TrainState":
        """Where the run stands one optimizer step further on."""
        in_epoch = self.step_in_epoch + 1
        epoch = self.epoch + in_epoch // steps_per_epoch
        return replace(self, step=self.step + 1, epoch=epoch, step_in_epoch=in_epoch % steps_per_epoch)


def available(folder: Path) -> list[Path]:
    """The complete checkpoints in a run's folder of them, oldest first."""
    return sorted((path for path in folder.glob("step_*") if STEP.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """The optimizer steps done before the checkpoint was taken."""
    return int(path.name.removeprefix("step_"))


def named(folder: Path, name: str) -> Path:
    """The checkpoint of that name: last, best or step_N. Raises ValueError that says which there are."""
    paths = available(folder)
    if name == LAST and paths:
        return paths[-1]
    found = (folder / name).resolve()
    if found in [path.resolve() for path in paths]:
        return found
    if not paths:
        raise ValueError(f"{folder.parent} holds no checkpoint yet")
    there = ", ".join(path.name for path in paths)
    if name == BEST:
        raise ValueError(
            f"{folder.parent} holds no best checkpoint, but {there}: none is kept with checkpoint.keep_best=0, nor "
            "before an evaluation has given a value of its monitor"
        )
    raise ValueError(f"{folder.parent} holds no checkpoint {name}, but {there}")


def read_train_state(path: Path) -> TrainState:
    """Of one checkpoint. Raises OSError or ValueError where it cannot be read."""
    found = json.loads((path / PROGRESS).read_text())
    if not isinstance(found, dict) or not isinstance(found.get("recent_losses", {}), dict):
        raise ValueError(f"{PROGRESS} holds no mapping")
    try:
        state = TrainState(**{"order": OLDER_ORDER, **found})
    except TypeError as error:
        raise ValueError(f"{PROGRESS} has other keys ({error})") from None
    for name, value in asdict(state).items():
        if name not in ("recent_losses", "logged") and (type(value) is not int or value < 0):
            raise ValueError(f"{PROGRESS} has {name}={value!r}, which is no count")
    if state.order not in (OLDER_ORDER, ORDER):
        raise ValueError(f"{PROGRESS} has order={state.order}, which this version does not know")
    if not all(isinstance(losses, list) for losses in state.recent_losses.values()):
        raise ValueError(f"{PROGRESS} has recent_losses that are no lists")
    return replace(state, logged=numbers(state.logged))
