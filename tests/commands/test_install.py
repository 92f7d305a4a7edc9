"""The project installed as a package, not as the folder that it is developed in, in places that hold its names too."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Commands
from worlds import Run

from runner import ROOT

pytestmark = pytest.mark.thorough

SOURCES = ("runner", "models", "data", "conf", "hydra_plugins")
TINY = ("model=mlp", "model.hidden=[4]", "data=toy", "data.num_train=8", "batch_size=4", "epochs=1", "logger=none")
# What people keep in the folder in which they type the command. Python takes a package before a module, and a module
# before a folder without __init__.py.
FOLDERS = {
    "packages": ("models/__init__.py", "data/__init__.py", "conf/model/mlp.yaml"),
    "modules": ("models.py", "data.py", "conf.py"),
    "bare": ("models/weights.pt", "data/digits.csv", "conf/config.yaml"),
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a wheel of the project, built from a copy of it, is unpacked in."""
    copy, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    # Nothing is fetched: what builds and what runs it are there already.
    words = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", target)
    done = subprocess.run([sys.executable, *words, copy], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.parametrize("folder", FOLDERS)
def test_it_runs_in_a_folder_that_holds_its_names(
    folder: str, commands: Commands, tmp_path: Path, installed: Path
) -> None:
    for name in FOLDERS[folder]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("raise ImportError('not of the runner')\n")
    forms = {"module": ["-m", "runner"], "script": [str(installed / "bin" / "runner")]}
    env = {"PYTHONPATH": str(installed)}
    processes = [commands.start(*words, *TINY, f"name={name}", env=env) for name, words in forms.items()]
    for process in processes:
        done = commands.finish(process)
        assert (done.returncode, done.stderr) == (0, ""), done.args
    for name, words in forms.items():
        (path,) = (tmp_path / "outputs" / name).iterdir()
        result = Run(path).result
        assert result["state"] == "finished" and result["command"][1 : len(words) + 1] == words


def test_it_is_the_installed_one_that_runs(commands: Commands, installed: Path) -> None:
    """Without this, the folder under development could pass the tests above in its place."""
    names = "runner.__file__, models.__file__, data.__file__, hydra_plugins.runner.__file__"
    code = f"import runner, models, data, hydra_plugins.runner; print({names})"
    done = commands.finish(commands.start("-c", code, env={"PYTHONPATH": str(installed)}))
    assert [Path(word).is_relative_to(installed) for word in done.stdout.split()] == [True] * 4


def test_every_file_is_installed(installed: Path) -> None:
    def under(folder: Path) -> set[str]:
        paths = [path for name in SOURCES for path in (folder / name).rglob("*") if path.suffix in (".py", ".yaml")]
        return {str(path.relative_to(folder)) for path in paths}

    assert under(installed) == under(ROOT)
    assert os.access(installed / "bin" / "runner", os.X_OK)
