"""Says what is wrong with the overrides that a user typed, one line each that begins with the override."""

import dataclasses
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from itertools import islice, product

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from runner.config.diagnostics.groups import Choices, choice_problem, option_problem
from runner.config.diagnostics.keys import key_names, key_problem, near_key

_COMBINATIONS = 32  # of the choices in a sweep; composing one takes some 0.05 s
_DIRECTORIES = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.job.chdir", "hydra.output_subdir")


@dataclasses.dataclass(frozen=True, eq=False)
class _Typed:
    """One value of an override: a sweep has several."""

    position: int
    line: str  # the whole override as typed
    override: Override  # with this value alone

    @property
    def is_swept(self) -> bool:
        return self.override.input_line != self.line

    def say(self, problem: str) -> tuple[int, str]:
        if self.is_swept and not problem.startswith("no such key"):  # which value of the sweep it is about
            problem = _join(self.override.get_value_string(), problem)
        return self.position, _join(self.line, problem)


def explain(
    error: Exception, overrides: Sequence[str], config_loader: ConfigLoader, config_name: str = "config"
) -> list[str]:
    """A line for every wrong override, whichever of them composing stopped at; Hydra's own words if none is found."""
    parser = OverridesParser.create(config_loader)
    choices = Choices(config_loader, config_name, [line for line in overrides if _is_searchpath(line, parser)])
    told: list[tuple[int, str]] = []
    groups: list[list[_Typed]] = []
    keys: list[_Typed] = []
    for position, line in enumerate(overrides):
        try:
            override = parser.parse_overrides([line])[0]
            if not override.key_or_group:
                raise HydraException
            values = [_Typed(position, line, single) for single in _singles(override, parser)]
        except HydraException:
            told.append((position, _join(line, _grammar_problem(line, parser, choices))))
            continue
        is_choice = choices.is_group(override.key_or_group) and not isinstance(override.value(), dict)
        if override.is_sweep_override() and override.is_hydra_override():
            told.append((position, f"{line}: a sweep cannot go over Hydra's own keys; type one value"))
            continue
        if override.is_sweep_override() and "--multirun" in str(error):  # so Hydra says that no sweep was asked for
            could_be_list = override.value_type == ValueType.SIMPLE_CHOICE_SWEEP and not is_choice
            as_list = f"; for one list type {override.get_key_element()}=[{override.get_value_string()}]"
            told.append((position, f"{line}: a sweep needs -m{as_list if could_be_list else ''}"))
        if not is_choice:
            keys += values
            continue
        problems = {typed: option_problem(choices, typed.override) for typed in values}
        told += [typed.say(problem) for typed, problem in problems.items() if problem]
        if right := [typed for typed, problem in problems.items() if not problem]:
            groups.append(right)
    told += _problems_over(choices, groups, keys)
    messages = [message for _, message in sorted(dict.fromkeys(told), key=lambda item: item[0])]
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
        if group not in cfg.hydra.runtime.choices
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


def three_lines(messages: Sequence[str]) -> list[str]:
    return list(messages) if len(messages) <= 3 else [*messages[:2], f"... and {len(messages) - 2} more"]


def tell(messages: Sequence[str]) -> None:
    """Say what is wrong with the input, in three lines at most."""
    for line in three_lines(messages):
        print(line, file=sys.stderr, flush=True)


def _problems_over(choices: Choices, groups: list[list[_Typed]], keys: list[_Typed]) -> list[tuple[int, str]]:
    """What is wrong under the combinations of a sweep: a key may exist under one choice and not under another."""
    combinations = list(islice(product(*groups), _COMBINATIONS))
    where: dict[tuple[int, str], list[str]] = {}
    for chosen in combinations:
        swept = " ".join(str(typed.override.input_line) for typed in chosen if typed.is_swept)
        for problem in dict.fromkeys(_problems(choices, chosen, keys)):
            where.setdefault(problem, []).append(swept)
    told = [problem for problem, those in where.items() if len(those) == len(combinations)]
    for (position, message), those in where.items():
        if all(position != other for other, _ in told):  # one example of a combination is enough
            told.append((position, f"{message} (with {those[0]})"))
    return told


def _problems(choices: Choices, chosen: Sequence[_Typed], keys: Sequence[_Typed]) -> Iterator[tuple[int, str]]:
    """What is wrong under one combination of choices, each of which is an option of its group."""
    cfg, refused = choices.compose_most([str(typed.override.input_line) for typed in chosen])
    if cfg is None:
        return
    added: list[str] = []
    for typed in chosen:
        if error := refused.get(str(typed.override.input_line)):
            problem = choice_problem(typed.override, cfg.hydra.runtime.choices, added)
            yield typed.say(problem or _file_problem(error, cfg))
        elif typed.override.is_add():
            added.append(typed.override.key_or_group)
    groups = list(choices.groups()) if keys else []
    for typed in keys:
        if problem := key_problem(cfg, typed.override, groups):
            yield typed.say(problem)


def _singles(override: Override, parser: OverridesParser) -> list[Override]:
    if not override.is_sweep_override() or override.is_interval_sweep():
        return [override]
    lines = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    return parser.parse_overrides(lines)


def _is_searchpath(line: str, parser: OverridesParser) -> bool:
    if _key(line) != "hydra.searchpath":
        return False
    try:
        return isinstance(parser.parse_overrides([line])[0].value(), list)
    except HydraException:
        return False


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
    quoted = f'{key}="{escaped}"'
    try:
        parser.parse_overrides([quoted])
    except HydraException:
        return "must be KEY=VALUE"
    what = "with = in it" if "=" in value else "with such characters"
    return f"a value {what} must be quoted; type {shlex.quote(quoted)}"


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
