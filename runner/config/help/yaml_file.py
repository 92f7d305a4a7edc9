"""The contents of one configuration file for --help: its keys with values and types, and its comments.

The first comment is the file's description. `# example: ARGUMENTS` at the head or above a key is a command that uses
the option or the key, and replaces the example that --help generates. A comment that begins with a type in parentheses,
as in `key: null  # (int) ...`, states the type of a key whose value does not show it. In the main file any other
comment on a line of its own is the heading of the keys below it.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader, if it was built, is ten times as fast
_EXAMPLE = "example:"
_TYPES = {"int": "int", "float": "float", "bool": "bool", "str": "str", "seq": "list", "map": "mapping"}  # by YAML tag


@dataclass(frozen=True)
class Key:
    """A key that has a value."""

    name: str  # dotted
    value: str  # as on the command line
    type: str = ""
    comment: str = ""
    example: str = ""
    heading: str = ""

    @property
    def is_reference(self) -> bool:
        """True if the value interpolates another key, so that users need not set it."""
        return re.fullmatch(r"\$\{[^:]*\}", self.value) is not None

    @property
    def arguments(self) -> str:
        value = "VALUE" if self.value in ("null", "???") or "${" in self.value else shlex.quote(self.value)
        return self.example or f"{self.name}={value}"

    @property
    def cells(self) -> tuple[str, str, str]:
        return f"{self.name}={self.value}", self.type, self.comment


@dataclass
class File:
    """A configuration file, read without composing it."""

    description: str = ""
    example: str = ""
    notes: list[str] = field(default_factory=list)  # the other comments at its head
    choices: dict[str, str] = field(default_factory=dict)  # its defaults list: group -> option
    parents: list[str] = field(default_factory=list)  # files of its own group in its defaults list
    keys: list[Key] = field(default_factory=list)
    targets: dict[str, str] = field(default_factory=dict)  # dotted key of a node -> its `_target_`; "" is the file


def read_file(path: Path) -> File:
    """Read a file; for an unreadable one only the description is set, and names the error."""
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=_LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        return File(description=f"cannot be read: {path}" + (f", line {mark.line + 1}" if mark else ""))
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith(("#", "---"))), 0)
    head = [line.lstrip("# ").rstrip() for line in lines[:begin] if line.startswith("#")]
    shown = [line for line in head if not line.startswith(("@package", _EXAMPLE))]
    file = File("".join(shown[:1]), next(filter(None, map(_example, lines[:begin])), ""), shown[1:])
    if not isinstance(root, yaml.MappingNode):
        return file
    lines[:begin] = [""] * begin  # comments at the head belong to the file, not to its first key
    file.keys = list(_keys(root, lines, file.targets))
    for key, value in root.value:
        if key.value == "defaults" and isinstance(value, yaml.SequenceNode):
            for item in value.value:
                if isinstance(item, yaml.MappingNode):
                    for group, option in item.value:  # `override hydra/launcher@place: basic`
                        file.choices[group.value.split()[-1].partition("@")[0].lstrip("/")] = _flow(option)
                elif item.value != "_self_":
                    file.parents.append(item.value)
    return file


def _keys(node: yaml.MappingNode, lines: Sequence[str], targets: dict[str, str], prefix: str = "") -> Iterator[Key]:
    """Yield the keys in the order of the file, and collect the targets of the nodes."""
    for key, value in node.value:
        if key.value == "_target_":
            targets[prefix.rstrip(".")] = value.value
        if key.value.startswith("_") or (not prefix and key.value in ("defaults", "hydra")):
            continue
        if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
            yield from _keys(value, lines, targets, f"{prefix}{key.value}.")
            continue
        comment, kind = _comment(key, value, lines), _TYPES.get(value.tag.rpartition(":")[2], "")
        if stated := re.match(r"\(([\w\[\], |]+)\) ", comment):
            comment, kind = comment[stated.end() :], stated[1]
            if _flow(value) == "null":
                kind += " | null"
        above = lines[: key.start_mark.line]
        heading = next((line[2:] for line in reversed(above) if line.startswith("# ") and not _example(line)), "")
        example = _example(above[-1]) if above else ""
        yield Key(f"{prefix}{key.value}", _flow(value), kind, comment, example, heading)


def _example(line: str) -> str:
    """Return the arguments of an `# example:` line, or an empty string."""
    text = line.lstrip("# ")
    return text.removeprefix(_EXAMPLE).strip() if text.startswith(_EXAMPLE) else ""


def _flow(node: yaml.Node) -> str:
    """Return the value in one line, as on the command line."""
    if isinstance(node, yaml.SequenceNode):
        return f"[{', '.join(map(_flow, node.value))}]"
    if isinstance(node, yaml.MappingNode):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(value)}" for key, value in node.value) + "}"
    assert isinstance(node, yaml.ScalarNode)
    if not node.value:
        return "''" if node.style else "null"
    return " ".join(node.value.split())


def _comment(key: yaml.ScalarNode, value: yaml.ScalarNode | yaml.CollectionNode, lines: Sequence[str]) -> str:
    """Return the comment behind a value, or behind its key if the value begins on the next line."""
    is_block = getattr(value, "style", None) in ("|", ">")
    is_beside_key = value.start_mark.line == key.end_mark.line and not is_block
    mark = (value if is_beside_key else key).end_mark
    found = re.match(r"\s*:?\s*#\s*(.*)", lines[mark.line][mark.column :])
    return found[1].rstrip() if found else ""
