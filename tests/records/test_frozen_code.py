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
from runner.records.frozen_code import FrozenCode, freeze
from runner.records.provenance import git_diff, git_state, original_path, submission_time


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
        "outputs/run/waiting/code-1.tar": "",
        "environment/pyvenv.cfg": "",
        "environment/lib/other.py": "",
    }
    write_files(tmp_path, files)
    (tmp_path / "weights.bin").write_bytes(bytes(frozen_code.MAX_SIZE + 1))
    return tmp_path


def new_run(directory: Path, name: str) -> Path:
    (directory / "outputs" / "run" / name).mkdir(parents=True)
    return directory / "outputs" / "run" / name


def extract(frozen: FrozenCode, directory: Path) -> Path:
    """Extract the archive as a job does."""
    directory.mkdir()
    subprocess.run(["tar", "--extract", f"--file={frozen.path}", f"--directory={directory}"], check=True, timeout=60)
    return directory


def test_the_archive_has_the_runner_and_custom_code(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    frozen = freeze(new_run(mine, "one"), [str(mine)])
    assert frozen.path.name == f"code-{frozen.sha256[:12]}.tar"
    assert frozen.sha256 == hashlib.sha256(frozen.path.read_bytes()).hexdigest()
    assert frozen.config_dirs == [f"own/0-{mine.name}"]
    code = extract(frozen, mine / "code")
    own = code / "own" / f"0-{mine.name}"
    names = {path.relative_to(own).as_posix() for path in own.rglob("*")}
    assert names == {"model", "model/own.yaml", "own.py", "words.txt", "weights.bin", "library", "library/layers.py"}
    assert (own / "weights.bin").readlink() == mine / "weights.bin"
    imported = {path.relative_to(code / "imported").as_posix() for path in (code / "imported").rglob("*.py")}
    assert {"models/custom.py", "single.py"} <= imported and "bought.py" not in imported
    for name in ("runner/cli.py", "conf/config.yaml", "models/mlp.py", "hydra_plugins/runner/sweeps.py"):
        assert (code / "installed" / name).read_bytes() == (ROOT / name).read_bytes()


def test_frozen_code_is_reused(mine: Path) -> None:
    directory = new_run(mine, "one")
    first = freeze(directory, [str(mine)])
    (mine / "own.py").write_text("SCALE = 2\n")
    again = freeze(directory, [str(mine)])
    assert first.is_new and not again.is_new
    assert (again.path, again.sha256, again.config_dirs) == (first.path, first.sha256, first.config_dirs)
    with pytest.raises(InputError, match=f"--config-dir=/other: {first.path} does not have this directory; remove"):
        freeze(directory, [str(mine), "/other"])


@pytest.mark.fault("the frozen code of a job changed", outcome="refused")
def test_a_damaged_archive_is_refused(mine: Path) -> None:
    directory = new_run(mine, "one")
    path = freeze(directory, [str(mine)]).path
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(InputError, match=f"{path} is damaged; restore it, or remove it"):
        freeze(directory, [str(mine)])


def test_a_large_directory_is_refused_before_it_is_archived(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = new_run(mine, "one")
    monkeypatch.setattr(frozen_code, "MAX_FILES", 2)
    for write in (True, False):
        with pytest.raises(InputError, match=r"has 3 small files of 0 MiB, more than 2 or 100 MiB; move the data out"):
            freeze(directory, [str(mine)], write)
    assert list(directory.iterdir()) == []


def test_a_job_records_the_origin_and_the_uncommitted_changes_of_its_frozen_code(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = {"commit": "abc", "dirty": True}
    with monkeypatch.context() as patched:
        patched.setattr(provenance, "git_state", lambda: git)
        patched.setattr(provenance, "git_diff", lambda: "a diff")
        frozen = freeze(new_run(mine, "one"), [str(mine)])
    assert submission_time() is None
    code = extract(frozen, mine / "code")
    monkeypatch.setattr(provenance, "ROOT", code / "installed")
    assert original_path(str(code / frozen.config_dirs[0])) == str(mine)
    assert original_path("/elsewhere") == "/elsewhere"
    assert (submission_time(), git_state()) == (frozen.since, git)
    assert git_diff() == "a diff"
