"""The configuration files of a search path: the groups, their options, their defaults and their keys."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path

from runner.config.diagnostics.signature import parameters_of
from runner.config.diagnostics.type_hints import type_name
from runner.config.help.yaml_file import File, Key, read_file
from runner.paths import CONF

PRESETS = "experiment"  # its files set keys of other groups, which are documented in those groups


class ConfigTree:
    """The files of several directories, the built-in one last. An earlier directory's file hides a later one's."""

    def __init__(self, search_path: Sequence[Path]):
        self._search_path = search_path
        self.paths: dict[str, dict[str, Path]] = {}  # by group and option
        for directory in reversed(search_path):
            for parent, subdirectories, names in os.walk(directory):
                # Names that begin with _ or . are private.
                subdirectories[:] = sorted(name for name in subdirectories if name[0] not in "_.")
                group = Path(parent).relative_to(directory).as_posix()
                for name in names:
                    if group != "." and name[0] not in "_." and name.endswith(".yaml"):
                        self.paths.setdefault(group, {})[name.removesuffix(".yaml")] = Path(parent, name)
        self._read = cache(read_file)

    @cached_property
    def main(self) -> File:
        """The built-in config.yaml; that of a custom directory has no effect."""
        return read_file(self._search_path[-1] / "config.yaml")

    @cached_property
    def groups(self) -> Mapping[str, Sequence[str]]:
        """The options of each group; first the groups of the defaults list, in its order."""
        chosen = [group for group in self.main.choices if group in self.paths]
        return {group: sorted(self.paths[group]) for group in chosen + sorted(self.paths.keys() - chosen)}

    def default(self, group: str) -> str | None:
        """Return the default option, "null" if none is chosen by default, or None for a group outside the defaults."""
        return self.main.choices.get(group)

    def is_chosen(self, group: str) -> bool:
        """Return True if the group is in a defaults list; Hydra's own groups are, though in none of these files."""
        return group in self.main.choices or group.startswith("hydra/")

    def file(self, group: str, option: str) -> File:
        return self._read(self.paths[group][option])

    def merged(self, group: str, option: str, below: Sequence[str] = ()) -> File:
        """Return the file with the keys that it inherits from files of its group; `below` are those that inherit it."""
        file, below = self.file(group, option), [*below, option]
        keys: dict[str, Key] = {}
        targets: dict[str, str] = {}
        inherited = [name for name in file.parents if name in self.paths[group] and name not in below]
        for each in [*(self.merged(group, name, below) for name in inherited), file]:
            keys |= {key.name: key for key in each.keys}
            targets |= each.targets
        return replace(file, keys=[*keys.values()], targets=targets)

    def option_keys(self, group: str, option: str) -> list[Key]:
        """Return the keys of the option, with their names, types and examples on the command line."""
        file, prefix = self.merged(group, option), keys_of(group)
        # A built-in option is described by its file only, because importing its class would import torch.
        is_builtin = self.paths[group][option].is_relative_to(CONF)
        types = {} if is_builtin else _annotated_types(file.targets)
        command = self.example(group, option)
        named = [replace(key, name=prefix + key.name, type=types.get(key.name) or key.type) for key in file.keys]
        return [replace(key, example=f"{command} {key.arguments}") for key in named]

    def example(self, group: str, option: str) -> str:
        return self.file(group, option).example or f"{'' if self.is_chosen(group) else '+'}{group}={option}"


def keys_of(group: str) -> str:
    return "" if group == PRESETS else f"{group.replace('/', '.')}."


def _annotated_types(targets: Mapping[str, str]) -> dict[str, str]:
    """Return the types of the constructors' parameters, by the key of the option."""
    types = {}
    for node, target in targets.items():
        with suppress(ValueError):  # a missing or broken class; a run reports it
            for name, parameter in parameters_of(target).items():
                types[f"{node}.{name}".lstrip(".")] = type_name(parameter.annotation)
    return types
