"""Directories whose names contain characters with a meaning in an override."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from worlds import only_run

Here = Callable[..., int]
TOY = ("model=toy", "data=toy", "logger=none", "threads=1")


@pytest.mark.fault("a directory with unusual characters in its name", outcome="went_on")
@pytest.mark.parametrize("name", ["it's", 'two "words"', "a,b", "back\\'slash\\"])
def test_run_in_a_directory_with_unusual_characters_is_resumed(
    name: str, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert here(*TOY, "max_steps=1") == 0
    assert here("resume=last", "max_steps=2") == 0
    assert only_run(folder).result["step"] == 2
    if name == "it's":
        assert here("task=report", "run=last") == 0
        assert here("-m", *TOY, "max_steps=1", "name=sweep") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resume=a,b"], "resume=a,b: a path with a comma must be quoted; type 'resume='\"'\"'a,b'\"'\"''"),
        (["outputs=a,b", "run=last", "task=evaluate"], "outputs=a,b: a path with a comma must be quoted; type "),
        (["outputs=\udcff"], "outputs=\\udcff: a path must be valid UTF-8, because the records contain it; rename it"),
    ],
)
def test_path_that_cannot_be_read_is_refused(
    words: list[str], message: str, here: Here, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert here(*words) == 2
    output = capfd.readouterr()
    assert output.err.startswith(message) and output.err.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_interpolated_path_is_refused(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "${oc.env:HOME}"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert here(*TOY, "max_steps=1") == 0
    capfd.readouterr()
    assert here("resume=last", "max_steps=2") == 2
    path = only_run(folder).path
    assert capfd.readouterr().err == (
        f"resume={path}: the path must not contain ${{, which is interpolated; use a link to it\n"
    )
