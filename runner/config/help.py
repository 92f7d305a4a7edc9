"""The text of --help, read from the configuration's files: what there is, its values, and what the comments say."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C, where it was built, is ten times as fast
_LONGEST = 64  # what a column is still widened for
_PRESETS = "experiment"  # its files set keys of other groups, which are shown where they belong

_EXAMPLES = (
    ("{command}", "one run in this process"),
    ("{command} model=toy data=toy epochs=3", "groups choose, key=value sets"),
    ("{torchrun} model=convnet parallel=ddp", "four processes"),
    ("{command} -m model=toy,convnet optimizer.lr=0.1,0.01", "a sweep"),
    ("{command} --config-dir DIR model=mine", "your own DIR/model/mine.yaml"),
    ("{command} --cfg job", "show the configuration, run nothing"),
    ("{command} resume=last", "resume the newest run"),
)
_FLAGS = (
    ("-m, --multirun", "a sweep: one job for each combination of the values typed with commas"),
    ("--config-dir DIR", "a folder of your own, whose options join those above and win over one of the same name;"),
    ("", "several: of two the later wins; resume= and run= search those of the run too, before them"),
    ("--cfg job", "print the configuration; --resolve fills in its references"),
    ("--info defaults", "print which files it is made of"),
    ("--hydra-help", "the other flags of Hydra, which reads all of this; see https://hydra.cc"),
)


@dataclass
class _File:
    description: str = ""
    choices: dict[str, str] = field(default_factory=dict)  # its defaults list: group -> option
    parents: list[str] = field(default_factory=list)  # the files of its own group that it starts from
    keys: list[tuple[str, str, str]] = field(default_factory=list)  # dotted key, value, comment


def render_help(search_path: Sequence[Path], command: str = "python -m runner") -> str:
    """Where two folders hold the same file the earlier one counts, as in Hydra; the last one is the runner's own."""
    groups: dict[str, dict[str, Path]] = {}
    for folder in reversed(search_path):
        for group, option, path in _options(folder):
            groups.setdefault(group, {})[option] = path
    # A user's own config.yaml has no say: see hydra_plugins.runner.own_folders.
    main = next((path for folder in search_path[-1:] if (path := folder / "config.yaml").is_file()), None)
    top = _read(main) if main else _File()

    torchrun = "torchrun --nproc-per-node 4 " + command.removeprefix("python ")
    examples = [(text.format(command=command, torchrun=torchrun), meaning) for text, meaning in _EXAMPLES]
    lines = [f"usage: {command} [GROUP=OPTION ...] [GROUP.KEY=VALUE ...] [KEY=VALUE ...] [FLAGS]", ""]
    lines += _columns(examples, 2)
    lines += ["", "GROUPS: type GROUP=OPTION, and GROUP.KEY=VALUE for the keys under the option", ""]
    chosen = [group for group in top.choices if group in groups]
    for group in chosen + sorted(groups.keys() - chosen):
        lines += [*_render_group(group, groups[group], top.choices.get(group)), ""]
    lines += ["KEYS: type KEY=VALUE", "", *_columns([(f"{key}={value}", text) for key, value, text in top.keys], 2, 28)]
    return "\n".join([*lines, "", "FLAGS", "", *_columns(_FLAGS, 2, 28), ""])


def _options(folder: Path) -> Iterator[tuple[str, str, Path]]:
    """Every group, option and file under the folder; names that begin with _ or . are not for users."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] not in "_.")
        group = Path(parent).relative_to(folder).as_posix()
        for name in files:
            if group != "." and name[0] not in "_." and name.endswith(".yaml"):
                yield group, name.removesuffix(".yaml"), Path(parent, name)


def _render_group(group: str, options: dict[str, Path], default: str | None) -> list[str]:
    if default is not None:
        note = "(default: none chosen)" if default == "null" else f"(default: {default})"
    else:  # Hydra's own groups have a default that is in none of these files
        note = "" if group.startswith("hydra/") else f"(type +{group}=OPTION)"
    lines = [f"{group:<40}{note}".rstrip()]
    for option, path in sorted(options.items()):
        file = _read(path)
        lines += _columns([(option, file.description)], 2, 15)
        if group == _PRESETS:
            continue
        # a reference is how files are wired together; nobody types it
        typed = [(f"{key}={value}", text) for key, value, text in file.keys if not re.fullmatch(r"\$\{.*\}", value)]
        lines += _columns(typed, 4, 24)
        lines += [f"    and the keys of {parent}" for parent in file.parents]
    return lines


def _columns(rows: Sequence[tuple[str, str]], indent: int, width: int = 0) -> list[str]:
    """Each text beside what it is about, in a column that is at least this wide; one that is very long stands out."""
    width = max([width, *(len(left) + 2 for left, _ in rows if len(left) <= _LONGEST)])
    return [f"{' ' * indent}{left:<{width - 2}}  {right}".rstrip() for left, right in rows]


def _read(path: Path) -> _File:
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=_LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        return _File(description=f"cannot be read: {path}" + (f", line {mark.line + 1}" if mark else ""))
    file = _File(description=_first_comment(text))
    if not isinstance(root, yaml.MappingNode):
        return file
    lines = text.splitlines()
    file.keys = list(_keys(root, lines))
    for key, value in root.value:
        if key.value == "defaults" and isinstance(value, yaml.SequenceNode):
            for item in value.value:
                if isinstance(item, yaml.MappingNode):
                    for group, option in item.value:  # `override hydra/launcher@place: basic`
                        file.choices[group.value.split()[-1].partition("@")[0].lstrip("/")] = _flow(option)
                elif item.value != "_self_":
                    file.parents.append(item.value)
    return file


def _first_comment(text: str) -> str:
    for line in text.splitlines():
        if line.startswith("#") and not re.match(r"#\s*@package\b", line):
            return line.lstrip("# ").rstrip()
        if line.strip() and not line.startswith(("#", "---")):
            break
    return ""


def _keys(node: yaml.MappingNode, lines: Sequence[str], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for key, value in node.value:
        if key.value.startswith("_") or (not prefix and key.value in ("defaults", "hydra")):
            continue
        if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
            yield from _keys(value, lines, f"{prefix}{key.value}.")
        else:
            yield f"{prefix}{key.value}", _flow(value), _comment(key, value, lines)


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
