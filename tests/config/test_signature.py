"""Tests of options against constructors: targets, names, required options, types, and their messages."""

import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, Optional, Union

import pytest

from runner.config.diagnostics.signature import check_options
from runner.config.diagnostics.type_hints import suits

Width = NewType("Width", int)


class Tensor:
    pass


class ToyNet:
    def __init__(self, sample_shape: Sequence[int], num_outputs: int = 5, hidden: int = 10) -> None: ...


class Everything:
    def __init__(
        self,
        lr: "float" = 0.1,
        bias: bool = True,
        name: str = "relu",
        activation: Literal["relu", "gelu"] = "relu",
        seed: "int | None" = None,
        betas: tuple[float, float] = (0.9, 0.999),
        scales: dict[str, int] | None = None,
        nothing: Any = None,
        only_checkers: "Unknown" = 3,  # type: ignore[name-defined]  # noqa: F821
        penalty: Union[float, Tensor] = 0.0,  # noqa: UP007
        weights: Tensor | None = None,
        root: Path | None = None,
        width: Annotated[Width, "pixels"] = Width(2),
        plain_float=0.5,
        plain_bool=False,
        plain_none=None,
        plain_list=(),
        late: int = None,  # type: ignore[assignment]  # noqa: RUF013
    ) -> None: ...


class Open:
    def __init__(self, size: int = 1, **kwargs: Any) -> None: ...


class Holder:
    def __init__(self, net: ToyNet, layers: Sequence[ToyNet] = ()) -> None: ...


def partly(params: Tensor, lr: float, momentum: float = 0.0) -> None: ...


def variadic(*layers: ToyNet, first: int = 0) -> None: ...


HERE = __name__


def check(target: str, **node: Any) -> list[str]:
    return check_options("model", {"_target_": f"{HERE}.{target}", **node})


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that writes importable files; their modules are removed afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


UNKNOWN = "ToyNet has no option"
OPTIONS = "(sample_shape, num_outputs, hidden)"
SHAPE = "model.sample_shape must be given as Sequence[int]"


@pytest.mark.parametrize(
    ("target", "node", "messages"),
    [
        ("ToyNet", {"sample_shape": [3, 4], "hidden": 3}, []),
        (
            "ToyNet",
            {"sample_shape": [3], "hiden": 3},
            [f"model.hiden=3: {UNKNOWN} hiden; did you mean hidden? {OPTIONS}"],
        ),
        ("ToyNet", {"zzz": None}, [f"model.zzz=null: {UNKNOWN} zzz; choose among: {OPTIONS[1:-1]}", SHAPE]),
        ("ToyNet", {"sample_shape": "???"}, [SHAPE]),
        ("Tensor", {"x": 1}, ["model.x=1: Tensor has no option x; it accepts none"]),
        ("Holder", {}, ["model.net must be given as ToyNet"]),
        ("partly", {"_partial_": True, "momentum": 0.9}, []),
        ("partly", {"_partial_": True, "lr": "fast"}, ["model.lr=fast must be float"]),
        (
            "partly",
            {"_partial_": True, "momentun": 1},
            ["model.momentun=1: partly has no option momentun; did you mean momentum? (momentum)"],
        ),
        ("Open", {"whatever": "x"}, []),
        ("Open", {"size": "x"}, ["model.size=x must be int; for example 1"]),
        ("ToyNet", {"_args_": [[1], 5]}, []),
        ("variadic", {"_args_": [1, 2, 3]}, []),
    ],
)
def test_options_are_checked_against_the_signature(target: str, node: dict[str, Any], messages: list[str]):
    assert check(target, **node) == messages


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("lr", "fast", "model.lr=fast must be float; for example 0.1"),
        ("bias", 1, "model.bias=1 must be bool; for example true"),
        ("name", 3, "model.name=3 must be str; for the text 3 type \"'3'\""),
        ("activation", "rleu", "model.activation=rleu must be relu | gelu; did you mean relu?"),
        ("seed", 1.5, "model.seed=1.5 must be int | null"),
        ("betas", [0.9], "model.betas=[0.9] must be tuple[float, float]; for example [0.9,0.999]"),
        ("scales", {"a": "x"}, "model.scales={a:x} must be dict[str, int] | null"),
        ("root", [3], "model.root=[3] must be Path | null"),
        ("width", "x", "model.width=x must be int; for example 2"),
        ("plain_float", "x", "model.plain_float=x must be float; for example 0.5"),
    ],
)
def test_wrong_type_is_reported_with_rule_and_fix(option: str, value: Any, message: str):
    assert check("Everything", **{option: value}) == [message]


def test_right_types_pass():
    assert (
        check("Everything", lr=1, bias=False, name="x", activation="gelu", seed=3, betas=[1, 0.5], scales={"a": 1})
        == []
    )
    assert check("Everything", only_checkers="anything", penalty=1, weights=None, root="data", late=None) == []
    assert check("Everything", plain_float=1, plain_none=[1], plain_list=3, nothing={"x": [1]}) == []
    assert check("Everything", weights={"_target_": f"{HERE}.Tensor"}, lr={"_target_": f"{HERE}.Tensor"}) == []


@pytest.mark.parametrize(
    ("annotation", "right", "wrong"),
    [
        (Optional[int], [1, None], ["x", 1.0]),  # noqa: UP045
        (typing.List[float], [[1, 0.5], []], [["x"], "x", 1]),  # noqa: UP006
        (list, [[1, "x"]], ["x", {"a": 1}]),
        (tuple[int, ...], [[], [1, 2]], [[1.5], 3]),
        (Sequence[str], [["a"]], ["a", [1]]),
        (Mapping[str, float], [{"a": 1}], [{"a": "x"}, {1: 1.0}]),
        (Callable[[int], int], [{"_target_": "math.sqrt"}], ["x", 1]),
        (Literal[1, "a"], [1, "a"], [True, "b", 1.0]),
        (Tensor, [], [1, "x", [1], None]),
    ],
)
def test_annotations(annotation: Any, right: list[Any], wrong: list[Any]):
    assert [suits(annotation, value) for value in right] == [True] * len(right)
    assert [suits(annotation, value) for value in wrong] == [False] * len(wrong)


def test_nested_nodes_are_checked_at_their_own_keys():
    node = {"_target_": f"{HERE}.ToyNet", "hiden": 3, "sample_shape": [1]}
    messages = check("Holder", net=node, layers=[node], **{"_recursive_": True})
    assert [message.partition("=")[0] for message in messages] == ["model.net.hiden", "model.layers.0.hiden"]
    assert check("Holder", net=node, _recursive_=False) == []  # the constructor creates the nested objects
    plain = check_options("loader", {"inner": {"deep": [{"_target_": f"{HERE}.ToyNet"}]}})
    assert plain[0].startswith("loader.inner.deep.0.sample_shape must be given")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("jsn.JSONDecoder", "there is no module jsn; did you mean json?"),
        ("json.decoderr.JSONDecoder", "json has no decoderr; did you mean decoder?"),
        ("json.decoder.JSONDecodr", "json.decoder has no JSONDecodr; did you mean JSONDecoder?"),
        ("json.JSONDecoder.decod", "json.JSONDecoder has no decod; did you mean decode?"),
        ("json.decoder", "is a module, not a class or a function"),
        ("math.pi", "is a float, not a class or a function"),
        (".json", "must be a dotted path, as package.module.Name"),
    ],
)
def test_missing_target_suggests_the_nearest_name(target: str, message: str):
    assert check_options("model", {"_target_": target, "a": 1}) == [f"model._target_={target}: {message}"]


def test_failing_import_names_the_innermost_line_of_custom_code(write_module):
    path = write_module("broken_inside.py", "import json\njson.loads('{')\n")
    write_module("outer_net.py", "import broken_inside\n")
    (message,) = check_options("model", {"_target_": "outer_net.Net"})
    assert message.startswith("model._target_=outer_net.Net: importing outer_net failed with: JSONDecodeError")
    assert message.endswith(f" (at {path}:2)") and "\n" not in message
    write_module("outer_net.py", "x = 1\ndef f(:\n")
    (message,) = check_options("model", {"_target_": "outer_net.Net"})
    assert "SyntaxError: invalid syntax" in message and message.endswith("outer_net.py:2)")


def test_postponed_annotations_are_evaluated_in_their_module(write_module):
    write_module(
        "postponed_net.py",
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import Literal as L\n"
        "@dataclass\nclass Net:\n    kind: L['a', 'b']\n    other: Missing = 1\n    size: int = 3\n",
    )
    messages = check_options("model", {"_target_": "postponed_net.Net", "kind": "c", "other": "x", "size": "x"})
    assert messages == [
        "model.kind=c must be a | b",
        "model.size=x must be int; for example 3",
    ]
