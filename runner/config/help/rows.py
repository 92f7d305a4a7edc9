"""A row for each key of an option or of the top level: how it is typed, its type, what it is for, and an example."""

import re
from dataclasses import dataclass

from runner.config.diagnostics.signature import PROVIDED
from runner.config.help.constructors import defaults_of, type_of
from runner.config.help.folders import Folders
from runner.config.help.yaml_file import File, Key

PRESETS = "experiment"  # its files set keys of other groups, which are shown where they belong
_SPLITS = ("train", "split")  # how a data set is told which part of the data it is
_PLAIN = {"int": "1", "float": "0.1", "bool": "true"}  # values for an example


@dataclass(frozen=True)
class Row:
    key: str  # dotted, with the group that it is in
    value: str  # the default, as it is typed
    type: str
    comment: str
    example: str  # words of a command that sets it
    is_reference: bool = False
    is_added: bool = False  # its constructor takes it, and its file does not name it

    @property
    def cells(self) -> tuple[str, str, str]:
        return f"{'+' if self.is_added else ''}{self.key}={self.value}", self.type, self.comment


def top_rows(folders: Folders) -> list[Row]:
    return [_row(folders.main, key) for key in folders.main.keys]


def option_rows(folders: Folders, group: str, option: str) -> list[Row]:
    """The keys of the option's file and of those that it starts from; then what else its constructor takes."""
    file = folders.merged(group, option)
    words = f"{example(folders, group, option)} "
    if group == PRESETS:
        return [_row(folders.main, key, words=words) for key in file.keys]
    if folders.main.choices.get(group) == option and not file.example:  # it is taken anyway
        words = ""
    rows = [_row(file, key, keys_of(group), words) for key in file.keys]
    return rows + _added(file, group, words)


def example(folders: Folders, group: str, option: str) -> str:
    """Words of a command that choose the option."""
    return folders.file(group, option).example or f"{'' if is_chosen(folders, group) else '+'}{group}={option}"


def is_chosen(folders: Folders, group: str) -> bool:
    """Whether the group is among the defaults; Hydra's own are, in none of these files."""
    return folders.default(group) is not None or group.startswith("hydra/")


def keys_of(group: str) -> str:
    """What the keys of the group begin with, as they are typed."""
    return f"{group.replace('/', '.')}."


def _added(file: File, group: str, words: str) -> list[Row]:
    """What the constructors take that the file does not name."""
    passed = {*PROVIDED.get(group, ()), *(_SPLITS if group == "data" else ())}
    named = {key.name for key in file.keys}
    rows = []
    for node, target in file.targets.items():
        for name, default in defaults_of(target).items():
            key = f"{node}.{name}" if node else name
            if name in passed or any(f"{other}.".startswith(f"{key}.") for other in named):
                continue
            typed = keys_of(group) + key
            rows.append(Row(typed, default, type_of(target, [name]), "", f"{words}+{typed}={default}", is_added=True))
    return rows


def _row(file: File, key: Key, prefix: str = "", words: str = "") -> Row:
    name, kind = prefix + key.name, _type(file, key)
    typed = words + (key.example or f"{name}={_for_example(key.value, kind)}")
    return Row(name, key.value, kind, key.comment, typed, key.is_reference)


def _type(file: File, key: Key) -> str:
    """By the constructor of the innermost node that the key is in."""
    parts = key.name.split(".")
    for count in range(len(parts) - 1, -1, -1):
        if target := file.targets.get(".".join(parts[:count])):
            return type_of(target, parts[count:])
    return ""


def _for_example(value: str, kind: str) -> str:
    """Another value than the default where one is sure to do, or else the default."""
    if value in ("true", "false"):
        return "false" if value == "true" else "true"
    if value in ("null", "???"):
        return _PLAIN.get(kind.partition(" | ")[0], "VALUE")
    value = value.replace(", ", ",").replace(": ", ":")
    return value if re.fullmatch(r"[\w.,:/+-]+", value) else f"'{value}'"
