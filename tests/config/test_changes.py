"""Resuming with other values: which changes are refused before anything is written, and which are listed."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import Page

from runner.config.resume import Arguments, add_recorded
from runner.config.schema import FIXED_ON_RESUME, FREE_ON_RESUME, OF_COMMANDS

SMALL = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=200", "logger=none", "threads=1")


@pytest.fixture
def run(tmp_path: Path, here: Callable[..., int]) -> Path:
    """Return a run that stopped in the middle of its first epoch."""
    assert here(*SMALL, "max_steps=4", "optimizer.lr=0.1") == 0
    return next((tmp_path / "outputs" / "run").iterdir())


def contents(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_the_page_lists_the_keys_that_may_change_freely_or_never() -> None:
    table = Page("runs.md").text.partition("## Keys that may change")[2]
    free, fixed = (
        {*re.findall(r"`([\w.]+)`", *re.findall(rf"^\| {start}.*\| (.*) \|$", table, re.MULTILINE))}
        for start in ("may change freely", "are refused")
    )
    assert free == {*FREE_ON_RESUME} - {*OF_COMMANDS}
    # The page names single options of some groups, and the only case in which the batch size may not change.
    groups = {key.partition(".")[0] for key in fixed - {"batch_size"}}
    assert groups == {key.partition(".")[0] for key in FIXED_ON_RESUME}


@pytest.mark.fault("a resume with another seed, data, order or precision", outcome="refused")
def test_changes_that_a_checkpoint_does_not_allow_are_refused(
    run: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    refused = {
        "model=toy": r"model=toy cannot change when a run is resumed: the run has model=mlp; keep that, or add",
        "model.hidden=[32]": r"model.hidden=\[32\] cannot change .* the run has model.hidden=\[16\]",
        "seed=1": "seed=1 cannot change .* seed=0; keep that, or add resume_force=true",
        "loader.shuffle=false": "loader.shuffle=false cannot change .* loader.shuffle=true",
        "loss=nll": "loss=NLL cannot change",
        "+optimizer.groups=[{match:bias,lr:0.1}]": r"optimizer.groups=\[bias\] cannot change",
        "val_fraction=0.5": "val_fraction=0.5 cannot change .* val_fraction=null",
        "transforms=flip_crop": "transforms.* cannot change",
        "batch_size=100": "batch_size=100 cannot change in the middle of an epoch: .* 4 steps into one",
        "max_steps=3": "max_steps=3 is below the 4 steps that the run has made",
        "name=other": "name=other has no effect on resume=",
        f"outputs={tmp_path / 'elsewhere'}": "outputs=.*elsewhere has no effect on resume=",
    }
    before = contents(tmp_path)
    for word, message in refused.items():
        capsys.readouterr()
        assert here(f"resume={run}", word) == 2, word
        error = capsys.readouterr().err
        assert re.search(message, error), error
        assert len(error.splitlines()) <= 3, error
    assert here("resume_force=true") == 2
    assert contents(tmp_path) == before


def test_allowed_changes_are_listed_and_recorded(
    run: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Changes are relative to the first attempt, also if a later attempt has changed the value already."""
    args = ("scheduler=cosine", "optimizer.lr=0.01", "threads=2", "checkpoint.keep=1", f"outputs={run.parent.parent}")
    assert here("resume=last", "name=run", "max_steps=6", *args) == 0
    listed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed ")]
    assert listed == [
        "changed  scheduler Constant -> Cosine",
        "changed  optimizer.lr 0.1 -> 0.01",
        "changed  max_steps 4 -> 6",
    ]
    assert here(f"resume={run}", "max_steps=8", "batch_size=300", "seed=3", "resume_force=true") == 0
    listed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed ")]
    assert "changed  optimizer.lr 0.1 -> 0.01" in listed and "changed  seed 0 -> 3" in listed
    assert "changed  batch_size 200 -> 300" in listed
    attempts = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    assert [attempt["changed"].get("max_steps") for attempt in attempts] == [None, [4, 6], [4, 8]]
    assert "resume_force" not in (run / "overrides.yaml").read_text()
    assert here(f"resume={run}", "max_steps=9") == 0  # the run already has seed=3, so it needs no force


@pytest.mark.fault("a resume with another seed, data, order or precision", outcome="refused")
def test_other_data_is_refused(
    run: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = json.loads((run / "result.json").read_text())
    assert result["samples"] == {"train": 1437, "val": 360}
    (run / "result.json").write_text(json.dumps({**result, "samples": {"train": 1000, "val": 360}}))
    before = contents(tmp_path)
    assert here(f"resume={run}", "max_steps=6") == 2
    assert "there are 1,437 training samples, and the run in" in capsys.readouterr().err
    assert contents(tmp_path) == before
    assert here(f"resume={run}", "max_steps=6", "resume_force=true") == 0


@pytest.mark.fault("kill -9 before the first checkpoint", outcome="survived")
def test_run_without_a_checkpoint_restarts_at_step_0(
    run: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a run that was killed before its first checkpoint, not a finished one."""
    whole = json.loads((run / "result.json").read_text())
    shutil.rmtree(run / "checkpoints")
    assert here("resume=last") == 2
    assert "is finished and has no checkpoint any more; start a new run" in capsys.readouterr().err
    killed = {**whole, "state": "running", "step": 0, "weights_sha256": None, "metrics": {}}
    (run / "result.json").write_text(json.dumps(killed))
    assert here("resume=last") == 0
    assert "the run has no checkpoint yet: it restarts at step 0" in capsys.readouterr().out
    result = json.loads((run / "result.json").read_text())
    assert (result["state"], result["weights_sha256"]) == ("finished", whole["weights_sha256"])
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 5  # four steps and an evaluation


LIGHT = """\
import sys
from runner.cli import main

assert main() == 2
assert "torch" not in sys.modules
"""


def test_missing_directory_is_reported_before_torch_is_imported(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIGHT, "task=report", "report.runs=[nowhere]"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    message = f"report.runs={tmp_path}/nowhere is no directory; name one under outputs/, or run=last\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, "", message)


def test_launched_processes_get_the_options_that_are_not_recorded(run: Path) -> None:
    def arguments(*overrides: str) -> Arguments:
        return add_recorded([f"run={run}", "task=evaluate", *overrides], [], multirun=False)

    assert arguments().launch_overrides == []
    trusting = arguments("trust=true")
    assert "trust=true" in trusting.launch_overrides and "trust=true" not in trusting.recorded
