"""What was typed, on its way to one checked configuration: the path that the command line and Python take alike."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra import initialize_config_dir, version
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime

from runner import CONF
from runner.config.compose import checked, compose
from runner.config.diagnostics.overrides import given_twice, refuse_overrides
from runner.config.own_folders import add_to_path, searching
from runner.config.resume import Typed, with_recorded
from runner.config.schema import Config
from runner.distributed.environment import RankInfo
from runner.distributed.occupied import occupied
from runner.errors import InputError
from runner.runs.code_state import read_state
from runner.runs.run_directory import Request


@contextmanager
def composing(overrides: list[str], config_dirs: list[str], multirun: bool) -> Iterator[Typed]:
    """Meanwhile Hydra can compose what was typed, and the user's own folders can be imported from.

    config_dirs: absolute. Raises InputError for what no configuration is made of.
    """
    if refuse := refuse_overrides(overrides) + given_twice(overrides):
        raise InputError(*refuse)
    typed = with_recorded(overrides, config_dirs, multirun)
    add_to_path(typed.config_dirs)
    _register_plugins()
    with (
        occupied(),
        _own_hydra(),
        searching(typed.config_dirs),
        initialize_config_dir(str(CONF), job_name="runner", version_base="1.3"),
    ):
        yield typed


def prepare(typed: Typed, rank_info: RankInfo, command: Sequence[str]) -> tuple[Config, Request]:
    """The checked configuration of one run, and how it was asked for. Raises InputError for every wrong value."""
    cfg = compose(typed.overrides)
    config = checked(cfg, typed.overrides)
    request = Request(
        overrides=tuple(typed.recorded),
        words=tuple(typed.words),
        config_dirs=tuple(typed.config_dirs),
        command=tuple(command),
        directory=typed.directory or rank_info.directory,
        choices=dict(cfg.hydra.runtime.choices),
        submitted=read_state(Path(rank_info.submitted)) if rank_info.submitted else None,
    )
    return config, request


@contextmanager
def _own_hydra() -> Iterator[None]:
    """What a caller in Python has composed by Hydra stays as it is: Hydra keeps one configuration per process."""
    of_caller: tuple[type, ...] = (GlobalHydra, HydraConfig, JobRuntime, version.VersionBase)
    before = {each: Singleton._instances.pop(each) for each in of_caller if each in Singleton._instances}
    try:
        yield
    finally:
        for each in of_caller:
            Singleton._instances.pop(each, None)
        Singleton._instances.update(before)


def _register_plugins() -> None:
    """Hydra finds plugins by walking their namespace, which an editable install does not let it."""
    plugins = Plugins.instance()
    # Only now: its scan executes Hydra's own plugins a second time, and what derives from them must come after.
    from hydra_plugins.runner.grid_sweeper import GridSweeper
    from hydra_plugins.runner.optuna_sweeper import OptunaSweeper
    from hydra_plugins.runner.own_folders import OwnFolder, OwnFolders
    from hydra_plugins.runner.slots_launcher import SlotsLauncher

    for plugin in (GridSweeper, OptunaSweeper, SlotsLauncher, OwnFolder, OwnFolders):
        plugins.register(plugin)
