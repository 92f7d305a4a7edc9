"""task=rerun: a recorded run is repeated with identical weights, and differences are reported."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from commands import Commands
from worlds import Run, run

from runner.records import provenance
from runner.tasks.rerun import possible_causes

SMALL = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "max_steps=6", "logger=none")


def newest(folder: Path) -> Run:
    return Run(max((path for path in folder.iterdir() if path.is_dir()), key=lambda path: path.stat().st_ctime))


@pytest.mark.thorough
def test_a_run_is_repeated_to_the_same_weights_in_another_environment(commands: Commands, tmp_path: Path) -> None:
    first = commands.runner(*SMALL, "optimizer.lr=0.3", "name=first", env={"OMP_NUM_THREADS": "2"})
    assert first.returncode == 0, first.stderr
    one = newest(tmp_path / "outputs" / "first")
    again = commands.runner("task=rerun", "run=last", "name=first", env={"OMP_NUM_THREADS": "1"})
    assert again.returncode == 0, again.stderr
    other = newest(tmp_path / "outputs" / "first")
    assert other.path != one.path and "differs nothing: commit, versions, machine and conf" in again.stdout
    assert f"same weights: {one.result['weights_sha256']}\n" in again.stdout
    assert other.result["metrics"]["rerun/same_weights"] == 1.0
    assert other.result["weights_sha256"] == one.result["weights_sha256"]
    assert one.result["machine"]["threads"] == other.result["machine"]["threads"] == 2
    # Another learning rate makes it another run, which is reported.
    changed = commands.runner("task=rerun", f"run={one.path}", "optimizer.lr=0.2")  # two threads hang in a fork
    assert "differs optimizer.lr: was 0.3, is 0.2\n" in changed.stdout and "other weights: they were" in changed.stdout
    assert "the logged numbers differ at step 1: train/learning_rate was 0.3, is 0.2\n" in changed.stdout


@pytest.mark.thorough
def test_a_job_of_a_sweep_on_two_ranks_is_repeated(commands: Commands, tmp_path: Path) -> None:
    done = commands.runner("-m", *SMALL, "launcher=spawn", "parallel=ddp", "seed=4")
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "outputs" / "run").iterdir()
    again = commands.runner("task=rerun", f"run={sweep}/0")
    assert again.returncode == 0 and "same weights: " in again.stdout, again.stdout + again.stderr
    alone = commands.forked("task=rerun", f"run={sweep}/0", "launcher=env")
    assert alone.returncode == 2
    assert "had 2 ranks and cannot be repeated to the bit" in alone.stderr and "nproc_per_node=2" in alone.stderr
    assert len(list((tmp_path / "outputs" / "run").iterdir())) == 2


def test_a_fork_is_repeated_from_the_same_checkpoint(tmp_path: Path) -> None:
    one = run(tmp_path / "one", 1, *SMALL)
    forked = run(tmp_path / "forked", 1, f"fork={one.path}", "max_steps=8", f"outputs={tmp_path / 'forked'}")
    again = run(tmp_path / "again", 1, "task=rerun", f"run={forked.path}", f"outputs={tmp_path / 'again'}")
    assert again.result["metrics"]["rerun/same_weights"] == 1.0
    (attempt,) = map(json.loads, (again.path / "attempts.jsonl").read_text().splitlines())
    assert (attempt["first_step"], attempt["step"]) == (6, 8)
    assert "differs nothing: " in (again.path / "log.txt").read_text()


def test_runs_that_cannot_be_repeated_are_refused(tmp_path: Path) -> None:
    one = run(tmp_path, 1, *SMALL)
    result = one.result
    for facts, output in (
        ({"state": "preempted"}, "has no final weights .* try resume="),
        ({"task": "evaluate"}, "needs a training run"),
    ):
        (one.path / "result.json").write_text(json.dumps(result | facts))
        with pytest.raises(Exception, match=output):
            run(tmp_path / "again", 1, "task=rerun", f"run='{one.path}'", f"outputs={tmp_path / 'again'}")
    assert not (tmp_path / "again" / "run").exists()


def test_differences_are_listed(tmp_path: Path) -> None:
    one = run(tmp_path, 1, *SMALL)
    then = tmp_path / "then"
    shutil.copytree(one.path, then)
    assert possible_causes(then, one.path) == []
    result = one.result
    result["git"]["commit"], result["versions"]["torch"], result["machine"]["threads"] = "abc", "1.0", 64
    (then / "result.json").write_text(json.dumps(result))
    (then / "git.diff").write_text("other")
    config = yaml.safe_load((then / "config.yaml").read_text())
    config["optimizer"]["lr"], config["name"] = 9.0, "elsewhere"
    (then / "config.yaml").write_text(yaml.safe_dump(config))
    lines = possible_causes(then, one.path)
    assert [line.partition(":")[0] for line in lines] == [
        "git.commit",
        "versions.torch",
        "machine.threads",
        "optimizer.lr",
        "uncommitted changes",
    ]
    assert lines[3] == "optimizer.lr: was 9.0, is 0.05"


def test_the_uncommitted_diff_restores_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*args: str) -> str:
        own = ("-c", "user.name=x", "-c", "user.email=x@y")
        done = subprocess.run(["git", "-C", str(tmp_path), *own, *args], check=True, capture_output=True, text=True)
        return done.stdout

    git("init", "-q")
    (tmp_path / "code.py").write_text("one = 1\n")
    git("add", "-A")
    git("commit", "-qm", "x")
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.git_state() == {"commit": git("rev-parse", "HEAD").strip(), "dirty": False}
    assert provenance.git_diff() == ""
    (tmp_path / "code.py").write_text("one = 2\n")
    (tmp_path / "new.py").write_text("")
    assert provenance.git_state()["dirty"]
    diff = provenance.git_diff()
    assert diff.startswith("new file, not in this diff: new.py\n") and "+one = 2\n" in diff
    git("checkout", "-q", "code.py")
    (tmp_path / "kept.diff").write_text(diff)
    git("apply", "kept.diff")
    assert (tmp_path / "code.py").read_text() == "one = 2\n"
    monkeypatch.setattr(provenance, "MAX_DIFF_BYTES", 40)
    cut = provenance.git_diff()
    assert len(cut) < 120 and cut.endswith("\ntruncated here\n")
