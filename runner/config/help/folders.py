"""The files of a search path: which groups there are, which options each has, and what is taken when none is typed."""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from runner.config.help.yaml_file import File, Key, read

SCHEMA = "runner.config.schema.Config"  # the class that types the keys of the main file


class Folders:
    """Where two folders hold the same file the earlier one counts, as in Hydra; the last one is the runner's own.

    A file is read once, when it is asked for: that is what --help takes its time for.
    """

    def __init__(self, search_path: Sequence[Path]):
        self._search_path = search_path
        self._paths: dict[str, dict[str, Path]] = {}
        self._files: dict[Path, File] = {}
        for folder in reversed(search_path):
            for group, option, path in _options(folder):
                self._paths.setdefault(group, {})[option] = path

    @cached_property
    def main(self) -> File:
        # A user's own config.yaml has no say: see hydra_plugins.runner.own_folders.
        path = next((path for folder in self._search_path[-1:] if (path := folder / "config.yaml").is_file()), None)
        file = read(path) if path else File()
        file.targets = {"": SCHEMA}
        return file

    @cached_property
    def groups(self) -> Mapping[str, Sequence[str]]:
        """The options of each group; the groups of the defaults list come first, in its order."""
        chosen = [group for group in self.main.choices if group in self._paths]
        ordered = chosen + sorted(self._paths.keys() - chosen)
        return {group: sorted(self._paths[group]) for group in ordered}

    def default(self, group: str) -> str | None:
        """What is taken when nothing is typed, "null" where no option is; None for a group outside the defaults."""
        if group in self.main.choices:
            return self.main.choices[group]
        parent, _, inner = group.rpartition("/")  # hydra/sweeper/sampler is a default of hydra/sweeper=optuna
        files = (self.file(parent, option) for option in self.groups.get(parent, ()))
        return next((file.choices[inner] for file in files if inner in file.choices), None)

    def path(self, group: str, option: str) -> Path:
        return self._paths[group][option]

    def file(self, group: str, option: str) -> File:
        path = self._paths[group][option]
        if path not in self._files:
            self._files[path] = read(path)
        return self._files[path]

    def merged(self, group: str, option: str, above: Sequence[str] = ()) -> File:
        """The file, with what it takes over from those of its group that it starts from; `above` start from it."""
        own, above = self.file(group, option), [*above, option]
        keys: dict[str, Key] = {}
        targets: dict[str, str] = {}
        known = [name for name in own.parents if name in self._paths[group] and name not in above]
        parents = [self.merged(group, name, above) for name in known]
        for file in [*parents, own]:
            keys |= {key.name: key for key in file.keys}
            targets |= file.targets
        return File(own.description, own.example, own.notes, own.choices, own.parents, list(keys.values()), targets)


def _options(folder: Path) -> Iterator[tuple[str, str, Path]]:
    """Every group, option and file under the folder; names that begin with _ or . are not for users."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] not in "_.")
        group = Path(parent).relative_to(folder).as_posix()
        for name in files:
            if group != "." and name[0] not in "_." and name.endswith(".yaml"):
                yield group, name.removesuffix(".yaml"), Path(parent, name)
