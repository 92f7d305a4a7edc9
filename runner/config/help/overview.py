"""The text of --help without a topic, and the layout of its columns and lists."""

import textwrap
from collections.abc import Iterable, Sequence

from runner.config.help.config_tree import ConfigTree

WIDTH = 110  # of the overview's lines
_LONGEST = 64  # a longer cell does not widen its column

_EXAMPLES = (
    ("{command}", "one run in this process"),
    ("{command} model=toy data=toy epochs=3", "GROUP=OPTION chooses, KEY=VALUE sets"),
    ("{torchrun} model=convnet parallel=ddp", "four processes"),
    ("{command} -m model=toy,convnet optimizer.lr=0.1,0.01", "a sweep"),
    ("{command} --config-dir DIR model=mine", "a custom option, DIR/model/mine.yaml"),
    ("{command} --cfg job", "print the configuration, run nothing"),
    ("{command} resume=last", "resume the newest run"),
)
_TOPICS = (
    ("--help parallel", "a group: its options, and their keys with default, type and meaning"),
    ("--help parallel=fsdp", "an option"),
    ("--help checkpoint.keep", "a key; --help checkpoint: all keys with this prefix"),
    ("--help keys", "all top-level keys, one line each"),
    ("--help all", "everything"),
)
_FLAGS = (
    ("-h, --help [TOPIC ...]", "show this overview, or help on the topics"),
    ("-m, --multirun", "run a sweep: one job for each combination of comma-separated values"),
    ("--config-dir DIR", "add custom options; they replace built-in options of the same name, and the last DIR"),
    ("", "wins; resume= and run= also search the directories of that run, before DIR"),
    ("--cfg job", "print the configuration; --resolve resolves its references"),
    ("--info defaults", "print the files from which the configuration is composed"),
    ("--hydra-help", "show Hydra's other flags; see https://hydra.cc"),
)


def overview(tree: ConfigTree, command: str) -> list[str]:
    """Return the lines of the overview: usage, examples, groups, keys and flags."""
    torchrun = "torchrun --nproc-per-node 4 " + command.removeprefix("python ")
    examples = [(text.format(command=command, torchrun=torchrun), meaning) for text, meaning in _EXAMPLES]
    topics = [(f"{command} {text}", meaning) for text, meaning in _TOPICS]
    return [
        f"usage: {command} [GROUP=OPTION ...] [GROUP.KEY=VALUE ...] [KEY=VALUE ...] [FLAGS]",
        "",
        *columns(examples, 2),
        "",
        "TOPICS: every name below is a topic of --help",
        "",
        *columns(topics, 2),
        "",
        "GROUPS: GROUP=OPTION chooses an option, GROUP.KEY=VALUE sets a key of it; shown with the default",
        "",
        *listed([(_group_label(tree, group), options) for group, options in tree.groups.items()], 2),
        "",
        "KEYS: KEY=VALUE",
        "",
        *listed(_headings(tree).items(), 2),
        "",
        "FLAGS",
        "",
        *columns(_FLAGS, 2),
    ]


def _group_label(tree: ConfigTree, group: str) -> str:
    if not tree.is_chosen(group):
        return f"+{group}=OPTION"
    default = tree.default(group)
    return f"{group}={default}" if default is not None else group


def _headings(tree: ConfigTree) -> dict[str, list[str]]:
    """Return the top-level keys by heading; a section is a single name, as `checkpoint.*`."""
    headings: dict[str, list[str]] = {}
    for key in tree.main.keys:
        section, dot, _ = key.name.partition(".")
        names = headings.setdefault(key.heading, [])
        if (name := section + dot.replace(".", ".*")) not in names:
            names.append(name)
    return headings


def columns(rows: Sequence[Sequence[str]], indent: int) -> list[str]:
    """Return the rows as aligned columns without the empty ones; a very long cell exceeds its column."""
    widths = [max((len(cell) for cell in each if len(cell) <= _LONGEST), default=0) for each in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True) if width or cell]
        lines.append(f"{' ' * indent}{'  '.join(cells)}".rstrip())
    return lines


def listed(rows: Iterable[tuple[str, Sequence[str]]], indent: int) -> list[str]:
    """Return each name with its words beside it, separated by commas and wrapped at WIDTH."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0) + 2
    lines = []
    for name, words in rows:
        head = f"{' ' * indent}{name:<{width}}"
        lines += textwrap.wrap(", ".join(words), WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
    return lines
