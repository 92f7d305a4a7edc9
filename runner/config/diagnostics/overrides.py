"""Says what is wrong with the overrides that a user typed, one line each that begins with the override."""

import contextlib
import dataclasses
import re
import shlex
from collections.abc import Collection, Sequence

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from runner.config.diagnostics.groups import Choices, choice_problem, option_problem
from runner.config.diagnostics.keys import key_names, key_problem, near_key

_DIRECTORIES = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.job.chdir", "hydra.output_subdir")


def explain(error: Exception, overrides: Sequence[str], config_loader: ConfigLoader) -> list[str]:
    """A line for every wrong override, whichever of them composing stopped at; Hydra's own words if none is found.

    overrides: of one run, or of one job of a sweep; each has one value.
    """
    parser = OverridesParser.create(config_loader)
    parsed = {line: _parse(line, parser) for line in overrides}
    choices = Choices(config_loader, [line for line, override in parsed.items() if _adds_folders(override)])
    problems: dict[str, str | None] = dict.fromkeys(overrides)
    chosen: dict[str, Override] = {}
    keys: dict[str, Override] = {}
    for line, override in parsed.items():
        if override is None:
            problems[line] = _grammar_problem(line, parser, choices)
            continue
        is_choice = choices.is_group(override.key_or_group) and not isinstance(override.value(), dict)
        if override.is_sweep_override():
            problems[line] = _sweep_problem(override, is_choice)
        elif not is_choice:
            keys[line] = override
        elif not (problem := option_problem(choices, override)):
            chosen[line] = override
        else:
            problems[line] = problem
    cfg, refused = choices.compose_most(list(chosen))
    if cfg is not None:
        for line, reason in refused.items():
            taken = cfg.hydra.runtime.choices
            problems[line] = choice_problem(chosen[line], taken) or _file_problem(reason, cfg)
        groups = list(choices.groups()) if keys else []
        problems |= {line: key_problem(cfg, override, groups) for line, override in keys.items()}
    messages = [_join(line, problem) for line, problem in problems.items() if problem]
    return messages or [_in_its_words(error, overrides)]


def unknown_keys(cfg: DictConfig, allowed: Collection[str], overrides: Sequence[str]) -> list[str]:
    """Keys that composed, by a + or a file, although nothing reads them; and keys that a ~ took from what is read."""
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
    """Groups without an option of their own: Hydra merges the options of a list, and then none is chosen."""
    if "hydra" not in cfg:
        return []  # a job as Hydra hands it over; it was asked about when the sweep was opened
    lines = {_key(line): line for line in overrides}
    return [
        f"{lines.get(group, group)} must be one option; to run several type -m {group}=ONE,OTHER"
        for group in groups
        if group not in cfg.hydra.runtime.choices and not lines.get(group, "").startswith("~")
    ]


def refuse_overrides(overrides: Sequence[str]) -> list[str]:
    """Overrides that Hydra would obey, to no good."""
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
    """Hydra lets the last one win without a word. Only for what was typed at once: resume= types on top of a record."""
    keys = [line.lstrip("+~").partition("=")[0] for line in overrides]  # GROUP@PLACE= is another choice than GROUP=
    return [
        f"{line}: {key} is given twice ({overrides[keys.index(key)]}); keep one"
        for position, (key, line) in enumerate(zip(keys, overrides, strict=True))
        if keys.index(key) < position
    ]


def _parse(line: str, parser: OverridesParser) -> Override | None:
    """None for what is no override by the grammar."""
    try:
        override = parser.parse_overrides([line])[0]
    except HydraException:
        return None
    return override if override.key_or_group else None


def _adds_folders(override: Override | None) -> bool:
    """Whether it names folders of configuration, in a way that Hydra can follow."""
    if override is None or override.key_or_group != "hydra.searchpath":
        return False
    folders = override.value()
    return isinstance(folders, list) and all(isinstance(folder, str) for folder in folders)


def _sweep_problem(override: Override, is_choice: bool) -> str:
    if override.is_hydra_override():
        return "a sweep cannot go over Hydra's own keys; type one value"
    if override.value_type != ValueType.SIMPLE_CHOICE_SWEEP or is_choice:
        return "a sweep needs -m"
    return f"a sweep needs -m; for one list type {override.get_key_element()}=[{override.get_value_string()}]"


def _grammar_problem(line: str, parser: OverridesParser, choices: Choices) -> str:
    key, equals, value = line.partition("=")
    if not key:
        return "must be KEY=VALUE"
    if not equals:
        if choices.is_group(line):
            return f"no value; type {line}=OPTION ({', '.join(choices.options(line))})"
        of_group = [group for group in choices.groups() if line in choices.options(group)]
        return f"no value; did you mean {of_group[0]}={line}?" if of_group else f"no value; type {line}=VALUE"
    if any(value.count(left) != value.count(right) for left, right in ("[]", "{}")):
        return "a bracket is not closed"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    whole = f'{key}="{escaped}"'
    parts = f"{key}={_quote_parts(value)}"  # of a list or a mapping; else the same
    for quoted in (parts, whole):
        with contextlib.suppress(HydraException):
            parser.parse_overrides([quoted])
            what = "with = in it" if "=" in value else "with such characters"
            return f"a value {what} must be quoted; type {shlex.quote(quoted)}"
    return "must be KEY=VALUE"


def _quote_parts(value: str) -> str:
    """A list or a mapping with quotes around those of its values that Hydra does not take as they are."""
    if not value.startswith(("[", "{")):
        return value
    return re.sub(r"[^][{}:,\s\"']*[^][{}:,\s\"'\w./%+*@?|$-][^][{}:,\s\"']*", r'"\g<0>"', value)


def _file_problem(error: Exception, cfg: DictConfig) -> str:
    """A chosen file that is itself wrong."""
    context = error.__context__
    file = re.match(r"In '([^']+)': ", str(error))
    if file and isinstance(context, (ConfigKeyError, ConfigAttributeError)):
        key = str(context.full_key)
        return f"{file[1]}.yaml sets {key}, and there is no such key{near_key(key, key_names(cfg))}"
    return _in_its_words(error, ())


def _in_its_words(error: Exception, overrides: Sequence[str]) -> str:
    """The first lines of what Hydra, OmegaConf or the YAML reader says, as one."""
    if isinstance(error, RecursionError):
        return "a file's defaults lead back to it; one that starts from a built-in option needs another name"
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("object_type", "reference_type", "full_key"))]
    end = next((n for n, line in enumerate(kept) if line.startswith(("Config search path", "See https"))), 3)
    message = " ".join(kept[: min(end, 3)]) or type(error).__name__
    key = str(getattr(cause, "full_key", None) or "")
    about = [line for line in overrides if _key(line) == key]
    return f"{about[-1]}: {message}" if about else f"{message} ({key})" if key else message


def _join(subject: str, problem: str) -> str:
    return f"{subject} {problem}" if problem.startswith("must ") else f"{subject}: {problem}"


def _key(line: str) -> str:
    return line.lstrip("+~").partition("=")[0].partition("@")[0]


def _within(key: str, outer: str) -> bool:
    return f"{key}.".startswith(f"{outer}.")
