"""What --help says of a topic: a group, an option, a key, or the keys that begin with it."""

import re
from collections.abc import Sequence
from pathlib import Path

from runner.config.help.constructors import doc_of
from runner.config.help.folders import SCHEMA, Folders
from runner.config.help.layout import columns
from runner.config.help.overview import overview
from runner.config.help.rows import PRESETS, Row, example, keys_of, option_rows, top_rows
from runner.errors import InputError, did_you_mean, nearest

_KEYS, _ALL = "keys", "all"


def render_help(search_path: Sequence[Path], words: Sequence[str] = (), command: str = "python -m runner") -> str:
    """About each word, or an overview. Raises InputError for a word that names nothing.

    search_path: folders of configuration, the runner's own last.
    """
    topics = _Topics(Folders(search_path), command)
    texts = [topics.about(word) for word in words] or [topics.overview()]
    return "\n".join([*_apart(texts), ""])


class _Topics:
    def __init__(self, folders: Folders, command: str):
        self.folders, self.groups, self.command = folders, folders.groups, command

    def overview(self) -> list[str]:
        return overview(self.folders, self.command)

    def about(self, word: str) -> list[str]:
        """word: as it stands in a command, or a part of that."""
        name, _, value = word.lstrip("+~").partition("=")
        name = name.partition("@")[0]
        if name in self.groups:
            return self._options(word, name, value) if value else self._group(name)
        if text := self._key(name) or self._below(name):
            return text
        if name == _KEYS:
            return ["the keys of the top level: type KEY=VALUE", "", *_table(top_rows(self.folders), 2)]
        if name == _ALL:
            return _apart([self.overview(), *map(self._group, self.groups), self.about(_KEYS)])
        return self._by_its_end(word, name)

    def _options(self, word: str, group: str, value: str) -> list[str]:
        options, known = re.findall(r"[^\[\],\s'\"]+", value), self.groups[group]
        for option in options:
            if option in ("null", self.folders.default(group)) and option not in known:  # none, or one of Hydra's own
                return self._group(group)
            if option not in known:
                raise InputError(f"--help {word}: no such {group.rpartition('/')[2]}{did_you_mean(option, known)}")
        return _apart([self._option(group, option) for option in options])

    def _group(self, group: str) -> list[str]:
        options, default = self.groups[group], self.folders.default(group)
        note = f" (default: {'none chosen' if default == 'null' else default})" if default else ""
        lines = [f"{group}{note}", ""]
        for option in options:
            file = self.folders.file(group, option)
            lines += columns([(option, file.description)], 2, max(map(len, options)) + 2)
            own = {keys_of(group) + key.name for key in file.keys}
            rows = [] if group == PRESETS else option_rows(self.folders, group, option)
            lines += _table([row for row in rows if row.key in own and not row.is_reference], 4)
            lines += [f"    and the keys of {parent}" for parent in file.parents]
        best = default if default in options else options[0]
        return [*lines, "", *self._examples([example(self.folders, group, str(best))])]

    def _option(self, group: str, option: str) -> list[str]:
        file, rows = self.folders.merged(group, option), option_rows(self.folders, group, option)
        lines = [f"{group}={option}" + (f": {file.description}" if file.description else ""), *file.notes]
        chosen = [(f"{other}={taken}", "", "") for other, taken in file.choices.items()]
        cells = chosen + [row.cells for row in rows if not (row.is_reference or row.is_added)]
        if cells:
            lines += ["", *columns(cells, 2)]
        if added := [row for row in rows if row.is_added]:
            lines += ["", "  also taken, though not in its file:", "", *_table(added, 2)]
        examples = [example(self.folders, group, option)]
        if group != PRESETS:
            examples += [row.example for row in rows if not row.is_reference][:1]
        lines += ["", *self._examples(examples), f"file     {self.folders.path(group, option)}"]
        return lines + [f"made by  {target}" for target in dict.fromkeys(file.targets.values())]

    def _key(self, name: str) -> list[str]:
        """Of the top level, or of the options that have it."""
        if row := next((row for row in top_rows(self.folders) if row.key == name), None):
            return [*_table([row], 0), "", *self._examples([row.example])]
        found = [(group, option, row) for group, option, row in self._rows_of_groups(name) if row.key == name]
        return self._by_option(name, found)

    def _below(self, name: str) -> list[str]:
        """The keys that begin with this one, of the top level or of the options that have them."""
        if rows := [row for row in top_rows(self.folders) if row.key.startswith(f"{name}.")]:
            doc = doc_of(SCHEMA, name.split("."))
            head = name + (f": {doc}" if doc else "")
            return [head, "", *_table(rows, 2), "", *self._examples([rows[0].example])]
        below = f"{name}."
        return self._by_option(name, [found for found in self._rows_of_groups(name) if found[2].key.startswith(below)])

    def _rows_of_groups(self, name: str) -> list[tuple[str, str, Row]]:
        """Of the groups that a key of this name can be in."""
        groups = [group for group in self.groups if name.startswith(keys_of(group)) and group != PRESETS]
        return [
            (g, option, row)
            for g in groups
            for option in self.groups[g]
            for row in option_rows(self.folders, g, option)
        ]

    def _by_option(self, name: str, found: Sequence[tuple[str, str, Row]]) -> list[str]:
        if not found:
            return []
        cells = [(f"{group}={option}", *row.cells) for group, option, row in found]
        default = [row for group, option, row in found if self.folders.default(group) == option]
        return [name, "", *columns(cells, 2), "", *self._examples([(default or [found[0][2]])[0].example])]

    def _by_its_end(self, word: str, name: str) -> list[str]:
        """An option without its group, or a key without what comes before it, where only one has that name."""
        options = [f"{group}={option}" for group in self.groups for option in self.groups[group]]
        keys = {key.name for key in self.folders.main.keys}
        for group in self.groups.keys() - {PRESETS}:  # by the files alone: constructors take longer to read
            files = (self.folders.merged(group, option) for option in self.groups[group])
            keys |= {keys_of(group) + key.name for file in files for key in file.keys}
        ends = [topic for topic in [*options, *sorted(keys)] if re.split(r"[=.]", topic)[-1] == name]
        if len(ends) == 1:
            return self.about(ends[0])
        if ends:
            raise InputError(f"--help {word}: several have that name; type --help {' or '.join(ends)}")
        topics = [*self.groups, *options, *sorted(keys | {key.rpartition(".")[0] for key in keys} - {""}), _KEYS, _ALL]
        by_end = {re.split(r"[=.]", topic)[-1]: topic for topic in reversed(topics)}
        near = nearest(word, topics) or by_end.get(nearest(name, by_end) or "")
        hint = f"; did you mean --help {near}?" if near else "; --help alone lists them"
        raise InputError(f"--help {word}: no such group, option or key{hint}")

    def _examples(self, words: Sequence[str]) -> list[str]:
        heads = ["example", *[""] * len(words)]
        return [f"{head:<9}{self.command} {each}" for head, each in zip(heads, dict.fromkeys(words), strict=False)]


def _table(rows: Sequence[Row], indent: int) -> list[str]:
    return columns([row.cells for row in rows], indent)


def _apart(texts: Sequence[Sequence[str]]) -> list[str]:
    """One below the other, with an empty line between."""
    return [line for text in texts for line in ["", *text]][1:]
