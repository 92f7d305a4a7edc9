"""What a file of the configuration says of itself: its keys, their values, and the comments. It is read, not composed.

Its first comment is its description. `# example: WORDS` at its head or above a key is a command that uses the option or
the key, where the one that --help would make up does not do. In the main file any other comment on a line of its own is
the heading of the keys below it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C, where it was built, is ten times as fast
_EXAMPLE = "example:"


@dataclass(frozen=True)
class Key:
    """A key that holds a value."""

    name: str  # dotted
    value: str  # as it is typed
    comment: str = ""
    example: str = ""
    heading: str = ""

    @property
    def is_reference(self) -> bool:
        """It follows another key. That is how files are wired together, and nobody types it."""
        return re.fullmatch(r"\$\{.*\}", self.value) is not None


@dataclass
class File:
    description: str = ""
    example: str = ""
    notes: list[str] = field(default_factory=list)  # what else its head says
    choices: dict[str, str] = field(default_factory=dict)  # its defaults list: group -> option
    parents: list[str] = field(default_factory=list)  # the files of its own group that it starts from
    keys: list[Key] = field(default_factory=list)
    targets: dict[str, str] = field(
        default_factory=dict
    )  # dotted key of a node -> its `_target_`; "" is the file itself


def read(path: Path) -> File:
    """Of a file that cannot be read the description says so."""
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=_LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        return File(description=f"cannot be read: {path}" + (f", line {mark.line + 1}" if mark else ""))
    lines = text.splitlines()
    head = _head(lines)
    told = [line for line in head if not line.startswith(("@package", _EXAMPLE))]
    file = File("".join(told[:1]), _example(head), told[1:])
    if not isinstance(root, yaml.MappingNode):
        return file
    file.keys = _Keys(lines, file.targets).below(root)
    for key, value in root.value:
        if key.value == "defaults" and isinstance(value, yaml.SequenceNode):
            for item in value.value:
                if isinstance(item, yaml.MappingNode):
                    for group, option in item.value:  # `override hydra/launcher@place: basic`
                        file.choices[group.value.split()[-1].partition("@")[0].lstrip("/")] = _flow(option)
                elif item.value != "_self_":
                    file.parents.append(item.value)
    return file


@dataclass
class _Keys:
    """Walks a file's nodes, and remembers the heading."""

    lines: Sequence[str]
    targets: dict[str, str]
    heading: str = ""

    def below(self, node: yaml.MappingNode, prefix: str = "") -> list[Key]:
        return list(self._walk(node, prefix))

    def _walk(self, node: yaml.MappingNode, prefix: str) -> Iterator[Key]:
        for key, value in node.value:
            if key.value == "_target_":
                self.targets[prefix.rstrip(".")] = value.value
            if key.value.startswith("_") or (not prefix and key.value in ("defaults", "hydra")):
                continue
            above = _comments_above(self.lines, key.start_mark.line)
            self.heading = next((line for line in above if not line.startswith(_EXAMPLE)), self.heading)
            if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
                yield from self._walk(value, f"{prefix}{key.value}.")
            else:
                comment = _comment(key, value, self.lines)
                yield Key(f"{prefix}{key.value}", _flow(value), comment, _example(above), self.heading)


def _head(lines: Sequence[str]) -> list[str]:
    """The comments before anything else."""
    begin = next(
        (number for number, line in enumerate(lines) if line.strip() and not line.startswith(("#", "---"))), None
    )
    return [line.lstrip("# ").rstrip() for line in lines[:begin] if line.startswith("#")]


def _comments_above(lines: Sequence[str], number: int) -> list[str]:
    """Those on lines of their own right above a line; the head belongs to the file."""
    found: list[str] = []
    for line in reversed(lines[:number]):
        if not line.lstrip().startswith("#"):
            return found
        found.insert(0, line.lstrip("# ").rstrip())
    return []


def _example(comments: Sequence[str]) -> str:
    return next((line.removeprefix(_EXAMPLE).strip() for line in comments if line.startswith(_EXAMPLE)), "")


def _flow(node: yaml.Node) -> str:
    """The value in one line, as it is typed."""
    if isinstance(node, yaml.SequenceNode):
        return f"[{', '.join(map(_flow, node.value))}]"
    if isinstance(node, yaml.MappingNode):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(value)}" for key, value in node.value) + "}"
    assert isinstance(node, yaml.ScalarNode)
    if not node.value:
        return "''" if node.style else "null"
    return " ".join(node.value.split())


def _comment(key: yaml.ScalarNode, value: yaml.ScalarNode | yaml.CollectionNode, lines: Sequence[str]) -> str:
    """What follows the # behind a value; of a value that begins on the next line, behind its key."""
    if isinstance(value, yaml.CollectionNode):
        on_this_line = bool(value.flow_style)
    else:
        on_this_line = bool(value.value) and value.style not in ("|", ">")
    mark = (value if on_this_line else key).end_mark
    found = re.match(r"\s*:?\s*#\s*(.*)", lines[mark.line][mark.column :])
    return found[1].rstrip() if found else ""
