"""The text of --help for a topic: a group, an option, a key, or a prefix of keys."""

import re
from collections.abc import Sequence
from pathlib import Path

from runner.config.help.config_tree import PRESETS, ConfigTree, keys_of
from runner.config.help.overview import columns, overview
from runner.config.help.yaml_file import Key
from runner.config.schema import SECTIONS
from runner.errors import InputError, did_you_mean, nearest

_KEYS, _ALL = "keys", "all"


def render_help(search_path: Sequence[Path], topics: Sequence[str] = (), command: str = "python -m runner") -> str:
    """Return the help on each topic, or the overview if there is none. Raise InputError for an unknown topic.

    The built-in directory of configuration is the last of `search_path`. The examples begin with `command`.
    """
    renderer = _Topics(ConfigTree(search_path), command)
    texts = [renderer.topic(topic) for topic in topics] or [renderer.overview()]
    return "\n".join([*_separate(texts), ""])


class _Topics:
    def __init__(self, tree: ConfigTree, command: str):
        self.tree, self.groups, self.command = tree, tree.groups, command

    def overview(self) -> list[str]:
        return overview(self.tree, self.command)

    def topic(self, topic: str) -> list[str]:
        name, _, value = topic.lstrip("+~").partition("=")
        name = name.partition("@")[0]
        if name in self.groups:
            return self._options(topic, name, value) if value else self._group(name)
        if name == _KEYS:
            return ["the top-level keys: KEY=VALUE", "", *_table(self.tree.main.keys, 2)]
        if name == _ALL:
            return _separate([self.overview(), *map(self._group, self.groups), self.topic(_KEYS)])
        return self._keys(name) or self._last_part(topic, name)

    def _options(self, topic: str, group: str, value: str) -> list[str]:
        options, known = re.findall(r"[^\[\],\s'\"]+", value), self.groups[group]
        for option in options:
            if option in ("null", self.tree.default(group)) and option not in known:  # none, or an option of Hydra
                return self._group(group)
            if option not in known:
                raise InputError(f"--help {topic}: no such {group.rpartition('/')[2]}{did_you_mean(option, known)}")
        return _separate([self._option(group, option) for option in options])

    def _group(self, group: str) -> list[str]:
        options, default = self.groups[group], self.tree.default(group)
        note = f" (default: {'none chosen' if default == 'null' else default})" if default else ""
        lines = [f"{group}{note}", ""]
        for option in options:
            description = self.tree.file(group, option).description
            lines.append(f"  {option:<{max(map(len, options))}}  {description}".rstrip())
            keys = [] if group == PRESETS else self.tree.option_keys(group, option)
            lines += _table([key for key in keys if not key.is_reference], 4)
        best = default if default in options else options[0]
        return [*lines, "", *self._examples([self.tree.example(group, str(best))])]

    def _option(self, group: str, option: str) -> list[str]:
        file, keys = self.tree.merged(group, option), self.tree.option_keys(group, option)
        keys = [key for key in keys if not key.is_reference]
        lines = [f"{group}={option}" + (f": {file.description}" if file.description else ""), *file.notes]
        chosen = [(f"{other}={choice}", "", "") for other, choice in file.choices.items()]
        if cells := chosen + [key.cells for key in keys]:
            lines += ["", *columns(cells, 2)]
        examples = [self.tree.example(group, option), *(key.arguments for key in keys[:1] if group != PRESETS)]
        lines += ["", *self._examples(examples), f"file     {self.tree.path(group, option)}"]
        return lines + [f"class    {target}" for target in dict.fromkeys(file.targets.values())]

    def _keys(self, name: str) -> list[str]:
        """Return the help on the key, or on the keys with this prefix: top-level keys, or else keys of options."""
        found = [("", key) for key in self.tree.main.keys if f"{key.name}.".startswith(f"{name}.")]
        for group in () if found else self.groups:
            if name.startswith(keys_of(group)) and group != PRESETS:
                for option in sorted(self.groups[group], key=lambda option: option != self.tree.default(group)):
                    keys = self.tree.option_keys(group, option)
                    found += [(f"{group}={option}", key) for key in keys if f"{key.name}.".startswith(f"{name}.")]
        if not found:
            return []
        doc = (SECTIONS[name].__doc__ or "").partition("\n")[0] if name in SECTIONS else ""
        lines = columns([(option, *key.cells) for option, key in found], 2)
        return [name + (f": {doc}" if doc else ""), "", *lines, "", *self._examples([found[0][1].arguments])]

    def _last_part(self, topic: str, name: str) -> list[str]:
        """Return the help on an option without its group, or a key without its prefix, if the name is unique."""
        options = [f"{group}={option}" for group in self.groups for option in self.groups[group]]
        keys = [key.name for key in self.tree.main.keys]
        for group in self.groups.keys() - {PRESETS}:
            keys += [key.name for option in self.groups[group] for key in self.tree.option_keys(group, option)]
        ends = [each for each in dict.fromkeys([*options, *sorted(keys)]) if re.split(r"[=.]", each)[-1] == name]
        if len(ends) == 1:
            return self.topic(ends[0])
        if ends:
            raise InputError(f"--help {topic}: several topics have that name; try --help {' or '.join(ends)}")
        topics = [*self.groups, *options, *sorted({*keys, *(key.rpartition(".")[0] for key in keys)} - {""})]
        by_end = {re.split(r"[=.]", each)[-1]: each for each in reversed(topics)}
        near = nearest(topic, topics) or by_end.get(nearest(name, by_end) or "")
        hint = f"; did you mean --help {near}?" if near else "; --help without a topic lists them"
        raise InputError(f"--help {topic}: no such group, option or key{hint}")

    def _examples(self, arguments: Sequence[str]) -> list[str]:
        heads = ["example", *[""] * len(arguments)]
        return [f"{head:<9}{self.command} {each}" for head, each in zip(heads, dict.fromkeys(arguments), strict=False)]


def _table(keys: Sequence[Key], indent: int) -> list[str]:
    return columns([key.cells for key in keys], indent)


def _separate(texts: Sequence[Sequence[str]]) -> list[str]:
    """Join the texts, with an empty line between."""
    return [line for text in texts for line in ["", *text]][1:]
