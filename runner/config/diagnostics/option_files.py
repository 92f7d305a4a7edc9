"""Explanations of option files that cannot be read, with the line, and of files that are ignored."""

from collections.abc import Iterable
from pathlib import Path

import yaml

from runner.config.diagnostics.keys import one_line

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_mapping_node(file: Path) -> yaml.MappingNode | None:
    """Return the YAML mapping in the file, without its values; None for an empty file. Raise ValueError otherwise."""
    content = file.read_bytes()
    try:
        root = yaml.compose(content.decode("utf-8"), Loader=_LOADER)
    except UnicodeDecodeError as error:
        line, byte = content.count(b"\n", 0, error.start) + 1, content[error.start]
        raise ValueError(f"{file}, line {line}: byte {byte:#x} is not UTF-8; save the file as UTF-8") from None
    except yaml.YAMLError as error:
        raise ValueError(describe(file, error)) from None
    if root is None:
        return None
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(_refusal(file, root, "the file of an option must consist of KEY: VALUE, and this is"))
    for key, value in root.value:
        if key.value == "defaults" and not isinstance(value, yaml.SequenceNode):
            rule = "defaults must be a list, such as `- mlp` or `- override /model: mlp`, and this is"
            raise ValueError(_refusal(file, value, rule))
    return root


def _refusal(file: Path, node: yaml.Node, rule: str) -> str:
    kinds: dict[type[yaml.Node], str] = {yaml.SequenceNode: "a list", yaml.MappingNode: "a mapping"}
    found = kinds.get(type(node)) or f"the value {node.value}"
    return f"{file}, line {node.start_mark.line + 1}: {rule} {found}"


def describe(file: Path, error: Exception) -> str:
    """Return an error that a reader of the file has raised, in one line with the file and its line."""
    if (mark := getattr(error, "problem_mark", None)) is None:
        return f"{file}: {one_line(error)}"
    lines = file.read_text(encoding="utf-8").splitlines()
    is_tab = mark.line < len(lines) and lines[mark.line][mark.column : mark.column + 1] == "\t"
    return (
        f"{file}, line {mark.line + 1}: {'a tab; indent with spaces' if is_tab else getattr(error, 'problem', error)}"
    )


def ignored_file(directories: Iterable[str], config_path: str) -> str | None:
    """Return why the option GROUP/OPTION is not read from a file that exists; None if there is no such file."""
    for directory in directories:
        file = Path(directory, f"{config_path}.yml")
        if file.is_file() and not file.with_suffix(".yaml").exists():
            return f"{file} is not read; rename it to {file.stem}.yaml"
    return None
