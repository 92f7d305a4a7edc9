"""Text and types: text for a key of another type is converted, and a key of type text keeps what was typed."""

import typing
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Optional

import yaml
from antlr4 import InputStream  # type: ignore[import-untyped]
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import OverrideLexer
from omegaconf import Container, OmegaConf

from runner.config.diagnostics.signature import parameters_of
from runner.config.diagnostics.type_hints import convert
from runner.config.pointers import quote
from runner.config.schema import SECTIONS, Config

# The tokens that Hydra converts, and the tokens around one that is a whole value; None is the start or the end.
_CONVERTED = (OverrideLexer.INT, OverrideLexer.FLOAT, OverrideLexer.BOOL)
_BEFORE = (None, OverrideLexer.COMMA, OverrideLexer.BRACKET_OPEN, OverrideLexer.POPEN)
_AFTER = (None, OverrideLexer.COMMA, OverrideLexer.BRACKET_CLOSE, OverrideLexer.PCLOSE)


def _types_of(schema: type) -> dict[str, Any]:
    """Return the types of the fields. A type that OmegaConf does not support follows `Any` in `Annotated`."""
    hints = typing.get_type_hints(schema, include_extras=True)
    types = typing.get_type_hints(schema)
    return types | {
        name: hint.__metadata__[0] for name, hint in hints.items() if getattr(hint, "__origin__", None) is Any
    }


def _is_text(annotation: Any) -> bool:
    """Return True for str, a list of str, and either of them or None."""
    return annotation is str or any(map(_is_text, typing.get_args(annotation)))


_TYPES = _types_of(Config)
_TYPES |= {f"{key}.{name}": kind for key, section in SECTIONS.items() for name, kind in _types_of(section).items()}
_TEXT_KEYS = {key for key, annotation in _TYPES.items() if _is_text(annotation)}


def typed_keys(container: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return the top level, or a section of it, with each text converted to the type that the schema declares."""
    typed = {}
    for name, value in container.items():
        key = f"{section}{name}"
        if key in SECTIONS and isinstance(value, Mapping):
            typed[name] = typed_keys(value, f"{key}.")
        else:
            typed[name] = convert(_TYPES.get(key, Any), value, partial(_parse, key))
    return typed


def typed_options(node: Any, described: Mapping[str, Any] | None = None, target: str | None = None) -> Any:
    """Return the node of a group with each text converted to the type of its constructor's parameter.

    The nodes in it are converted, too. described: the types of options that the runner itself reads. target: the
    constructor whose options the node contains, if it has no `_target_`.
    """
    if isinstance(node, list):
        return [typed_options(item, target=target) for item in node]
    if not isinstance(node, Mapping):
        return node
    annotations, target = dict(described or {}), node.get("_target_", target)
    with suppress(ValueError):  # check_options reports a target that cannot be imported
        for name, each in (parameters_of(str(target)) if target else {}).items():
            # An annotation can be an object without the operator |.
            annotations[name] = Optional[each.annotation] if each.default is None else each.annotation  # noqa: UP045
    typed = {name: convert(annotations.get(name, Any), value, partial(_parse, name)) for name, value in node.items()}
    return typed if node.get("_recursive_") is False else {name: typed_options(value) for name, value in typed.items()}


def keep_text(override: str) -> str:
    """Return the override, with quotes around numbers and booleans if the key is of type text.

    Without quotes, Hydra would convert name=1e5 to 100000.0 before it becomes text again.
    """
    key, equals, value = override.partition("=")
    if key.lstrip("+") not in _TEXT_KEYS:
        return override
    lexer = OverrideLexer(InputStream(value))
    lexer.removeErrorListeners()  # composing reports a syntax error
    lexer.mode(OverrideLexer.VALUE_MODE)
    tokens = [token for token in lexer.getAllTokens() if token.type != OverrideLexer.WS]
    types = [None, *(token.type for token in tokens), None]
    functions = {token.text for token, after in zip(tokens, types[2:], strict=True) if after == OverrideLexer.POPEN}
    if functions - {"choice"}:  # such as range, whose arguments are numbers
        return override
    for token, before, after in reversed([*zip(tokens, types, types[2:], strict=False)]):
        if token.type in _CONVERTED and before in _BEFORE and after in _AFTER:
            value = f"{value[: token.start]}{quote(token.text)}{value[token.stop + 1 :]}"
    return f"{key}{equals}{value}"


def keep_text_of_file(node: yaml.MappingNode, config: Container, section: str = "") -> None:
    """Set the keys of type text to what was written in the file of the node, from which the configuration was read.

    YAML has converted `name: 1e5` to 100000.0.
    """
    for name, value in node.value:
        key = f"{section}{name.value}"
        if key in SECTIONS and isinstance(value, yaml.MappingNode):
            keep_text_of_file(value, config, f"{key}.")
        elif key in _TEXT_KEYS and isinstance(value, yaml.ScalarNode) and not value.tag.endswith(":null"):
            OmegaConf.update(config, key, value.value)


def _parse(key: str, text: str) -> Any:
    """Return the value that the text has on the command line, or the text if it is not a single value there.

    A mapping stays text, because it could name code, which untrusted text must not.
    """
    try:
        override = OverridesParser.create().parse_override(keep_text(f"{key}={text}"))
    except (HydraException, RecursionError):
        return text
    is_value = override.value_type == ValueType.ELEMENT and not _has_mapping(override.value())
    return override.value() if is_value else text


def _has_mapping(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_has_mapping, value)))
