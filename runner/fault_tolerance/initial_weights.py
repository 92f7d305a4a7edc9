"""What `init_from` means: a file that is named, or a checkpoint, of a run the newest sound one."""

from pathlib import Path

from runner.config.diagnostics.import_target import locate
from runner.config.schema import Config
from runner.distributed.world import World
from runner.errors import InputError, near_hint
from runner.fault_tolerance.checkpoint import choose
from runner.runs.ledger import is_sweep
from runner.runs.manifest import MANIFEST, STATE, verify
from runner.runs.run_directory import CHECKPOINTS
from runner.runs.train_state import available


def find_initial_weights(config: Config, directory: str | None, world: World) -> Path | None:
    """The file or folder, the same on all ranks; None where there is none or a checkpoint is restored.

    All ranks must call it.

    directory: the run's, if it is known already; one that its agent has started again has made it before.
    Raises InputError where nothing can be read there.
    """
    named = config.init_from.path
    if named is None or locate(config.task["_target_"]).reads_checkpoint:
        return None

    def find() -> str:
        return str(_find(named, directory or world.agreement.made_before("directory")) or "")

    try:
        found = world.agreement.share("init_from", find)
    except ValueError as error:
        raise _refusal(config, error) from None
    return Path(found) if found else None


def check_initial_weights(config: Config, directory: str | None) -> None:
    """Raises InputError where a job that is queued here would find nothing to read."""
    if config.init_from.path is not None and not locate(config.task["_target_"]).reads_checkpoint:
        try:
            _find(config.init_from.path, directory)
        except ValueError as error:
            raise _refusal(config, error) from None


def _refusal(config: Config, error: ValueError) -> InputError:
    return InputError(f"init_from.path={config.init_from.path}: {error}")


def _find(named: str, directory: str | None) -> Path | None:
    if directory is not None and available(Path(directory) / CHECKPOINTS):
        return None
    return _file_of(Path(named)).absolute()


def _file_of(path: Path) -> Path:
    """A file, or the folder of a checkpoint. Raises ValueError where it is neither, nor a run that has a sound one."""
    if path.is_dir():
        if is_sweep(path):
            raise ValueError("it is a sweep; name one of its jobs")
        checkpoint = path.resolve() if _is_checkpoint(path) else None  # of a link, which may move on meanwhile
        if checkpoint is None and not (path / CHECKPOINTS).is_dir():
            raise ValueError("it is a folder, but neither a run directory nor a checkpoint of one; name a file in it")
        if checkpoint is None:
            if not available(path / CHECKPOINTS):
                raise ValueError("the run holds no checkpoint yet")
            return choose(path / CHECKPOINTS)
        verify(checkpoint)
        return checkpoint
    if not path.is_file():
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ValueError(f"there is no such file or directory{near_hint(path.name, beside)}")
    if _is_checkpoint(path.parent):  # one of its files
        verify(path.parent)
        return path.parent.resolve()
    return path


def _is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file() or (path / STATE).is_file()
