"""The options of a constructor, their types and defaults, as its source text has them."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from runner.config.diagnostics.type_hints import show
from runner.config.help.source import Found, dotted, find

_PLAIN = {"int", "float", "bool", "str"}
_LISTS = {"list", "List", "tuple", "Tuple", "Sequence", "Iterable", "Collection", "set", "Set"}
_MAPPINGS = {"dict", "Dict", "Mapping", "MutableMapping"}
_PATHS = {"Path", "PathLike", "PurePath"}
_ANYTHING = {"Any", "object"}
_ANY = "any"
_WRAPPERS = {"Annotated", "Final", "ClassVar", "Required", "NotRequired"}  # round the type itself


@dataclass(frozen=True)
class Argument:
    """An argument of a constructor."""

    annotation: ast.AST | None
    default: ast.AST | None
    place: Found  # where its names have their meaning


def type_of(target: str, path: Sequence[str]) -> str:
    """The type of the value at this path of keys below what `target` makes: `int | null`; empty where nothing tells."""
    argument = arguments_of(target).get(path[0])
    for name in path[1:]:
        argument = _below(argument, name) if argument else None
    if argument is None:
        return ""
    if argument.annotation is None and isinstance(argument.default, ast.Constant):
        kind = type(argument.default.value).__name__
        return kind if kind in _PLAIN else ""
    words = _words(argument.annotation, argument.place)
    return "" if words == _ANY else words


def defaults_of(target: str) -> dict[str, str]:
    """What each argument is if it is not given, as it is typed, VALUE for an expression; only those with a default."""
    return {name: _as_typed(argument.default) for name, argument in arguments_of(target).items() if argument.default}


def doc_of(target: str, path: Sequence[str]) -> str:
    """The first line of the docstring of the class that types the value at this path, if one does."""
    found: Found | None = find(target)
    for name in path:
        argument = dict(_arguments(found)).get(name) if found else None
        found = (
            argument.place.look_up(dotted(argument.annotation)) if argument and dotted(argument.annotation) else None
        )
    if found is None or not isinstance(found.node, ast.ClassDef):
        return ""
    return (ast.get_docstring(found.node) or "").partition("\n")[0]


def arguments_of(target: str) -> Mapping[str, Argument]:
    """By name; none where the source cannot be found. What **kwargs take is not known."""
    found = find(target)
    return dict(_arguments(found)) if found else {}


def _arguments(found: Found) -> Iterator[tuple[str, Argument]]:
    node = found.node
    if isinstance(node, ast.ClassDef):
        yield from _of_class(node, found)
    elif isinstance(node, ast.FunctionDef):
        yield from _of_function(node, found)


def _of_class(node: ast.ClassDef, found: Found) -> Iterator[tuple[str, Argument]]:
    for name in ("__init__", "__new__"):
        own = [member for member in node.body if isinstance(member, ast.FunctionDef) and member.name == name]
        if own:  # before the last one may be those for type checkers
            yield from list(_of_function(own[-1], found))[1:]
            return
    is_dataclass = any(_last(decorator) == "dataclass" for decorator in node.decorator_list)
    for base in node.bases:
        inherited = found.look_up(dotted(base)) if dotted(base) else None
        arguments = list(_arguments(inherited)) if inherited else []
        yield from arguments
        if arguments and not is_dataclass:
            return
    for member in node.body if is_dataclass else []:
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            yield member.target.id, Argument(member.annotation, _of_field(member.value), found)


def _of_function(node: ast.FunctionDef, found: Found) -> Iterator[tuple[str, Argument]]:
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults = [*[None] * (len(positional) - len(node.args.defaults)), *node.args.defaults]
    for argument, default in zip(
        [*positional, *node.args.kwonlyargs], [*defaults, *node.args.kw_defaults], strict=True
    ):
        yield argument.arg, Argument(argument.annotation, default, found)


def _of_field(value: ast.AST | None) -> ast.AST | None:
    """The default in `field(default=1)`, or the default itself."""
    if not isinstance(value, ast.Call) or _last(value.func) != "field":
        return value
    given = {word.arg: word.value for word in value.keywords}
    return given.get("default", given.get("default_factory"))


def _below(argument: Argument, name: str) -> Argument | None:
    """What a mapping holds, or the field of a dataclass."""
    annotation, place = argument.annotation, argument.place
    if isinstance(annotation, ast.Subscript) and _last(annotation.value) in _MAPPINGS:
        return Argument(_items(annotation)[-1], None, place)
    found = place.look_up(dotted(annotation)) if dotted(annotation) else None
    return dict(_arguments(found)).get(name) if found else None


def _words(node: ast.AST | None, place: Found) -> str:
    """Empty for what cannot be typed, such as a tensor, and for what is not understood."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):  # an annotation in quotes
            return _words(_parsed(node.value), place)
        return "null" if node.value is None else ""
    if isinstance(node, ast.BinOp):
        return _either([node.left, node.right], place)
    name = _last(node)
    if isinstance(node, ast.Subscript):
        items = _items(node)
        if name == "Literal":
            return " | ".join(map(_as_typed, items))
        if name in ("Union", "Optional"):
            return _either([*items, *[ast.Constant(None)] * (name == "Optional")], place)
        if name in _WRAPPERS:
            return _words(items[0], place)
        if name in _LISTS:
            inner = [_words(item, place) for item in items if not isinstance(item, ast.Constant)]
            return f"list[{', '.join(inner)}]" if all(inner) and _ANY not in inner else "list"
    if name in _PLAIN:
        return name
    for known, word in ((_LISTS, "list"), (_MAPPINGS, "mapping"), (_PATHS, "path"), (_ANYTHING, _ANY)):
        if name in known:
            return word
    found = place.look_up(dotted(node)) if dotted(node) else None
    if found and not isinstance(found.node, (ast.ClassDef, ast.FunctionDef)):
        return _words(found.node, found)  # another name of a type
    return ""


def _either(members: Sequence[ast.AST], place: Found) -> str:
    words = [word for member in members if (word := _words(member, place))]
    return _ANY if _ANY in words else " | ".join(dict.fromkeys(words))


def _items(node: ast.Subscript) -> list[ast.expr]:
    return list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]


def _last(node: ast.AST | None) -> str:
    if isinstance(node, (ast.Subscript, ast.Call)):
        return _last(node.value if isinstance(node, ast.Subscript) else node.func)
    return dotted(node).rpartition(".")[2]


def _parsed(text: str) -> ast.AST | None:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None


def _as_typed(default: ast.AST) -> str:
    try:
        return show(ast.literal_eval(default))
    except (ValueError, SyntaxError):
        return "VALUE"
