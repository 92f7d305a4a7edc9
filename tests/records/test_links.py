"""Links, pipes and devices in a run directory: no write follows them. Another user may have created them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.checkpoints.layout import verify
from runner.errors import JobFailed
from runner.jobs.continuation import copy_start
from runner.launchers.slurm.queue import submit
from runner.records.attempts import Attempt, append_attempt
from runner.records.console import LOGGER, logging_to
from runner.records.custom_code import CustomCode, CustomModule
from runner.records.run_directory import RunDirectory
from runner.records.run_files import check_links, write_atomically
from runner.records.run_record import report_failure

SMALL = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "logger=none", "threads=1", "max_steps=2")
pytestmark = pytest.mark.fault("a link in a run directory", outcome="refused")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A file outside of the run directory, to which links point."""
    path = tmp_path / "mine.txt"
    path.write_text('{"state": "running"}\n')
    return path


@pytest.fixture
def run(tmp_path: Path, here: Callable[..., int]) -> Path:
    assert here(*SMALL) == 0
    return next((tmp_path / "outputs" / "run").iterdir())


def test_a_whole_file_replaces_a_link(tmp_path: Path, mine: Path) -> None:
    (tmp_path / "report.md").symlink_to(mine)
    (tmp_path / "report.md.tmp").symlink_to(mine)  # the name of the partial file cannot be predicted
    before = mine.read_text()
    write_atomically(tmp_path / "report.md", "new")
    write_atomically(tmp_path / "plot.png", b"\x89PNG")
    assert mine.read_text() == before and (tmp_path / "plot.png").read_bytes() == b"\x89PNG"
    assert not (tmp_path / "report.md").is_symlink() and (tmp_path / "report.md").read_text() == "new"
    assert (tmp_path / "report.md").stat().st_mode == (tmp_path / "mine.txt").stat().st_mode
    assert not list(tmp_path.glob(".*"))


APPENDS: dict[str, Callable[[Path], object]] = {
    "attempts.jsonl": lambda directory: append_attempt(directory, Attempt(1)),
    "metrics.jsonl": lambda directory: RunDirectory(directory).log_metrics(1, 0, {"train/loss": 0.5}),
    "log.txt": lambda directory: logging_to(0, directory).__enter__(),
}


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", APPENDS)
def test_an_append_refuses_a_link(name: str, kind: str, tmp_path: Path, mine: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    if kind == "link":
        (directory / name).symlink_to(mine)
    else:
        os.mkfifo(directory / name)
    before = mine.read_text()
    with pytest.raises((OSError, JobFailed, ValueError), match="is a link"):
        APPENDS[name](directory)
    assert mine.read_text() == before


def test_logs_of_other_ranks_and_of_failures_do_not_follow_links(tmp_path: Path, mine: Path) -> None:
    before = mine.read_text()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_1.txt").symlink_to(mine)
    with logging_to(1, tmp_path):
        LOGGER.warning("text")
    (tmp_path / "log.txt").symlink_to(mine)
    (tmp_path / "result.json").write_text('{"state": "running"}')
    report_failure(tmp_path, "rank 1 has died")
    assert mine.read_text() == before


def test_directories_that_are_links_are_refused(tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp_path / "run"
    (tmp_path / "other").mkdir()
    theirs.mkdir()
    for name in ("code", "slurm"):
        (theirs / name).symlink_to(tmp_path / "other")
    code = CustomCode({"a": CustomModule("/a.py", "a.py", True)}, {"a": b""})
    with pytest.raises(OSError, match="is a link"):
        code.write(theirs)
    with pytest.raises(OSError, match="is a link"):
        submit("#!/bin/sh\n", theirs)
    assert not list((tmp_path / "other").iterdir())
    for name in ("code", "slurm"):
        (theirs / name).unlink()
    (theirs / "checkpoints").symlink_to(tmp_path / "other")
    check_links(theirs)  # this user has moved them to another disk
    monkeypatch.setattr("runner.records.run_files.os.geteuid", lambda: 54321)
    with pytest.raises(ValueError, match="checkpoints is a link"):
        check_links(theirs)


def test_a_report_and_an_export_do_not_follow_links(run: Path, mine: Path, here: Callable[..., int]) -> None:
    before = mine.read_text()
    names = ("report.md", "report.csv", "learning_curves.png")
    for name in names:
        (run / name).symlink_to(mine)
    assert here("task=report", f"run={run}") == 0
    assert not any((run / name).is_symlink() for name in names)
    (mine.parent / "other").mkdir()
    (run / "export").symlink_to(mine.parent / "other")
    assert here("task=export", f"run={run}") == 2
    assert not list((mine.parent / "other").iterdir())
    (run / "export").unlink()
    (run / "export").mkdir()
    (run / "export" / "mlp-step_2.safetensors").symlink_to(mine)
    (run / "export" / "mlp-step_2.safetensors.json").symlink_to(mine)
    assert here("task=export", f"run={run}") == 0
    assert mine.read_text() == before


@pytest.mark.parametrize("name", ["log.txt", "metrics.jsonl", "logs", "checkpoints/step_3.tmp"])
def test_a_resumed_run_does_not_write_through_links(
    name: str, run: Path, mine: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (mine.parent / "other").mkdir()
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(mine if "." in name and "/" not in name else mine.parent / "other")
    before = mine.read_text()
    nested = "/" in name
    assert here(f"resume={run}", "max_steps=3", "profile=true") == (0 if nested else 2)  # a leftover link is removed
    assert mine.read_text() == before and not list((mine.parent / "other").iterdir())
    reported = capsys.readouterr()
    if not nested:
        assert len(reported.err.splitlines()) == 1 and f"{name} is a link" in reported.err


def put_in_checkpoint(checkpoint: Path, kind: str, mine: Path) -> Path:
    """Put something that no run writes into a checkpoint, or in the place of one of its files. Return its path."""
    path = checkpoint / "extra"
    if kind == "link to a directory":
        (mine.parent / "secrets").mkdir()
        (mine.parent / "secrets" / "key").write_text("secret")
        path.symlink_to(mine.parent / "secrets")
    elif kind == "link to a file":
        path.symlink_to(mine)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:  # a file of the checkpoint that is a link to a copy of itself
        path = checkpoint / kind
        path.rename(mine.parent / kind)
        path.symlink_to(mine.parent / kind)
    return path


@pytest.mark.parametrize(
    "kind", ["link to a directory", "link to a file", "pipe", "directory", "rank_0.safetensors", "manifest.json"]
)
def test_a_checkpoint_with_links_is_neither_read_nor_copied(
    kind: str, run: Path, mine: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    path = put_in_checkpoint(run / "checkpoints" / "step_2", kind, mine)
    capsys.readouterr()
    for words in (
        (f"fork={run}", "max_steps=3", "name=other"),
        ("task=evaluate", f"run={run}", "name=other"),
        ("task=export", f"run={run}", f"export.output={mine.parent / 'other.safetensors'}"),
        (*SMALL, f"init_from={run}", "name=other"),
        (f"resume={run}", "max_steps=3"),
    ):
        assert here(*words) == 2, words
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{path} is not what was saved: it is a link or another special file" in line, words
    assert not (mine.parent / "outputs" / "other").exists()
    with pytest.raises(ValueError, match="special file"):
        copy_start(path.parent, mine.parent / "copy")


def test_linked_metrics_are_not_copied_into_a_fork(run: Path, mine: Path, tmp_path: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(mine)
    with pytest.raises(OSError, match="is a link"):
        copy_start(run / "checkpoints" / "step_2", tmp_path / "copy")
    (tmp_path / "elsewhere").mkdir()
    (run / "checkpoints" / "step_2").rename(tmp_path / "elsewhere" / "step_2")
    (run / "checkpoints" / "step_2").symlink_to(tmp_path / "elsewhere" / "step_2")  # moved to another disk
    (run / "metrics.jsonl").unlink()
    copy_start(run / "checkpoints" / "step_2", tmp_path / "copy")
    verify(tmp_path / "copy" / "checkpoints" / "step_2")
