"""Explanations of wrong overrides: one line each, which begins with the override."""

import contextlib
import dataclasses
import re
import shlex
from collections.abc import Collection, Sequence

from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from runner.config.diagnostics.keys import key_names, key_problem, near_key, one_line
from runner.config.schema import GROUPS, KEYS, NAMED_GROUPS
from runner.errors import did_you_mean

_DIRECTORIES = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.job.chdir", "hydra.output_subdir")
_SEARCH_PATH = "hydra.searchpath="
# Two groups with similar names: the other one, and what its options do.
_CONFUSED_WITH = {
    "hydra/launcher": ("launcher", "starts the processes of one run"),
    "launcher": ("hydra/launcher", "decides where the jobs of a sweep run"),
}


def explain(error: Exception, overrides: Sequence[str], config_loader: ConfigLoader) -> list[str]:
    """Return a line for every wrong override, or the message of `error`, with which Hydra refused the first one.

    The overrides are those of one run or of one job of a sweep, each with one value.
    """
    try:
        messages = _Explanation(overrides, config_loader).messages()
    except Exception:  # the search path or the default configuration is invalid
        messages = []
    return messages or [_original_message(error, overrides)]


class _Explanation:
    """The problems of the overrides, all of which it examines although Hydra raises at the first one."""

    def __init__(self, overrides: Sequence[str], loader: ConfigLoader):
        self._overrides, self._loader = overrides, loader
        self._parser = OverridesParser.create(loader)
        self._search_path = [line for line in overrides if line.startswith(_SEARCH_PATH)]

    def messages(self) -> list[str]:
        problems: dict[str, str | None] = dict.fromkeys(self._overrides)
        chosen: dict[str, Override] = {}
        keys: dict[str, Override] = {}
        for line in self._overrides:
            try:
                override: Override | None = self._parser.parse_overrides([line])[0]
            except HydraException:
                override = None
            if override is None or not override.key_or_group:
                problems[line] = self._grammar_problem(line)
                continue
            is_choice = bool(self._options(override.key_or_group)) and not isinstance(override.value(), dict)
            if override.is_sweep_override():
                problems[line] = _sweep_problem(override, is_choice)
            elif not is_choice:
                keys[line] = override
            elif not (problem := self._option_problem(override)):
                chosen[line] = override
            else:
                problems[line] = problem
        # In this mode a mandatory group without a choice stays missing.
        try:
            cfg = self._loader.load_configuration("config", [*self._search_path, *chosen], RunMode.MULTIRUN)
        except Exception as error:  # besides its own exceptions, ValueError, and YAMLError for a broken file
            reason = _composition_problem(error)
            about = [line for line in chosen if len(chosen) == 1 or chosen[line].key_or_group in reason]
            problems |= {line: reason for line in about[:1]}
        else:
            problems |= {line: key_problem(cfg, override, self._groups()) for line, override in keys.items()}
        return [_join(line, problem) for line, problem in problems.items() if problem]

    def _options(self, group: str, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
        # Without the name of the main file, which Hydra would read again for each group.
        return self._loader.get_group_options(group, kind, None, self._search_path)

    def _groups(self) -> list[str]:
        return self._options("", ObjectType.GROUP)

    def _option_problem(self, override: Override) -> str | None:
        """Return why the value is not an option of the group."""
        group, value = override.key_or_group, override.value()
        if override.is_delete():
            return None
        if override.is_force_add():
            return f"a group takes no ++; type {group}={value}"
        if override.is_add() and group in (*GROUPS, *NAMED_GROUPS, "experiment"):
            return f"{group} is among the defaults already; type {group}={value}"
        for name in value if isinstance(value, list) else [value]:
            # An option may be in a subdirectory of its group: model=vision/convnet.
            directory, _, option = f"{group}/{name}".removesuffix(".yaml").rpartition("/")
            if isinstance(name, str) and option in self._options(directory):
                continue
            options = self._options(group)
            other, effect = _CONFUSED_WITH.get(group, ("", ""))
            if other and name in self._options(other):
                return f"{name} {effect}: type {other}={name}; {group} takes {', '.join(options)}"
            word = str(name) if name is not None else "none" if "none" in options else ""
            return f"no such {group.rpartition('/')[2]}{did_you_mean(word, options)}"
        return None

    def _grammar_problem(self, line: str) -> str:
        key, equals, value = line.partition("=")
        if key and not equals:
            if options := self._options(line):
                return f"no value; type {line}=OPTION ({', '.join(options)})"
            of_group = [group for group in self._groups() if line in self._options(group)]
            return f"no value; did you mean {of_group[0]}={line}?" if of_group else f"no value; type {line}=VALUE"
        if any(value.count(left) != value.count(right) for left, right in ("[]", "{}")):
            return "a bracket is not closed"
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        whole = f'{key}="{escaped}"'
        parts = f"{key}={_quote_parts(value)}"  # differs for a list or a mapping
        for quoted in (parts, whole) if key else ():
            with contextlib.suppress(HydraException):
                self._parser.parse_overrides([quoted])
                what = "with = in it" if "=" in value else "with such characters"
                return f"a value {what} must be quoted; type {shlex.quote(quoted)}"
        return "must be KEY=VALUE"


def unknown_keys(cfg: DictConfig, allowed: Collection[str], overrides: Sequence[str]) -> list[str]:
    """Return a line for each key that was added by + or a file but is not read, and for each key removed by ~."""
    names = [str(name) for name in cfg if name != "hydra"]
    unknown = [name for name in names if name not in allowed]
    for name in names:
        schema = OmegaConf.get_type(cfg, name)
        if dataclasses.is_dataclass(schema):
            fields = {field.name for field in dataclasses.fields(schema)}
            unknown += [f"{name}.{inner}" for inner in cfg[name] or () if inner not in fields]
    messages = []
    for key in unknown:
        lines = [line for line in overrides if _within(_key(line), key) or _within(key, _key(line))]
        others = [name for name in [*key_names(cfg), *allowed] if not _within(name, key)]
        where = lines[-1] if lines else f"{key} (in a configuration file)"
        messages.append(f"{where}: no such key{near_key(key, others)}")
    return messages + [
        f"{line}: every run needs {_key(line)}; leave this out"
        for line in overrides
        if line.startswith("~") and _key(line) in allowed and _key(line) not in cfg
    ]


def unchosen(cfg: DictConfig, groups: Collection[str], overrides: Sequence[str]) -> list[str]:
    """Return a line for each group that is assigned a list: Hydra merges the options, and records no choice."""
    if "hydra" not in cfg:
        return []  # a job of a sweep, which was checked when the sweep started
    lines = {_key(line): line for line in overrides}
    return [
        f"{lines.get(group, group)} must be one option; to run several type -m {group}=ONE,OTHER"
        for group in groups
        if group not in cfg.hydra.runtime.choices and not lines.get(group, "").startswith("~")
    ]


def refuse_overrides(overrides: Sequence[str]) -> list[str]:
    """Return a line for each override that Hydra would accept although it must not be set."""
    messages = []
    for line in overrides:
        key, value = _key(line), line.partition("=")[2]
        if any(_within(d, key) and (d == key or d.rpartition(".")[2] in value) for d in _DIRECTORIES):
            messages.append(f"{line}: outputs and name decide the directory; type outputs=DIR or name=NAME")
        elif key == "hydra.launcher":
            messages.append(
                f"{line}: type launcher={value} for how the processes of one run start, "
                f"hydra/launcher={value} for where the jobs of a sweep run"
            )
    return messages


def given_twice(overrides: Sequence[str]) -> list[str]:
    """Return a line for each repeated key, of which Hydra would silently use the last; not for recorded overrides."""
    keys = [line.lstrip("+~").partition("=")[0] for line in overrides]  # GROUP@PACKAGE= is another choice than GROUP=
    return [
        f"{line}: {key} is given twice ({overrides[keys.index(key)]}); keep one"
        for position, (key, line) in enumerate(zip(keys, overrides, strict=True))
        if keys.index(key) < position
    ]


def _sweep_problem(override: Override, is_choice: bool) -> str:
    if override.is_hydra_override():
        return "a sweep cannot go over Hydra's own keys; type one value"
    if override.value_type != ValueType.SIMPLE_CHOICE_SWEEP or is_choice:
        return "a sweep needs -m"
    return f"a sweep needs -m; for one list type {override.get_key_element()}=[{override.get_value_string()}]"


def _quote_parts(value: str) -> str:
    """Return a list or a mapping with quotes around the values that Hydra's grammar does not accept."""
    if not value.startswith(("[", "{")):
        return value
    return re.sub(r"[^][{}:,\s\"']*[^][{}:,\s\"'\w./%+*@?|$-][^][{}:,\s\"']*", r'"\g<0>"', value)


def _composition_problem(error: Exception) -> str:
    """Return why the choices do not compose, with the nearest key if a file sets a missing one."""
    missing = error.__context__
    if not isinstance(missing, (ConfigKeyError, ConfigAttributeError)):
        return _original_message(error, ())
    return f"{one_line(error)}{near_key(str(missing.full_key), KEYS)}"


def _original_message(error: Exception, overrides: Sequence[str]) -> str:
    """Return Hydra's message in one line, with the override that it is about."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key, message = str(getattr(cause, "full_key", None) or ""), one_line(cause)
    about = [line for line in overrides if _key(line) == key]
    return f"{about[-1]}: {message}" if about else f"{message} ({key})" if key else message


def _join(subject: str, problem: str) -> str:
    return f"{subject} {problem}" if problem.startswith("must ") else f"{subject}: {problem}"


def _key(line: str) -> str:
    return line.lstrip("+~").partition("=")[0].partition("@")[0]


def _within(key: str, outer: str) -> bool:
    return f"{key}.".startswith(f"{outer}.")
