"""A run directory that was copied by a tool that follows links, skips them, or stores them as files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from worlds import Run, only_run

import runner
from runner.checkpoints.layout import find_checkpoint, list_checkpoints
from runner.checkpoints.retention import set_link

# The loss is lowest in the middle of the run.
WORDS = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=200", "seed=2", "epochs=8")
UNSTEADY = (*WORDS, "optimizer.lr=0.3", "optimizer.momentum=0.9", "monitor=val/loss", "logger=none", "threads=1")


def copy_without_links(run: Path, to: Path) -> Path:
    """Copy as `rsync -r` does."""
    shutil.copytree(run, to, ignore=lambda path, names: [name for name in names if Path(path, name).is_symlink()])
    return to


def copy_links_as_files(run: Path, to: Path) -> Path:
    """Copy as archives do on a system without links: the file contains the name of the target."""
    copy_without_links(run, to)
    for link in (run / "checkpoints").iterdir():
        if link.is_symlink():
            (to / "checkpoints" / link.name).write_text(str(link.readlink()))
    return to


def copy_targets(run: Path, to: Path) -> Path:
    """Copy as `scp -r`, zip and object stores do. Another checkpoint is in the place of `best.tmp`, too."""
    shutil.copytree(run, to)
    shutil.copytree(to / "checkpoints" / "last", to / "checkpoints" / "best.tmp")
    return to


@pytest.fixture
def run(here: Callable[..., int], tmp_path: Path) -> Run:
    assert here(*UNSTEADY) == 0
    return only_run(tmp_path)


@pytest.mark.fault("a run directory copied without its links, or with copies in their place", outcome="survived")
@pytest.mark.parametrize("copy", [copy_targets, copy_without_links, copy_links_as_files])
def test_a_copied_run_is_used_like_the_original(
    copy: Callable[[Path, Path], Path], run: Run, here: Callable[..., int], tmp_path: Path
) -> None:
    best, last = f"step_{run.result['best']['step']}", f"step_{run.result['step']}"
    assert best != last
    path = copy(run.path, tmp_path / "outputs" / "run" / "copy")
    checkpoints = path / "checkpoints"
    assert find_checkpoint(checkpoints, "best").name == best and find_checkpoint(checkpoints, "last").name == last
    for name in ("best", "last"):
        commands = {
            "evaluate": ("task=evaluate", f"run={path}", f"checkpoint={name}"),
            "predict": ("task=predict", f"run={path}", f"checkpoint={name}"),
            "export": (
                "task=export",
                f"run={path}",
                f"checkpoint={name}",
                f"export.output={tmp_path / name}.safetensors",
            ),
            "fork": (f"fork={path}", f"checkpoint={name}", "epochs=9", "max_steps=1000"),
            "init": (*UNSTEADY, "max_steps=1", f"init_from={checkpoints / name}"),
        }
        for command, words in commands.items() if name == "best" else [("evaluate", commands["evaluate"])]:
            assert here(*words, f"name={command}-{name}") == 0, command
        loss = only_run(tmp_path, f"evaluate-{name}").result["metrics"]["val/loss"]
        assert loss == pytest.approx(run.values("val/loss")[int(find_checkpoint(checkpoints, name).name[5:])], rel=1e-5)
    log = (only_run(tmp_path, "init-best").path / "log.txt").read_text()
    assert f"checkpoints/{best}, " in log
    assert here(f"resume={path}", "epochs=9") == 0
    links = {link.name: str(link.readlink()) for link in checkpoints.iterdir() if link.is_symlink()}
    again = Run(path).result
    assert links == {"best": f"step_{again['best']['step']}", "last": f"step_{again['step']}"}
    assert {each.name for each in checkpoints.iterdir()} - {"best.tmp"} == {
        *links,
        *(each.name for each in list_checkpoints(checkpoints)),
    }


def test_an_unfinished_run_has_the_best_checkpoint_that_is_complete(run: Run) -> None:
    checkpoints, best = run.path / "checkpoints", run.result["best"]["step"]
    (checkpoints / "best").unlink()
    record = run.result
    for state, recorded in (("running", None), ("failed", {"step": 1, "value": 0.0})):  # killed; failed while it saved
        (run.path / "result.json").write_text(json.dumps(record | {"state": state, "best": recorded, "metrics": {}}))
        assert find_checkpoint(checkpoints, "best").name == f"step_{best}"


def test_a_best_checkpoint_that_was_not_copied_is_named(run: Run) -> None:
    best = f"step_{run.result['best']['step']}"
    shutil.rmtree(run.path / "checkpoints" / best)
    with pytest.raises(ValueError, match=rf"no checkpoint best, only .*: the record of the run names {best}, which is"):
        find_checkpoint(run.path / "checkpoints", "best")
    loaded = runner.open_run(run.path)
    assert loaded._checkpoint(None).name == f"step_{run.result['step']}"


def test_a_file_system_without_links_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr("pathlib.Path.symlink_to", refuse)
    (tmp_path / "step_1").mkdir()
    set_link(tmp_path, "last", tmp_path / "step_1")
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
