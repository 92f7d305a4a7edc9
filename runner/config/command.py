"""Composition of a command's arguments into a checked configuration, for the command line and calls from Python."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra.core.plugins import Plugins

from runner.config.compose import checked, compose, prepared_hydra
from runner.config.custom_dirs import add_to_path
from runner.config.diagnostics.overrides import refuse_overrides
from runner.config.pointers import named_directory, pull_named, with_addresses
from runner.config.recorded_code import importing_code_of
from runner.config.request import Request
from runner.config.resume import STOP_ON_FAILURE, Arguments, add_recorded
from runner.distributed.environment import RankInfo, run_in_progress
from runner.errors import InputError
from runner.records.run_directory import Command, Destination


@contextmanager
def composing(overrides: list[str], config_dirs: list[str], multirun: bool) -> Iterator[Arguments]:
    """Prepare Hydra to compose the arguments, and Python to import from `config_dirs`, absolute paths."""
    if messages := refuse_overrides(overrides):
        raise InputError(*messages)
    arguments = add_recorded(overrides, config_dirs, multirun)
    add_to_path(arguments.config_dirs)
    _register_sweepers()
    with run_in_progress(), prepared_hydra(arguments.config_dirs), importing_code_of(arguments.code_of):
        try:
            yield arguments
        except InputError as error:
            raise InputError(*(with_addresses(message, overrides) for message in error.messages)) from None


def prepare(arguments: Arguments, rank_info: RankInfo, words: Sequence[str]) -> Request:
    """Return the request of one run, with its checked configuration. Raise InputError with every wrong value."""
    cfg = compose(arguments.overrides)
    pull_named(cfg)
    config = checked(cfg, arguments.overrides)
    if config.sweep.stop_on_failure:
        raise InputError(f"{STOP_ON_FAILURE}=true needs a sweep; add -m")
    choices = dict(cfg.hydra.runtime.choices)
    named = named_directory(config.run_id, config.name, config.local_outputs)
    return Request(
        config,
        Command(tuple(arguments.recorded), tuple(arguments.config_dirs), tuple(words), choices),
        Destination(arguments.directory or rank_info.directory or (str(named) if named else None)),
        queued_overrides=tuple(arguments.launch_overrides),
        code_of=arguments.code_of,
    )


def _register_sweepers() -> None:
    """Register the plugins: in an editable install Hydra cannot find them in their namespace package."""
    plugins = Plugins.instance()
    # Hydra's scan executes its own plugins a second time, so classes that derive from them are imported after it.
    from hydra_plugins.runner.sweeps import GridSweeper, OptunaSweeper, SlotsLauncher

    for plugin in (GridSweeper, OptunaSweeper, SlotsLauncher):
        plugins.register(plugin)
