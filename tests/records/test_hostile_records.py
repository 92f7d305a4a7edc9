"""Records of a malicious user: reading them neither blocks nor fills the memory, and they are shown as plain text."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import runner
from runner.checkpoints.layout import FileRecord, TrainState, manifest_text, verify
from runner.config.resume import add_recorded
from runner.errors import InputError, printable
from runner.records.attempts import read_attempts
from runner.records.ledger import read_ledger
from runner.records.run_files import read_json_lines, read_mapping
from runner.records.run_record import find_run

SMALL = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "logger=none", "threads=1", "max_steps=2")
BOMB = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40))
pytestmark = pytest.mark.fault("a hostile record file", outcome="refused")


@pytest.fixture
def run(tmp_path: Path, here: Callable[..., int]) -> Path:
    assert here(*SMALL) == 0
    return next((tmp_path / "outputs" / "run").iterdir())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BOMB, "more than 10 aliases"),
        (MERGES, "more than 10 aliases"),
        ("a: &a\n  b: *a\n", "levels of nesting"),
        ("a: " + "[" * 60 + "]" * 60, "levels of nesting"),
        ("a: " + "[" * 3000 + "]" * 3000, "cannot be read"),
        pytest.param("a: [" + "x, " * 1_000_001 + "]", "more than 1,000,000 values", marks=pytest.mark.thorough),
    ],
    ids=["aliases", "merges", "cycle", "depth 60", "depth 3000", "values"],
)
def test_yaml_that_expands_or_nests_too_far_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(InputError, match=problem):
        read_mapping(tmp_path / "config.yaml")


def make_special(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        path.symlink_to(path.with_name("mine"))
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)  # sparse


@pytest.mark.parametrize("kind", ["pipe", "device", "link", "large"])
def test_special_and_huge_files_are_not_read(kind: str, tmp_path: Path) -> None:
    for name in ("config.yaml", "result.json", "attempts.jsonl", "metrics.jsonl"):
        make_special(tmp_path / name, kind)
    with pytest.raises(InputError, match=r"config\.yaml cannot be read"):
        read_mapping(tmp_path / "config.yaml")
    assert not find_run(tmp_path).is_recorded
    for name, read in (("metrics.jsonl", read_json_lines), ("attempts.jsonl", lambda path: read_attempts(path.parent))):
        with pytest.raises(InputError, match=rf"{name}.* (special file|longer than)"):
            list(read(tmp_path / name))


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_special_files_of_a_checkpoint_are_damage(kind: str, tmp_path: Path) -> None:
    names = ("state.json", "progress.json", "rank_0.safetensors")
    (tmp_path / "manifest.json").write_text(
        manifest_text({name: FileRecord(sha256="0" * 64, size=0) for name in names})
    )
    for name in names:
        make_special(tmp_path / name, kind)
    with pytest.raises(ValueError, match="is not what was saved"):
        verify(tmp_path)
    make_special(tmp_path / "manifest.json", kind)
    with pytest.raises(ValueError, match="special file"):
        verify(tmp_path)


def test_result_without_keys_or_with_other_types(
    run: Path, here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = json.loads((run / "result.json").read_text())
    for changes in ({"machine": []}, {"machine": {"threads": "${oc.env:HOME}"}}):
        (run / "result.json").write_text(json.dumps(result | changes))
        assert "threads=1" in add_recorded(["task=rerun", f"run={run}"], [], multirun=False).overrides
    (run / "result.json").write_text('{"task": "train", "state": "finished"}')
    assert here("task=rerun", f"run={run}") == 2
    assert "has no final weights" in capsys.readouterr().err
    odd = {name: [[]] for name in result} | {"task": "train"}
    (run / "result.json").write_text(json.dumps(odd))
    opened = runner.open_run(run)
    assert opened.state == "lost" and opened.monitor is None and runner.table([opened])["state"][0] == "lost"
    sweep = tmp_path / "sweep-1"
    (sweep / "0-seed").mkdir(parents=True)
    (sweep / "0-seed" / "result.json").write_text('{"state": "finished"}')
    lines = [{"number": 0, "label": "0-seed", "overrides": []}, {"number": 0, "state": "running", "at": 1.0}]
    (sweep / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_ledger(sweep)[0].state == "finished"
    (sweep / "ledger.jsonl").write_text("".join(json.dumps(line | {"error": [1]}) + "\n" for line in lines))
    with pytest.raises(InputError, match="is damaged"):
        read_ledger(sweep)


def test_escape_sequences_are_shown_as_text(
    run: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert printable("a\tb\n\x1b[2J\x9b\u202e\r") == "a\tb\n\\x1b[2J\\x9b\\u202e\\r"
    evil = "\x1b]0;evil\x07"
    result = json.loads((run / "result.json").read_text()) | {"state": f"failed{evil}", "error": evil}
    (run / "result.json").write_text(json.dumps(result))
    (run / "overrides.yaml").write_text(json.dumps([*SMALL, f"monitor={evil}"]))
    capsys.readouterr()
    assert here("task=report", f"run={run}") == 0
    (run / "metrics.jsonl").write_text('"\x7f"\n')
    here("task=report", f"run={run}")
    here(f"resume={run}", f"monitor={evil}", "max_steps=3")
    shown = "".join(capsys.readouterr()) + repr(runner.open_run(run)) + (run / "report.md").read_text()
    assert "\x1b" not in shown and "\x07" not in shown and "\\x1b]0;evil" in shown


def test_steps_beyond_the_epoch_end_the_run(run: Path, here: Callable[..., int]) -> None:
    checkpoint = next((run / "checkpoints").glob("step_2"))
    manifest = json.loads((checkpoint / "manifest.json").read_text())["files"]
    state = TrainState(step=2, epoch=0, step_in_epoch=7_000_000, batch_size=64)
    text = json.dumps(vars(state))
    (checkpoint / "progress.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    manifest["progress.json"] = {"sha256": digest, "size": len(text)}
    (checkpoint / "manifest.json").write_text(manifest_text(manifest))
    assert here(f"resume={run}", "max_steps=3", "epochs=1") == 0
    assert here("task=evaluate", f"run={run}") == 0
