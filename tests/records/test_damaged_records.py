"""Every command with every damaged record file: it does not need the file, or it refuses it in one line."""

import datetime
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from mode_cases import tier

from runner.checkpoints.layout import list_checkpoints
from runner.config.changes import changed_since, check_resumable, read_config
from runner.config.schema import GROUPS, NAMED_GROUPS, SECTIONS, Config
from runner.errors import InputError
from runner.records import run_lock
from runner.records.run_record import RESULT_KEYS, read_run
from runner.tasks.rerun import possible_causes

SMALL = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "logger=none", "threads=1", "max_steps=2")
pytestmark = pytest.mark.fault("a damaged record file", outcome="refused")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def directory(path: Path) -> None:
    path.mkdir()


def empty(path: Path) -> None:
    path.touch()


def binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 40)


def other_types(path: Path) -> None:
    path.write_text('[[{"step": "x"}], null]\n')


def scalar(path: Path) -> None:
    path.write_text("7\n")


KINDS: tuple[Callable[[Path], None], ...] = (loop, directory, os.mkfifo, empty, binary, other_types, scalar)
FILES = (
    *("overrides.yaml", "config.yaml", "result.json", "attempts.jsonl", "metrics.jsonl", "labels.json", "loggers.json"),
    *("git.diff", "auto.json", "log.txt", "holder-1.json", "manifest.json", "state.json", "progress.json"),
    "rank_0.safetensors",  # these files of all checkpoints
)
FAST = ("config.yaml", "metrics.jsonl", "manifest.json")
COMMANDS = {
    "resume": ("resume={run}", "max_steps=3"),
    "fork": ("fork={run}", "max_steps=3"),
    "evaluate": ("task=evaluate", "run={run}"),
    "predict": ("task=predict", "run={run}", "checkpoint=best"),
    "export": ("task=export", "run={run}", "export.output={run}.safetensors"),
    "rerun": ("task=rerun", "run={run}"),
    "diff": ("task=diff", "run={run}", "diff.with={other}"),
    "diff the other": ("task=diff", "run={other}", "diff.with={run}"),
    "report": ("task=report", "run={run}", "report.output={run}-report"),
    "initial weights": (*SMALL, "init_from={run}"),
    "runs list": ("runs", "list"),
    "runs show": ("runs", "show", "{run}"),
}


@pytest.fixture
def runs(tmp_path: Path, here: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return two equal runs."""
    monkeypatch.setattr(run_lock, "DEAD_AFTER_S", 0.05)  # after which an unknown lock owner is dead
    assert here(*SMALL) == here(*SMALL) == 0
    return sorted((tmp_path / "outputs" / "run").iterdir())


def damage(run: Path, file: str, kind: Callable[[Path], None]) -> list[Path]:
    """Replace the file, or the file of this name in all checkpoints. Return the paths."""
    checkpoints = list_checkpoints(run / "checkpoints")
    in_checkpoints = (checkpoints[0] / file).exists()
    paths = [path / file for path in checkpoints] if in_checkpoints else [run / file]
    for path in paths:
        path.unlink(missing_ok=True)
        kind(path)
    return paths


PAIRS = [  # a pair takes seconds, because it starts every command
    pytest.param(kind, file, marks=tier(kind is loop and file in FAST, kind in (loop, other_types)))
    for kind in KINDS
    for file in FILES
]


@pytest.mark.parametrize(("kind", "file"), PAIRS)
def test_every_command_refuses_a_damaged_file_in_one_line(
    kind: Callable[[Path], None],
    file: str,
    runs: list[Path],
    here: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, other = runs
    for number, (name, words) in enumerate(COMMANDS.items()):
        run = whole.with_name(f"{number}")
        shutil.copytree(whole, run, symlinks=True)
        paths = damage(run, file, kind)
        capsys.readouterr()
        status = here(*(word.format(run=run, other=other) for word in words))
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err, (name, out, err)
        assert status in (0, 2, *([1] if "diff" in name else [])), (name, err)
        if status == 2:
            lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
            assert 1 <= len(lines) <= 3 and str(run) in lines[0], (name, err)
        elif paths[0].parent.parent.name == "checkpoints":  # the only checkpoints are damaged
            assert name in ("rerun", "diff", "diff the other", "report", "runs list", "runs show"), name
        for path in paths:  # runs list reads all runs
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        shutil.rmtree(run)


VALUES = ("x", 7, [], {"x": [None]})


def outcome_of(call: Callable[[], object]) -> str:
    """Return the message if the call raises InputError; empty otherwise."""
    try:
        call()
    except InputError as error:
        assert 1 <= len(error.messages) <= 3
        return str(error)
    return ""


def test_every_section_of_every_record_is_checked(runs: list[Path]) -> None:
    """As `resume=`, `fork=` and other commands read the records before they start."""
    run, other = runs
    config, whole = read_config(other), yaml.safe_load((run / "config.yaml").read_text())
    choices: dict[str, str | None] = {"task": "train"}

    def read_all() -> list[str]:
        calls: list[Callable[[], object]] = [
            lambda: read_config(run),
            lambda: changed_since(run, config),
            lambda: possible_causes(run, other),
            lambda: read_run(run).settings,
        ]
        found = [*map(outcome_of, calls)]
        for key in ("resume", "fork"):
            messages = check_resumable(Config(**{**vars(config), key: str(run)}), choices)
            assert all("\n" not in message for message in messages)
            found += messages
        return found

    assert read_all() == [""] * 4
    sections = (*GROUPS, *NAMED_GROUPS, *SECTIONS, "seed", "precision", "clip_grad_norm", "freeze")
    for key, value in itertools.product(sections, (*VALUES, "missing")):
        changed = {name: each for name, each in whole.items() if name != key}
        changed |= {} if value == "missing" else {key: value}
        (run / "config.yaml").write_text(yaml.safe_dump(changed, sort_keys=False))
        if key in GROUPS:
            assert any(f"config.yaml: {key} is not a mapping" in message for message in read_all()), (key, value)
        else:
            read_all()
    for groups in (["x"], [7], {"a": 1}, "x"):
        (run / "config.yaml").write_text(
            yaml.safe_dump(whole | {"optimizer": {**whole["optimizer"], "groups": groups}})
        )
        assert any("optimizer.groups is not a list of mappings" in message for message in read_all())
    lines = yaml.safe_dump(whole, sort_keys=False).splitlines(keepends=True)
    for number in (*range(0, len(lines), 20), len(lines) - 1):
        (run / "config.yaml").write_text("".join(lines[:number]))  # truncated
        messages = read_all()
        assert any("config.yaml" in message for message in messages), number
    (run / "config.yaml").write_text(
        yaml.safe_dump(whole | {"model": {**whole["model"], "day": datetime.date(2026, 1, 1)}})
    )
    read_all()


@pytest.mark.thorough
def test_every_field_of_result_json_may_have_any_type(runs: list[Path]) -> None:
    run, other = runs
    whole = json.loads((run / "result.json").read_text())
    config = read_config(other)
    for key, value in itertools.product(RESULT_KEYS, VALUES):
        (run / "result.json").write_text(json.dumps(whole | {key: value}))
        record = read_run(run)
        outcome_of(lambda: possible_causes(run, other))
        outcome_of(lambda record=record: (record.standing, record.measured, record.settings, record.label))  # type: ignore[misc]
        for pointer in ("resume", "fork"):
            check_resumable(Config(**{**vars(config), pointer: str(run)}), {"task": "train"})
