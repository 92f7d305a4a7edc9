"""What was typed becomes one configuration, composed, typed, resolved and checked."""

from collections.abc import Sequence
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.debugging import for_debugging
from runner.config.diagnostics.overrides import explain, unchosen, unknown_keys
from runner.config.diagnostics.references import reference_problem, without_target
from runner.config.renamed_targets import rename_targets
from runner.config.resumable import check_resumable
from runner.config.schema import GROUPS, KEYS, Config, as_config
from runner.config.validate import check_input, check_types
from runner.errors import InputError


def compose(overrides: Sequence[str]) -> DictConfig:
    """The configuration with Hydra's own node. Raises InputError that explains every wrong override."""
    owner = GlobalHydra.instance().hydra
    assert owner is not None
    try:
        cfg = owner.compose_config(
            config_name="config", overrides=list(overrides), run_mode=RunMode.RUN, with_log_configuration=False
        )
    except Exception as error:  # Hydra's own kinds, and ValueError or YAMLError where it did not look
        raise InputError(*explain(error, list(overrides), GlobalHydra.instance().config_loader())) from None
    return cfg


def options_of(group: str) -> list[str]:
    """What can be chosen for the group."""
    return sorted(GlobalHydra.instance().config_loader().get_group_options(group))


def checked(cfg: DictConfig, overrides: Sequence[str]) -> Config:
    """The typed and resolved configuration. Raises InputError with every value that is wrong by itself."""
    if messages := unknown_keys(cfg, (*KEYS, "hydra"), list(overrides)) + unchosen(cfg, GROUPS, list(overrides)):
        raise InputError(*messages)
    if messages := without_target(cfg, GROUPS):
        raise InputError(*messages)
    try:
        container: Any = rename_targets(OmegaConf.to_container(OmegaConf.masked_copy(cfg, list(KEYS)), resolve=True))
    except OmegaConfBaseException as error:
        raise InputError(reference_problem(cfg, error, overrides)) from None
    if messages := check_types(container):
        raise InputError(*messages)
    config = as_config(container)
    choices = cfg.hydra.runtime.choices if "hydra" in cfg else {}  # a job as Hydra hands it over was checked before
    if messages := check_input(config, choices) + check_resumable(config, choices):
        raise InputError(*messages)
    return for_debugging(config)
