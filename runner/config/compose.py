"""Composition of the overrides into one configuration, which is resolved, typed and checked."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.diagnostics.keys import value_problem
from runner.config.diagnostics.overrides import explain
from runner.config.recorded import check_resumable
from runner.config.schema import Config, apply_debug, as_config
from runner.config.validate import check_input, check_types
from runner.errors import InputError


def compose(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration, with Hydra's own node. Raise InputError that explains every wrong override."""
    owner = GlobalHydra.instance().hydra
    assert owner is not None
    with explained(overrides):
        return owner.compose_config("config", list(overrides), run_mode=RunMode.RUN, with_log_configuration=False)


@contextmanager
def explained(overrides: Sequence[str]) -> Iterator[None]:
    """Replace an exception that Hydra raises for the overrides by InputError, which explains every wrong override."""
    try:
        yield
    except Exception as error:  # Hydra's own types, and ValueError or YAMLError that it does not catch
        raise InputError(*explain(error, list(overrides), GlobalHydra.instance().config_loader())) from None


def options_of(group: str) -> list[str]:
    """Return the options of a group."""
    return sorted(GlobalHydra.instance().config_loader().get_group_options(group))


def modes_to_compare(chosen: str) -> list[str]:
    """Return all modes; mesh only if it is chosen, because without options it is the same as fsdp."""
    return [mode for mode in options_of("parallel") if mode != "mesh" or chosen == "mesh"]


def for_mode(overrides: Sequence[str], chosen: str, mode: str, dropped: Sequence[str]) -> list[str]:
    """Return the overrides for another mode than the chosen one, whose options are left out.

    dropped: top-level keys that are left out, too.
    """
    without = ("parallel", *dropped)
    kept = [each for each in overrides if each.lstrip("+~").split("=")[0].split(".")[0] not in without]
    options = [each for each in overrides if each.lstrip("+").startswith("parallel.")]
    return [*kept, f"parallel={mode}", *(options if mode == chosen else [])]


def checked(cfg: DictConfig, overrides: Sequence[str]) -> Config:
    """Return the typed and resolved configuration. Raise InputError with every value that is wrong by itself."""
    choices = cfg.hydra.runtime.choices if "hydra" in cfg else {}  # a job of a sweep has been checked before
    try:
        own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
        container: Any = OmegaConf.to_container(own, resolve=True)
        OmegaConf.merge(Config, container)  # checks the keys and types of the top level, which the copy does not keep
    except OmegaConfBaseException as error:
        raise InputError(value_problem(cfg, error, overrides, choices)) from None
    if messages := check_types(container, choices):
        raise InputError(*messages)
    config = as_config(container)
    if messages := check_input(config, choices) + check_resumable(config, choices):
        raise InputError(*messages)
    return apply_debug(config)
