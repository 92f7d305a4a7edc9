"""The text of --help: the overview, or a topic, which is a group, an option, a key, or a prefix of keys."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from runner.config.diagnostics.import_target import locate
from runner.config.help.config_tree import PRESETS, ConfigTree, keys_of
from runner.config.schema import SECTIONS
from runner.errors import InputError, did_you_mean, nearest

_KEYS, _ALL = "keys", "all"
_WIDTH = 110  # of the overview's lines
_LONGEST = 64  # a longer cell does not widen its column
_USAGE = """\
usage: python -m runner [GROUP=OPTION ...] [GROUP.KEY=VALUE ...] [KEY=VALUE ...] [FLAGS]

  python -m runner                                                  one run in this process
  python -m runner model=toy data=toy epochs=3                      GROUP=OPTION chooses, KEY=VALUE sets
  torchrun --nproc-per-node 4 -m runner model=convnet parallel=ddp  four processes
  python -m runner -m model=toy,convnet optimizer.lr=0.1,0.01       a sweep
  python -m runner --config-dir DIR model=mine                      a custom option, DIR/model/mine.yaml
  python -m runner --cfg job                                        print the configuration, run nothing
  python -m runner resume=last                                      resume the newest run
  python -m runner runs list                                        list runs; see runs --help

TOPICS: every name below is a topic of --help

  python -m runner --help parallel         a group: its options, and their keys with default, type and meaning
  python -m runner --help parallel=fsdp    an option
  python -m runner --help checkpoint.keep  a key; --help checkpoint: all keys with this prefix
  python -m runner --help keys             all top-level keys, one line each
  python -m runner --help all              everything

GROUPS: GROUP=OPTION chooses an option, GROUP.KEY=VALUE sets a key of it; shown with the default
"""
_FLAGS = """\
FLAGS

  -h, --help [TOPIC ...]  show this overview, or help on the topics
  -m, --multirun          run a sweep: one job for each combination of comma-separated values
  --config-dir DIR        add custom options; they replace built-in options of the same name, and the last DIR
                          wins; resume= and run= also search the directories of that run, before DIR
  --cfg job               print the configuration; --resolve resolves its references
  --info defaults         print the files from which the configuration is composed
  --hydra-help            show Hydra's other flags; see https://hydra.cc"""


def render_help(search_path: Sequence[Path], topics: Sequence[str] = ()) -> str:
    """Return the help on each topic, or the overview if there is none. Raise InputError for an unknown topic."""
    renderer = _Topics(ConfigTree(search_path))
    texts = [renderer.topic(topic) for topic in topics] or [renderer.overview()]
    return "\n".join([*_separate(texts), ""])


class _Topics:
    def __init__(self, tree: ConfigTree):
        self.tree, self.groups = tree, tree.groups

    def overview(self) -> list[str]:
        groups = [
            (f"{'' if self.tree.is_chosen(group) else '+'}{group}={self.tree.default(group) or 'OPTION'}", options)
            for group, options in self.groups.items()
        ]
        headings: dict[str, dict[str, None]] = {}  # names in their order; a section is one, as `checkpoint.*`
        for key in self.tree.main.keys:
            headings.setdefault(key.heading, {})[re.sub(r"[.].*", ".*", key.name)] = None
        return [_USAGE, *_listed(groups), "", "KEYS: KEY=VALUE", "", *_listed(headings.items()), "", _FLAGS]

    def topic(self, topic: str) -> list[str]:
        name, _, value = topic.lstrip("+~").partition("=")
        name = name.partition("@")[0]
        if name in self.groups:
            return self._options(topic, name, value) if value else self._group(name)
        if name == _KEYS:
            return ["the top-level keys: KEY=VALUE", "", *_columns([key.cells for key in self.tree.main.keys], 2)]
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
            lines += _columns([key.cells for key in keys if not key.is_reference], 4)
        best = default if default in options else options[0]
        return [*lines, "", *_examples([self.tree.example(group, str(best))])]

    def _option(self, group: str, option: str) -> list[str]:
        file, keys = self.tree.merged(group, option), self.tree.option_keys(group, option)
        keys = [key for key in keys if not key.is_reference]
        lines = [f"{group}={option}" + (f": {file.description}" if file.description else ""), *file.notes]
        chosen = [(f"{other}={choice}", "", "") for other, choice in file.choices.items()]
        if cells := chosen + [key.cells for key in keys]:
            lines += ["", *_columns(cells, 2)]
        examples = [self.tree.example(group, option), *(key.arguments for key in keys[:1] if group != PRESETS)]
        if group == "parallel" and (refused := _refused_options(file.targets.get("", ""))):
            lines += ["", "refused options:", *(f"  {text}" for text in refused)]
        lines += ["", *_examples(examples), f"file     {self.tree.paths[group][option]}"]
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
        lines = _columns([(option, *key.cells) for option, key in found], 2)
        return [name + (f": {doc}" if doc else ""), "", *lines, "", *_examples([found[0][1].arguments])]

    def _last_part(self, topic: str, name: str) -> list[str]:
        """Return the help on every option without its group, and on every key without its prefix, of this name."""
        options = [f"{group}={option}" for group in self.groups for option in self.groups[group]]
        keys = {key.name for key in self.tree.main.keys}
        for group in self.groups.keys() - {PRESETS}:
            keys |= {key.name for option in self.groups[group] for key in self.tree.option_keys(group, option)}
        prefixes = {key.rpartition(".")[0] for key in keys} - {""}
        topics = [*self.groups, *options, *sorted(keys | prefixes)]
        by_end: dict[str, list[str]] = {}
        for each in topics:
            by_end.setdefault(re.split(r"[=.]", each)[-1], []).append(each)
        if name in by_end:
            return _separate([self.topic(each) for each in by_end[name]])
        near = nearest(topic, topics) or by_end.get(nearest(name, by_end) or "", [None])[0]
        hint = f"; did you mean --help {near}?" if near else "; --help without a topic lists them"
        raise InputError(f"--help {topic}: no such group, option or key{hint}")


def _refused_options(mode: str) -> list[str]:
    """Return a line for each option that the mode refuses. This imports the class of the mode, and torch with it."""
    with suppress(ValueError):  # a missing or broken class; a run reports it
        return [refusal.describe() for refusal in getattr(locate(mode), "refusals", ())]
    return []


def _examples(arguments: Sequence[str]) -> list[str]:
    heads = ["example", *[""] * len(arguments)]
    return [f"{head:<9}python -m runner {each}" for head, each in zip(heads, dict.fromkeys(arguments), strict=False)]


def _columns(rows: Sequence[Sequence[str]], indent: int) -> list[str]:
    """Return the rows as aligned columns without the empty ones; a very long cell exceeds its column."""
    widths = [max((len(cell) for cell in each if len(cell) <= _LONGEST), default=0) for each in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True) if width or cell]
        lines.append(f"{' ' * indent}{'  '.join(cells)}".rstrip())
    return lines


def _listed(rows: Iterable[tuple[str, Iterable[str]]]) -> list[str]:
    """Return each name with its words beside it, separated by commas and wrapped."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0) + 2
    lines = []
    for name, words in rows:
        head = f"  {name:<{width}}"
        lines += textwrap.wrap(", ".join(words), _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
    return lines


def _separate(texts: Sequence[Sequence[str]]) -> list[str]:
    """Join the texts, with an empty line between."""
    return [line for text in texts for line in ["", *text]][1:]
