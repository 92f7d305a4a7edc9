"""Loading the newest sound checkpoint of a run, the same one on every rank."""

import logging
from pathlib import Path

from runner import checkpoint
from runner.parallel.protocol import Spread
from runner.progress import Progress, available
from runner.world import World

log = logging.getLogger(__name__)


def restore(folder: Path, spread: Spread, world: World) -> Progress:
    """Load the newest checkpoint that is what was saved. All ranks must call it.

    A damaged one is named in a warning and the one before it is used. Raises ValueError when none is sound: a run
    must not start afresh over one that went far.
    """
    state, progress = checkpoint.load(Path(world.share("checkpoint", lambda: str(_newest_sound(folder)))))
    spread.load_state(state)
    return progress


def _newest_sound(folder: Path) -> Path:
    for path in reversed(available(folder)):
        try:
            checkpoint.verify(path)
        except ValueError as error:
            log.warning("%s; trying the one before it", error)
            continue
        return path
    raise ValueError(f"{folder} holds no sound checkpoint")
