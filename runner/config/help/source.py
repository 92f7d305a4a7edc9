"""Finds what a dotted path names in source text. Nothing is imported: torch alone would take seconds."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from runner import ROOT, files_of

_DEPTH = 12  # imports from file to file that are followed


@dataclass(frozen=True)
class Module:
    """What a file binds at its top level: definitions, values, and the dotted paths of what it imports."""

    bound: dict[str, ast.AST | str] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)  # the modules of which it imports everything


@dataclass(frozen=True)
class Found:
    node: ast.AST
    module: Module

    def look_up(self, dotted: str) -> "Found | None":
        """What the name means where this was found."""
        return _within(self.module, dotted.split("."), _DEPTH)


def find(path: str, depth: int = _DEPTH) -> Found | None:
    """The class, function or value of the dotted path; None where no file on sys.path has it."""
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        for module in _modules(".".join(parts[:cut])):
            if found := _within(module, parts[cut:], depth - 1):
                return found
    return None


def dotted(node: ast.AST | None) -> str:
    """`nn.Module` of its expression; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def _within(module: Module, names: list[str], depth: int) -> Found | None:
    if depth <= 0:
        return None
    bound = module.bound.get(names[0])
    if bound is None:
        inside = (find(".".join([star, *names]), depth - 1) for star in module.stars)
        return next((found for found in inside if found), None)
    if isinstance(bound, str):
        return find(".".join([bound, *names[1:]]), depth - 1)
    for name in names[1:]:
        members = bound.body if isinstance(bound, ast.ClassDef) else []
        bound = next((member for member in members if getattr(member, "name", None) == name), None)
        if bound is None:
            return None
    return Found(bound, module)


@cache
def _modules(name: str) -> list[Module]:
    """Those that could be imported by the name, the installation's own first."""
    own = ROOT.joinpath(*name.split("."))
    files = [str(file) for file in (own.with_suffix(".py"), own / "__init__.py") if file.is_file()]
    return [module for file in dict.fromkeys([*files, *files_of(name)]) if (module := _read(file, name))]


def _read(file: str, name: str) -> Module | None:
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):  # of a compiled module, or broken: importing it tells more
        return None
    module, package = Module(), name if Path(file).name == "__init__.py" else name.rpartition(".")[0]
    for node in _statements(tree.body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            module.bound[node.name] = node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                module.bound[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                if alias.name == "*":
                    module.stars.append(source)
                else:
                    module.bound[alias.asname or alias.name] = f"{source}.{alias.name}"
        elif isinstance(node, ast.Assign):
            module.bound.update({target.id: node.value for target in node.targets if isinstance(target, ast.Name)})
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            module.bound[node.target.id] = node.value
        elif hasattr(ast, "TypeAlias") and isinstance(node, ast.TypeAlias):  # Python 3.12 and newer
            module.bound[node.name.id] = node.value
    return module


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that may run when the file is imported."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _statements([*node.orelse, *node.body])  # what is bound last wins
        elif isinstance(node, ast.Try):
            handlers = [statement for handler in node.handlers for statement in handler.body]
            yield from _statements([*handlers, *node.orelse, *node.body])
        else:
            yield node
