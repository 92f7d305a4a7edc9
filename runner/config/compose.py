"""Composition of the overrides into one configuration, which is resolved, typed and checked."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hydra import initialize_config_dir, version
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.changes import check_resumable
from runner.config.custom_dirs import on_search_path
from runner.config.data_sizes import find_sizes, unknown_sizes
from runner.config.diagnostics.import_target import import_torch
from runner.config.diagnostics.keys import value_problem
from runner.config.diagnostics.overrides import explain, explain_keys
from runner.config.schema import GROUPS, NAMED_GROUPS, Config, apply_debug, as_config
from runner.config.texts import typed_keys, typed_options
from runner.config.validate import DESCRIBED, check_input, check_types, check_values
from runner.errors import InputError, did_you_mean
from runner.paths import CONF


@contextmanager
def prepared_hydra(config_dirs: Sequence[str]) -> Iterator[None]:
    """Prepare Hydra to compose configurations with the options of these custom directories, absolute paths."""
    plugins = Plugins.instance()
    # As in runner.config.command; the import comes after Hydra's scan.
    from hydra_plugins.runner.search_path import CustomDirs, CustomDirSource

    for plugin in (CustomDirSource, CustomDirs):
        plugins.register(plugin)
    with _isolated_hydra(), on_search_path(config_dirs):
        with warnings.catch_warnings():  # Hydra 1.3 needs version_base, which Hydra 1.4 warns about
            warnings.filterwarnings("ignore", "The version_base parameter is deprecated")
            initialized = initialize_config_dir(str(CONF), job_name="runner", version_base="1.3")
        with initialized:
            yield


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


def compose(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration, with Hydra's own node. Raise InputError that explains every wrong override."""
    owner = GlobalHydra.instance().hydra
    assert owner is not None
    if messages := explain_keys(overrides, owner.config_loader):
        raise InputError(*messages)
    with explained(overrides):
        return owner.compose_config("config", list(overrides), run_mode=RunMode.RUN, with_log_configuration=False)


@contextmanager
def explained(overrides: Sequence[str]) -> Iterator[None]:
    """Replace an exception that Hydra raises for the overrides by InputError, which explains every wrong override."""
    try:
        yield
    except Exception as error:  # Hydra's own types, and ValueError or YAMLError that it does not catch
        raise InputError(*explain(error, list(overrides), GlobalHydra.instance().config_loader())) from None


def modes_to_compare(chosen: str, key: str = "", named: list[str] | None = None) -> list[str]:
    """Return the modes that the option `key` names, or else all but auto. Raise InputError for an unknown mode.

    mesh is included only if it is named or chosen, because without options it is the same as fsdp.
    """
    known = sorted(GlobalHydra.instance().config_loader().get_group_options("parallel"))
    if named is None:
        return [mode for mode in known if mode not in ("auto", "mesh") or mode == chosen == "mesh"]
    for mode in named:
        if mode not in known:
            raise InputError(f"{key}={named}: unknown mode {mode}{did_you_mean(mode, known)}")
    return named


def for_mode(overrides: Sequence[str], chosen: str, mode: str, dropped: Sequence[str]) -> list[str]:
    """Return the overrides for `mode`, without the top-level keys `dropped` and the options of another chosen mode."""
    without = ("parallel", *dropped)
    kept = [each for each in overrides if each.lstrip("+~").split("=")[0].split(".")[0] not in without]
    options = [each for each in overrides if each.lstrip("+").startswith("parallel.")]
    return [*kept, f"parallel={mode}", *(options if mode == chosen else [])]


def checked(cfg: DictConfig, overrides: Sequence[str]) -> Config:
    """Return the typed and resolved configuration. Raise InputError with every value that is wrong by itself.

    The options of constructors are checked last, because importing these takes seconds.
    """
    choices = cfg.hydra.runtime.choices if "hydra" in cfg else {}  # a job of a sweep has been checked before
    groups = (*GROUPS, *NAMED_GROUPS)
    own: Any = OmegaConf.to_container(OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]))
    unknown = unknown_sizes(own["data"])
    with _as_value_problem(cfg, overrides, choices):
        container = _resolved(own, unknown)
    if messages := check_types(container, choices) or check_values(as_config(container)):
        raise InputError(*messages)
    import_torch()
    if unknown:  # models refer to the sizes
        node = typed_options(container["data"], DESCRIBED["data"])
        with _as_value_problem(cfg, overrides, choices):
            container = _resolved(own, find_sizes(node | dict.fromkeys(unknown), choices))
    container |= {key: typed_options(container[key], DESCRIBED.get(key)) for key in groups}
    optimizer = container["optimizer"]
    if "groups" in optimizer:
        optimizer["groups"] = typed_options(optimizer["groups"], target=optimizer.get("_target_"))
    config = as_config(container)
    if messages := check_input(config, choices) + check_resumable(config, choices):
        raise InputError(*messages)
    return apply_debug(config)


@contextmanager
def _as_value_problem(cfg: DictConfig, overrides: Sequence[str], choices: Mapping[str, str]) -> Iterator[None]:
    """Replace an exception of OmegaConf by InputError, which names the wrong value."""
    try:
        yield
    except OmegaConfBaseException as error:
        raise InputError(value_problem(cfg, error, overrides, choices)) from None


def _resolved(own: dict[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without references, with the types of the schema, and with these sizes of the data."""
    groups = (*GROUPS, *NAMED_GROUPS)
    if sizes:
        own = {**own, "data": {**own["data"], **sizes}}
    # Resolved without types: an environment variable is always text, which is converted afterwards.
    container: Any = OmegaConf.to_container(OmegaConf.create(own), resolve=True)
    container = typed_keys(container)
    typed: Any = OmegaConf.to_container(OmegaConf.merge(Config, container))  # checks the keys and the types
    return {key: container[key] if key in groups else value for key, value in typed.items()}
