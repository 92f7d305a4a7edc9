"""Composition of a command's arguments into a checked configuration, for the command line and calls from Python."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra import initialize_config_dir, version
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime

from runner.config.compose import checked, compose
from runner.config.custom_dirs import add_to_path, on_search_path
from runner.config.diagnostics.overrides import refuse_overrides
from runner.config.recorded_code import importing_code_of
from runner.config.resume import Arguments, add_recorded
from runner.config.schema import Config
from runner.distributed.environment import RankInfo, run_in_progress
from runner.errors import InputError
from runner.paths import CONF
from runner.records.run_directory import Request


@contextmanager
def composing(overrides: list[str], config_dirs: list[str], multirun: bool) -> Iterator[Arguments]:
    """Prepare Hydra to compose the arguments, and Python to import from the custom directories.

    `config_dirs` are absolute paths. Raise InputError for overrides that cannot be composed.
    """
    if messages := refuse_overrides(overrides):
        raise InputError(*messages)
    arguments = add_recorded(overrides, config_dirs, multirun)
    add_to_path(arguments.config_dirs)
    _register_plugins()
    with (
        run_in_progress(),
        _isolated_hydra(),
        on_search_path(arguments.config_dirs),
        importing_code_of(arguments.code_of),
        initialize_config_dir(str(CONF), job_name="runner", version_base="1.3"),
    ):
        yield arguments


def prepare(arguments: Arguments, rank_info: RankInfo, command: Sequence[str]) -> tuple[Config, Request]:
    """Return the checked configuration of one run, and its request. Raise InputError with every wrong value."""
    cfg = compose(arguments.overrides)
    config = checked(cfg, arguments.overrides)
    request = Request(
        overrides=tuple(arguments.recorded),
        launch_overrides=tuple(arguments.launch_overrides),
        config_dirs=tuple(arguments.config_dirs),
        command=tuple(command),
        directory=arguments.directory or rank_info.directory,
        choices=dict(cfg.hydra.runtime.choices),
        code_of=arguments.code_of,
        untrusted=arguments.untrusted,
    )
    return config, request


@contextmanager
def _isolated_hydra() -> Iterator[None]:
    """Restore the caller's Hydra state on exit: Hydra keeps one configuration per process."""
    singletons: tuple[type, ...] = (GlobalHydra, HydraConfig, JobRuntime, version.VersionBase)
    before = {each: Singleton._instances.pop(each) for each in singletons if each in Singleton._instances}
    try:
        yield
    finally:
        for each in singletons:
            Singleton._instances.pop(each, None)
        Singleton._instances.update(before)


def _register_plugins() -> None:
    """Register the plugins: in an editable install Hydra cannot find them in their namespace package."""
    plugins = Plugins.instance()
    # Hydra's scan executes its own plugins a second time, so classes that derive from them are imported after it.
    from hydra_plugins.runner.search_path import CustomDirs, CustomDirSource
    from hydra_plugins.runner.sweeps import GridSweeper, OptunaSweeper, SlotsLauncher

    for plugin in (GridSweeper, OptunaSweeper, SlotsLauncher, CustomDirSource, CustomDirs):
        plugins.register(plugin)
