"""Explanations of wrong overrides: one line each, which begins with the override."""

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from runner.config.custom_dirs import searched_dirs
from runner.config.diagnostics.keys import key_of, key_problem, near_key, one_line, within
from runner.config.diagnostics.option_files import ignored_file
from runner.config.schema import GROUPS, KEYS, NAMED_GROUPS, SECTIONS
from runner.errors import did_you_mean
from runner.paths import CONF

_DIRECTORIES = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.job.chdir", "hydra.output_subdir")
_SEARCH_PATH = "hydra.searchpath="
_HYDRA_GROUPS = ("hydra/launcher", "hydra/sweeper")


def explain(error: Exception, overrides: Sequence[str], config_loader: ConfigLoader) -> list[str]:
    """Return a line for every wrong override, or the message of `error`, with which Hydra refused the first one.

    The overrides are those of one run or of one job of a sweep, each with one value.
    """
    try:
        messages = _Explanation(overrides, config_loader).messages()
    except Exception:  # the search path or the default configuration is invalid
        messages = []
    return messages or [_composition_problem(error)]


def explain_keys(overrides: Sequence[str], config_loader: ConfigLoader) -> list[str]:
    """Return a line for every wrong override if one of them sets a key that probably does not exist; else nothing.

    It saves the composition by Hydra, which would fail and takes as long as the composition for the messages.
    """
    roots = {key_of(line).partition(".")[0] for line in overrides} - {*KEYS, "hydra"}
    with contextlib.suppress(Exception):  # the search path, a file or the default configuration is invalid
        is_nested = any(map(_is_unknown, overrides))
        if not roots and not is_nested:
            return []
        explanation = _Explanation(overrides, config_loader)
        if is_nested or not all("/" in root or explanation.options_of(root) for root in roots):
            return explanation.messages()
    return []


def _is_unknown(line: str) -> bool:
    """Return True if the override sets a key of a section or a group whose name is not in the schema or any option."""
    section, _, rest = key_of(line).partition(".")
    name = rest.rpartition(".")[2]
    if not name or line.startswith(("+", "~")):
        return False
    if section in SECTIONS:
        return name not in vars(SECTIONS[section]())
    files = [file for each in (*searched_dirs(), str(CONF)) for file in Path(each, section).rglob("*.yaml")]
    return bool(files) and not any(name in file.read_text(errors="replace") for file in files)


def refuse_overrides(overrides: Sequence[str]) -> list[str]:
    """Return a line for each override on the command line that Hydra would accept although it must not be set."""
    messages = []
    first: dict[str, str] = {}  # by key; GROUP@PACKAGE is another key than GROUP
    for line in overrides:
        key, value = key_of(line), line.partition("=")[2]
        repeated = first.setdefault(line.lstrip("+~").partition("=")[0], line)
        if any(within(each, key) and (each == key or each.rpartition(".")[2] in value) for each in _DIRECTORIES):
            messages.append(f"{line}: outputs and name decide the directory; type outputs=DIR or name=NAME")
        elif key == "hydra.launcher":
            messages.append(f"{line}: no such key; did you mean hydra/launcher={value} or launcher={value}?")
        elif key in GROUPS and value.startswith("["):
            messages.append(f"{line} must be one option; to run several type -m {key}=ONE,OTHER")
        elif line.startswith("~") and key in KEYS and key not in NAMED_GROUPS:
            messages.append(f"{line}: every run needs {key}; leave this out")
        elif repeated is not line:
            messages.append(f"{line}: {key} is given twice ({repeated}); keep one")
    return messages


class _Explanation:
    """Explanation of every wrong override; Hydra itself raises an exception for the first one."""

    def __init__(self, overrides: Sequence[str], loader: ConfigLoader):
        self._overrides, self._loader = overrides, loader
        self._parser = OverridesParser.create(loader)
        self._search_path = [line for line in overrides if line.startswith(_SEARCH_PATH)]

    def messages(self) -> list[str]:
        problems: dict[str, str | None] = {}
        chosen: dict[str, Override] = {}
        keys: dict[str, Override] = {}
        for line in self._overrides:
            override = self._parse(line)
            if override is None:
                problems[line] = self._grammar_problem(line)
            elif override.is_sweep_override():
                problems[line] = self._sweep_problem(override)
            elif not self.options_of(override.key_or_group) or isinstance(override.value(), dict):
                keys[line] = override
            elif problem := self._option_problem(override):
                problems[line] = problem
            else:
                chosen[line] = override
        if not chosen and not keys:
            return self._lines(problems)
        # In this mode a mandatory group without a choice stays missing.
        try:
            cfg = self._loader.load_configuration("config", [*self._search_path, *chosen], RunMode.MULTIRUN)
        except Exception as error:  # besides its own exceptions, ValueError, and YAMLError for a broken file
            reason = _composition_problem(error)
            about = [line for line, each in chosen.items() if f"/{each.key_or_group}/{each.value()}." in reason]
            about += [line for line in chosen if len(chosen) == 1 or chosen[line].key_or_group in reason]
            problems |= {line: reason for line in about[:1]}
        else:
            problems |= {line: key_problem(cfg, override, self._groups()) for line, override in keys.items()}
        return self._lines(problems)

    def _lines(self, problems: Mapping[str, str | None]) -> list[str]:
        return [f"{line}: {problem}" for line in self._overrides if (problem := problems.get(line))]

    def _parse(self, line: str) -> Override | None:
        with contextlib.suppress(HydraException):
            override = self._parser.parse_overrides([line])[0]
            return override if override.key_or_group else None
        return None

    def options_of(self, group: str, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
        if not self._search_path:
            repository: Any = self._loader.repository  # type: ignore[attr-defined]
            return list(repository.get_group_options(group, kind))  # the loader copies the repository for each group
        # Without the name of the main file, which Hydra would read again for each group.
        return self._loader.get_group_options(group, kind, None, self._search_path)

    def _groups(self) -> list[str]:
        return self.options_of("", ObjectType.GROUP)

    def _choose(self, option: str) -> str | None:
        """Return the override that chooses the option in the first group that has it."""
        groups = (group for group in (*self._groups(), *_HYDRA_GROUPS) if option in self.options_of(group))
        return next((f"{group}={option}" for group in groups), None)

    def _option_problem(self, override: Override) -> str | None:
        group, value = override.key_or_group, override.value()
        for name in value if isinstance(value, list) else [value]:
            # An option may be in a subdirectory of its group: model=vision/convnet.
            directory, _, option = f"{group}/{name}".removesuffix(".yaml").rpartition("/")
            if override.is_delete() or (isinstance(name, str) and option in self.options_of(directory)):
                continue
            if name is None and not override.is_add() and group not in (*GROUPS, *NAMED_GROUPS, *_HYDRA_GROUPS):
                return f"a group cannot be null; type ~{group}"  # an optional group, such as experiment
            options = self.options_of(group)
            what = f"no such {group.rpartition('/')[2]}"
            if ignored := ignored_file(searched_dirs(), f"{directory}/{option}"):
                return ignored
            if elsewhere := self._choose(str(name)):
                return f"{what}; did you mean {elsewhere}?"
            return f"{what}{did_you_mean('none' if name is None else str(name), options)}"
        return None

    def _sweep_problem(self, override: Override) -> str:
        if override.is_hydra_override():
            return "a sweep cannot vary Hydra's own keys; type one value"
        if override.value_type != ValueType.SIMPLE_CHOICE_SWEEP or self.options_of(override.key_or_group):
            return "a sweep needs -m"
        return f"a sweep needs -m; for one list type {override.get_key_element()}=[{override.get_value_string()}]"

    def _grammar_problem(self, line: str) -> str:
        key, equals, value = line.partition("=")
        if not equals:
            choice = self._choose(line)
            return f"no value; did you mean {choice}?" if choice else f"no value; type {line}=VALUE"
        if value.startswith(("[", "{")):
            return "a bracket is not closed, or a value in it with special characters is not quoted"
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        quoted = f'{key}="{escaped}"'
        if self._parse(quoted) is None:
            return "an override must be KEY=VALUE"
        return f"the value must be quoted; type {shlex.quote(quoted)}"


def _composition_problem(error: Exception) -> str:
    """Return the error of Hydra in one line, with the nearest key if a file sets a missing one."""
    missing = error.__context__
    if isinstance(missing, (ConfigKeyError, ConfigAttributeError)):
        return one_line(error) + near_key(str(missing.full_key), KEYS)
    return one_line(error)
