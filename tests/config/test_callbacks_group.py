"""Tests of the group `callbacks`: which of several chosen options run, and which choices are refused."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from custom_files import write_files
from hydra.core.global_hydra import GlobalHydra

SMALL = ("--config-dir", "mine", "model=toy", "data=toy", "max_steps=2", "batch_size=8", "logger=none", "backend=gloo")
FILES = {
    "first.py": """
        from runner import Callback

        class First(Callback):
            def __init__(self, every: int = 1):
                if every < 1:
                    raise ValueError(f"every={every} must be at least 1")
                self.every = every

            def after_step(self, now):
                if now.step % self.every == 0:
                    with open("first", "a") as file:
                        file.write(f"{now.step} ")
    """,
    "second.py": """
        from runner import Callback

        class Second(Callback):
            def after_step(self, now):
                with open("second", "a") as file:
                    file.write(f"{now.step} ")

        class NotOne: ...

        class Later(Callback):
            stops_as = "later"
    """,
    "callbacks/first.yaml": "first: {_target_: first.First, every: 1}\n",
    "callbacks/bare.yaml": "first: {_target_: first.First}\n",
    "callbacks/second.yaml": "second: {_target_: second.Second}\n",
    "callbacks/later.yaml": "later: {_target_: second.Later}\n",
    "callbacks/not_one.yaml": "it: {_target_: second.NotOne}\n",
    "callbacks/nameless.yaml": "_target_: first.First\n",
    "experiment/both.yaml": "# @package _global_\ndefaults:\n  - override /callbacks: [first, second]\n",
}
NONE, SECOND = {}, {"second": "1 2 "}
OPTIONS = "(bare, first, later, nameless, none, not_one, second)"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a custom directory with two callbacks, each of which writes its steps to a file of its name."""
    write_files(tmp_path / "mine", FILES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("first", "second"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    GlobalHydra.instance().clear()
    return tmp_path


def seen(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in ("first", "second") if (folder / name).exists()}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["callbacks=none"], NONE),
        (["callbacks=[first,second]", "~callbacks.first"], SECOND),
        (["callbacks=bare", "+callbacks.first.every=2"], {"first": "2 "}),
        (["experiment=both", "callbacks=second"], SECOND),
        (["-m", "callbacks=[first],[first,second]"], {"first": "1 2 1 2 ", "second": "1 2 "}),
    ],
    ids=" ".join,
)
def test_chosen_callbacks_are_called(
    args: list[str], expected: dict[str, str], mine: Path, here: Callable[..., int]
) -> None:
    assert here(*SMALL, *args) == 0
    assert seen(mine) == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-m", "callbacks=first,sceond"], f"callbacks=sceond: no such callbacks; did you mean second? {OPTIONS}"),
        (
            ["callbacks=bare", "callbacks.first.every=5"],
            "callbacks.first.every=5: no such key; did you mean callbacks.first?",
        ),
        (["callbacks=first", "callbacks.first.every=0"], "callbacks.first.every=0 must be at least 1"),
        (
            ["callbacks=[nameless,second]"],
            "callbacks._target_=first.First: a callback has a name; in its file write NAME: {_target_: first.First}",
        ),
        (
            ["callbacks=not_one"],
            "callbacks.it._target_=second.NotOne: not a callback; derive it from runner.Callback",
        ),
        (
            ["callbacks=later"],
            "callbacks.later._target_=second.Later: stops_as='later' must be finished, pruned or paused",
        ),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_wrong_callbacks_are_reported_in_one_line(
    args: list[str], message: str, mine: Path, here: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert here(*SMALL, *args) == 2
    assert capfd.readouterr() == ("", f"{message}\n")
    assert sorted(path.name for path in mine.iterdir()) == ["mine"]
