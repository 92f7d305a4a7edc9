"""What the files of the chosen options leave out or leave open: a class to call, and references that lead nowhere."""

import contextlib
import re
from collections.abc import Collection, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from runner.config.diagnostics.keys import key_names, near_key
from runner.config.own_folders import file_of

_REFERENCE = re.compile(r"\$\{([^${}:]+)\}")


def without_target(cfg: DictConfig, groups: Collection[str]) -> list[str]:
    """A line for each group whose option names no class."""
    return [
        f"{group}={_choice(cfg, group)}: {_file(cfg, group)} has no _target_; write `_target_: MODULE.CLASS` into it"
        for group in groups
        if not OmegaConf.is_missing(cfg, group)
        and isinstance(node := cfg._get_node(group), DictConfig)
        and not node._is_none()
        and not node._is_interpolation()
        and "_target_" not in node
    ]


def reference_problem(cfg: DictConfig, error: OmegaConfBaseException, overrides: Sequence[str]) -> str:
    """Which key's reference cannot be resolved, where it stands and why, in one line."""
    key = str(error.full_key or "")
    raw = _raw(cfg, key)
    typed = any(line.lstrip("+").partition("=")[0] == key for line in overrides)
    place = "" if typed else f" in {_file(cfg, key.split('.')[0])}"
    subject = f"{key}={raw}{place}" if raw is not None else key
    reason = str(error).splitlines()[0]
    if reason.startswith(("Recursive", "Interpolation to parent")):
        return f"{subject}: refers back to itself ({' -> '.join(_way(cfg, key))}); give one of them a value"
    if isinstance(error, InterpolationKeyError) and (found := re.search(r"'([^']+)'", reason)):
        return f"{subject}: there is no {found[1]}{near_key(found[1], key_names(cfg))}"
    return f"{subject}: {reason}"


def _way(cfg: DictConfig, key: str) -> list[str]:
    """The keys from one to itself, by the first reference of each; a reference to what holds a key ends there."""
    way = [key]
    while (found := _REFERENCE.search(str(_raw(cfg, way[-1])))) and len(way) < 10:
        way.append(found[1])
        if way[-1] in way[:-1] or f"{key}.".startswith(f"{way[-1]}."):
            break
    return way


def _raw(cfg: DictConfig, key: str) -> Any:
    node: Any = OmegaConf.to_container(cfg, resolve=False)
    with contextlib.suppress(KeyError, IndexError, TypeError):
        for part in re.findall(r"[^.\[\]]+", key):
            node = node[int(part)] if isinstance(node, list) else node[part]
        return node
    return None


def _choice(cfg: DictConfig, group: str) -> str:
    """The option that was chosen; a job as Hydra hands it over does not say."""
    return str(cfg.hydra.runtime.choices.get(group)) if "hydra" in cfg else "OPTION"


def _file(cfg: DictConfig, group: str) -> str:
    return file_of(group, _choice(cfg, group)) or "its file"
