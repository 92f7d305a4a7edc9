"""The private members of other packages that `runner/` uses: the table in docs/architecture.md, and that they exist."""

import ast
import importlib
import inspect
import re
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from runner.paths import ROOT

PAGE = ROOT / "docs" / "architecture.md"
SOURCES = [ast.parse(path.read_text()) for path in sorted((ROOT / "runner").rglob("*.py"))]
DOCUMENTED = {"_exit", "_fields"}  # of os and of named tuples: public in spite of the name
OURS = {"_attached_name", "_pass_values"}  # set by one class of the runner and read by another


def is_private(name: str) -> bool:
    return re.match(r"_(?!_)", name) is not None


def table() -> list[str]:
    """Return the members that the table names, as dotted paths."""
    section = PAGE.read_text().partition("\n## Private members of other packages\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [member for row in rows for member in re.findall(r"`([^`]+)`", row)]


def imports() -> set[str]:
    """Return the dotted paths that `runner/` imports and of which a part is private."""
    found = set()
    for node in (node for source in SOURCES for node in ast.walk(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {path for path in found if any(map(is_private, path.split(".")))}


def attributes() -> set[str]:
    """Return the private attributes that are read from other objects, or inherited from classes of other packages."""
    nodes = [node for source in SOURCES for node in ast.walk(source)]
    own: set[Any] = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    members = [node for node in nodes if isinstance(node, ast.Attribute)]
    own |= {node.attr for node in members if is_of_self(node) and isinstance(node.ctx, ast.Store)}
    found: set[Any] = {node.attr for node in members if not (is_of_self(node) and node.attr in own)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr"]
    found |= {node.args[1].value for node in calls if isinstance(node.args[1], ast.Constant)}
    return {name for name in found if is_private(str(name))} - DOCUMENTED - OURS


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def strings() -> set[str]:
    """Return all texts, among them the names of members that a plan replaces."""
    nodes = [node for source in SOURCES for node in ast.walk(source) if isinstance(node, ast.Constant)]
    return {node.value for node in nodes if isinstance(node.value, str)}


def covers(member: str, used: str) -> bool:
    return f"{used}.".startswith(f"{member}.") or (is_private(used) and used in member.split("."))


def missing_part(path: str) -> str | None:
    """Return the part of the dotted path that the installed packages lack; None if they have all."""
    found: Any = None
    parts = path.split(".")
    for index, part in enumerate(parts):
        if index and has(found, part):
            found = getattr(found, part, None)
            continue
        try:
            found = importlib.import_module(".".join(parts[: index + 1]))
        except ImportError:
            return ".".join(parts[: index + 1])
    return None


def has(owner: Any, name: str) -> bool:
    """Return True if an object has an attribute, or if a class declares it or its methods assign it."""
    return hasattr(owner, name) or (inspect.isclass(owner) and any(declares(base, name) for base in owner.__mro__))


def declares(owner: type, name: str) -> bool:
    with suppress(OSError, TypeError):  # no source
        return re.search(rf"\bself\.{name}\b[^=\n]*=", inspect.getsource(owner)) is not None
    return False


def test_every_private_member_is_in_the_table() -> None:
    """Add a row: the member, why no public one will do, and what to do if it disappears."""
    members = table()
    assert [used for used in sorted(imports() | attributes()) if not any(covers(each, used) for each in members)] == []


def test_every_member_of_the_table_is_used() -> None:
    used = imports() | attributes() | strings()
    assert [member for member in table() if not any(covers(member, each) for each in used)] == []


def test_every_private_member_exists() -> None:
    paths = sorted({*table(), *imports()})
    installed = {package for package in {path.partition(".")[0] for path in paths} if find_spec(package)}
    assert {"torch", "hydra"} <= installed  # others belong to extras
    missing = {path: missing_part(path) for path in paths if path.partition(".")[0] in installed}
    assert {path: part for path, part in missing.items() if part} == {}
