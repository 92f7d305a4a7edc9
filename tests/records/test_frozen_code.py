"""The code that is frozen when a job is submitted."""

import hashlib
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from custom_files import write_files

from runner.errors import InputError
from runner.paths import ROOT
from runner.records import frozen_code, provenance
from runner.records.code_copy import original_path, running_copy
from runner.records.custom_code import imported_code, read_code
from runner.records.frozen_code import code_files, freeze_code
from runner.records.provenance import git_diff, git_state
from runner.records.run_record import RunRecord


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which is also the directory of --config-dir."""
    monkeypatch.chdir(tmp_path)
    files = {
        "model/own.yaml": "_target_: own.Own\n",
        "own.py": "SCALE = 1\n",
        "words.txt": "of the model\n",
        ".git/config": "",
        "__pycache__/own.pyc": "",
        "outputs/run/earlier/overrides.yaml": "",
        "outputs/run/earlier/slurm/old.py": "",
        "outputs/run/waiting/code/1/code.json": "",
        "outputs/run/waiting/slurm/job.py": "",
        "environment/pyvenv.cfg": "",
        "environment/lib/other.py": "",
    }
    write_files(tmp_path, files)
    (tmp_path / "weights.bin").write_bytes(bytes(frozen_code.MAX_SIZE + 1))
    return tmp_path


def new_run(directory: Path, name: str) -> Path:
    (directory / "outputs" / "run" / name).mkdir(parents=True)
    return directory / "outputs" / "run" / name


def test_the_copy_has_the_runner_and_custom_code(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mine / "library").mkdir()
    (mine / "library" / "layers.py").write_text("")
    other = mine.parent / f"{mine.name}-path"  # as of PYTHONPATH
    (other / "models").mkdir(parents=True)
    (other / "models" / "__init__.py").write_text("")
    (other / "models" / "custom.py").write_text("")
    (other / "single.py").write_text("")
    (other / "site-packages").mkdir()
    (other / "site-packages" / "bought.py").write_text("")
    for directory in (other, other / "site-packages", mine):
        monkeypatch.syspath_prepend(directory)
    monkeypatch.delitem(sys.modules, "models", raising=False)
    for name in ("library.layers", "models.custom", "single", "bought"):
        importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))  # removed after the test
    if "models" in sys.modules:  # the package of models.custom, which was imported too
        monkeypatch.setitem(sys.modules, "models", sys.modules.pop("models"))

    frozen = freeze_code(new_run(mine, "one"), [str(mine)])
    sums = (frozen.path / "code.sha256").read_bytes()
    assert frozen.path == mine / "outputs" / "run" / "one" / "code" / hashlib.sha256(sums).hexdigest()[:12]
    subprocess.run(["sha256sum", "--quiet", "--check", "code.sha256"], cwd=frozen.path, check=True, timeout=60)
    code, own = frozen.path, frozen.path / "own" / f"0-{mine.name}"
    assert frozen.config_dirs == [str(own)]
    names = {path.relative_to(own).as_posix() for path in own.rglob("*")}
    assert names == {"model", "model/own.yaml", "own.py", "words.txt", "weights.bin", "library", "library/layers.py"}
    assert (own / "weights.bin").readlink() == mine / "weights.bin"
    imported = {path.relative_to(code / "imported").as_posix() for path in (code / "imported").rglob("*.py")}
    assert {"models/custom.py", "single.py"} <= imported and "bought.py" not in imported
    compared = {*code_files([str(mine)])}
    assert {mine / "own.py", mine / "library/layers.py", other / "models/custom.py", other / "single.py"} <= compared
    assert not compared & {other / "site-packages/bought.py", mine / "outputs/run/earlier/slurm/old.py"}
    for name in ("runner/cli.py", "conf/config.yaml", "models/mlp.py", "hydra_plugins/runner/sweeps.py"):
        assert (code / "installed" / name).read_bytes() == (ROOT / name).read_bytes()


def test_frozen_code_is_reused(mine: Path) -> None:
    directory = new_run(mine, "one")
    first = freeze_code(directory, [str(mine)])
    (mine / "own.py").write_text("SCALE = 2\n")
    again = freeze_code(directory, [str(mine)])
    assert first.since is None and again.since is not None
    assert (again.path, again.config_dirs) == (first.path, first.config_dirs)
    assert freeze_code(new_run(mine, "two"), [str(mine)], write=False).path.name != first.path.name
    (mine / "own.py").write_text("SCALE = 1\n")
    assert freeze_code(new_run(mine, "three"), [str(mine)]).path.name == first.path.name
    with pytest.raises(InputError, match=f"--config-dir=/other: {first.path} does not have this directory; remove"):
        freeze_code(directory, [str(mine), "/other"])


@pytest.mark.fault("the frozen code of a job changed", outcome="refused")
def test_a_damaged_copy_is_refused(mine: Path) -> None:
    directory = new_run(mine, "one")
    path = freeze_code(directory, [str(mine)]).path
    (path / "installed" / "runner" / "cli.py").write_text("")
    with pytest.raises(InputError, match=rf"{path} is damaged \(installed/runner/cli.py has changed\); restore it"):
        freeze_code(directory, [str(mine)])


def test_a_large_directory_is_refused_before_it_is_copied(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = new_run(mine, "one")
    monkeypatch.setattr(frozen_code, "MAX_FILES", 2)
    for write in (True, False):
        with pytest.raises(InputError, match=r"has 3 small files of 0 MiB, more than 2 or 100 MiB; move the data out"):
            freeze_code(directory, [str(mine)], write)
    assert list(directory.iterdir()) == []


def test_a_job_records_the_origin_and_the_uncommitted_changes_of_its_frozen_code(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = {"commit": "abc", "dirty": True}
    with monkeypatch.context() as patched:
        patched.setattr(provenance, "git_state", lambda: git)
        patched.setattr(provenance, "git_diff", lambda: "a diff")
        frozen = freeze_code(new_run(mine, "one"), [str(mine)])
    assert running_copy() is None
    monkeypatch.setenv("RUNNER_CODE", str(frozen.path))
    assert original_path(f"{frozen.config_dirs[0]}/own.py") == str(mine / "own.py")
    assert original_path("/elsewhere") == "/elsewhere"
    assert git_state() == git
    assert git_diff() == "a diff"


def test_a_job_records_the_modules_of_its_copy(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run of the job has no second copy of its custom modules."""
    run = new_run(mine, "one")
    frozen = freeze_code(run, [str(mine)])
    monkeypatch.setenv("RUNNER_CODE", str(frozen.path))
    monkeypatch.syspath_prepend(frozen.config_dirs[0])
    monkeypatch.setitem(sys.modules, "own", importlib.import_module("own"))  # removed after the test
    code = imported_code({"model": {"_target_": "own.Own"}})
    code.write(run)
    assert list((run / "code").iterdir()) == [frozen.path]
    RunRecord(run, code=code.record).save()
    (mine / "own.py").write_text("SCALE = 2\n")
    recorded = read_code(run)
    assert recorded is not None and recorded.sources == {"own": b"SCALE = 1\n"} and recorded.hash == code.hash
    assert recorded.modules["own"].file == str(mine / "own.py")
