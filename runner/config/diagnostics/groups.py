"""What the configuration folders offer, asked of Hydra: groups, their options, and what choices compose to."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig

from runner.errors import did_you_mean

# Two groups are taken for each other: the other one's name, and what its options do.
_OTHER_PLACE = {
    "hydra/launcher": ("launcher", "starts the processes of one run"),
    "launcher": ("hydra/launcher", "decides where the jobs of a sweep run"),
}


@dataclass
class Choices:
    """The offers of one search path, to which `searchpath` adds: the typed overrides of hydra.searchpath."""

    loader: ConfigLoader
    searchpath: list[str]
    _listed: dict[tuple[str, ObjectType], list[str]] = field(default_factory=dict)

    def options(self, group: str) -> list[str]:
        return self._list(group, ObjectType.CONFIG)

    def is_group(self, name: str) -> bool:
        parent, _, folder = name.rpartition("/")
        return folder in self._list(parent, ObjectType.GROUP)

    def groups(self, parent: str = "") -> Iterator[str]:
        for folder in self._list(parent, ObjectType.GROUP):
            if not folder.startswith(("_", ".")):
                group = f"{parent}/{folder}" if parent else folder
                if self.options(group):
                    yield group
                yield from self.groups(group)

    def compose(self, lines: Sequence[str]) -> DictConfig:
        """The configuration with these overrides; a group that must be chosen and isn't stays missing."""
        return self.loader.load_configuration("config", [*self.searchpath, *lines], RunMode.MULTIRUN)

    def compose_most(self, lines: Sequence[str]) -> tuple[DictConfig | None, dict[str, Exception]]:
        """The configuration with every line that can be composed, and why the others can't; None if nothing can.

        A choice may bring the group that another one is about, in any order: who fails is tried again until nobody
        gets through. Besides its own exceptions Hydra raises ValueError, and YAMLError for a broken file.
        """
        with contextlib.suppress(Exception):
            return self.compose(lines), {}
        try:
            composed = self.compose([])
        except Exception:
            return None, {}
        good: list[str] = []
        while True:
            waiting = [line for line in lines if line not in good]
            refused: dict[str, Exception] = {}
            for line in waiting:
                try:
                    composed = self.compose([*good, line])
                    good.append(line)
                except Exception as error:
                    refused[line] = error
            if len(refused) == len(waiting):
                return composed, refused

    def _list(self, group: str, kind: ObjectType) -> list[str]:
        if (group, kind) not in self._listed:
            # without the name of the main file, which Hydra would read again for each group
            self._listed[group, kind] = self.loader.get_group_options(group, kind, None, self.searchpath)
        return self._listed[group, kind]


def option_problem(choices: Choices, override: Override) -> str | None:
    """Why what is typed for a group is none of its options."""
    group, value = override.key_or_group, override.value()
    if override.is_delete():
        return None
    if override.is_force_add():
        return f"a group takes no ++; type {group}={value}"
    for name in value if isinstance(value, list) else [value]:
        # an option may lie in a folder of its group: model=vision/convnet
        folder, _, option = f"{group}/{name}".removesuffix(".yaml").rpartition("/")
        if isinstance(name, str) and option in choices.options(folder):
            continue
        options = choices.options(group)
        other, effect = _OTHER_PLACE.get(group, ("", ""))
        if other and name in choices.options(other):
            return f"{name} {effect}: type {other}={name}; {group} takes {', '.join(options)}"
        word = str(name) if name is not None else "none" if "none" in options else ""
        return f"no such {group.rpartition('/')[2]}{did_you_mean(word, options)}"
    return None


def choice_problem(override: Override, taken: Mapping[str, str | None]) -> str | None:
    """Why an existing option cannot be chosen in this way.

    taken: the choices that do compose, by group.
    """
    group, value = override.key_or_group, override.value()
    place = group if override.package is None else f"{group}@{override.package}"
    if override.is_delete():
        return f"{place} is {taken[place]}; type ~{place}" if place in taken else f"no {place} is chosen; take this out"
    if override.is_add():
        return f"{place} is among the defaults already; type {place}={value}" if place in taken else None
    if place in taken:
        return None
    if override.package is not None:
        return f"{group} has no place {override.package}; type {group}={value}"
    return f"{group} is not among the defaults; type +{group}={value}"
