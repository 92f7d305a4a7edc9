"""What the runner's own parallel modes declare, to name those that do where another one was chosen."""

from collections.abc import Callable

from runner import CONF
from runner.config.diagnostics.import_target import locate_callable
from runner.config.help.folders import Folders
from runner.training.strategy import Parallel


def modes_that(do: Callable[[Parallel], bool]) -> str:
    """`parallel=ddp, parallel=fsdp`: each that does it with its default options."""
    folders = Folders([CONF])
    targets = {option: folders.merged("parallel", option).targets[""] for option in folders.groups["parallel"]}
    modes: dict[str, Parallel] = {option: locate_callable(target)() for option, target in targets.items()}
    return ", ".join(f"parallel={option}" for option, mode in modes.items() if do(mode))


def take(mode: Parallel, world_size: int) -> bool:
    """Whether the mode, as it is, can have a world of this size."""
    try:
        mode.axes(world_size)
    except ValueError:
        return False
    return True
