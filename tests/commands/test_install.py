"""The installed package, in directories that contain other files of the same names."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest
from commands import Commands
from worlds import Run

from runner.paths import ROOT

pytestmark = pytest.mark.thorough

SOURCES = ("runner", "models", "data", "conf", "hydra_plugins")
TINY = ("model=mlp", "model.hidden=[4]", "data=toy", "data.num_train=8", "batch_size=4", "epochs=1", "logger=none")
# Files that users have in their working directory. Python prefers a package to a module, and a module to a directory
# without __init__.py.
FOLDERS = {
    "packages": ("models/__init__.py", "data/__init__.py", "conf/model/mlp.yaml"),
    "modules": ("models.py", "data.py", "conf.py"),
    "bare": ("models/weights.pt", "data/digits.csv", "conf/config.yaml"),
}


# Another distribution in the same site-packages. pip lets one distribution overwrite the files of another.
OTHERS = ("models/__init__.py", "data/__init__.py", "data/digits.py", "conf/config.yaml")
OF_OTHERS = "raise ImportError('of another distribution')\n"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Build a wheel from a copy of the repository, and one from its sdist."""
    copy, unpacked, built = (tmp_path_factory.mktemp(name) for name in ("source", "unpacked", "built"))
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    sdist = build("sdist", copy, built)
    shutil.unpack_archive(sdist, unpacked, filter="data")
    return [build("wheel", copy, built / "1"), build("wheel", next(unpacked.iterdir()), built / "2")]


def build(kind: str, source: Path, target: Path) -> Path:
    """Build as pip does, but without build isolation, so that nothing is downloaded."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(target)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "deprecated" not in done.stderr.lower(), done.stderr
    return target / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def installed(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel next to another distribution with the same package names. Return the directory."""
    target = tmp_path_factory.mktemp("installed")
    for name in OTHERS:
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(OF_OTHERS)
    args = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target, wheels[0])
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return target


@pytest.mark.parametrize(("folder", "form"), [("packages", "module"), ("modules", "script"), ("bare", "module")])
def test_it_runs_in_a_directory_with_modules_of_the_same_names(
    folder: str, form: str, commands: Commands, tmp_path: Path, installed: Path
) -> None:
    for name in FOLDERS[folder]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("raise ImportError('not of the runner')\n")
    args = ["-m", "runner"] if form == "module" else [str(installed / "bin" / "runner")]
    done = commands.finish(commands.start(*args, *TINY, env={"PYTHONPATH": str(installed)}))
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = (tmp_path / "outputs" / "run").iterdir()
    result = Run(path).result
    assert result["state"] == "finished" and result["command"][1 : len(args) + 1] == args


def test_the_installed_package_is_used(commands: Commands, installed: Path) -> None:
    """Otherwise the tests above could pass with the checkout instead of the installed package."""
    names = "runner.__file__, models.__path__[0], data.__path__[0], hydra_plugins.runner.__file__"
    code = f"import runner, hydra_plugins.runner; from runner.shipped import models, data; print({names})"
    done = commands.finish(commands.start("-c", code, env={"PYTHONPATH": str(installed)}))
    assert [Path(word).is_relative_to(installed) for word in done.stdout.split()] == [True] * 4


def test_every_file_is_installed_and_none_is_overwritten(installed: Path, wheels: list[Path]) -> None:
    ours = {path for name in SOURCES for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".yaml", ".typed")}
    inside = {str(path.relative_to(ROOT)) for path in ours}
    inside = {f"runner/_shipped/{name}" if name.startswith(("conf", "data", "models")) else name for name in inside}
    direct, of_sdist = (
        {entry.filename: entry.CRC for entry in ZipFile(wheel).infolist() if not entry.is_dir()} for wheel in wheels
    )
    assert direct == of_sdist
    assert {name for name in direct if ".dist-info/" not in name} == inside
    assert [(installed / name).read_text() for name in OTHERS] == [OF_OTHERS] * len(OTHERS)
    assert os.access(installed / "bin" / "runner", os.X_OK)


def test_custom_code_is_checked_against_the_types(wheels: list[Path], tmp_path: Path) -> None:
    """mypy reads the annotations of an installed package only if it contains py.typed."""
    environment = tmp_path / "environment"
    venv.create(environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    shutil.unpack_archive(wheels[0], packages, format="zip")
    (tmp_path / "mine.py").write_text(
        "from runner import Callback, RunInfo\n\n"
        "class Mine(Callback):\n    def on_start(self, run: RunInfo) -> None:\n        run.world_size.upper()\n\n"
        "import runner\n\ndone: list[runner.Run] = runner.sweep(['seed=0,1'])\n"
        "try:\n    runner.train('seed=0').metrics.keys(), runner.runs()[-1].state.real\n"
        "except runner.JobFailed as error:\n    runner.open_run(error.directory)\n"
    )
    # Stubs for the libraries, which are not installed there and which mypy would read for half a minute.
    (tmp_path / "mypy.ini").write_text("[mypy]\nignore_missing_imports = true\n")
    args = ("-m", "mypy", "--python-executable", environment / "bin" / "python", "--cache-dir", os.devnull, "mine.py")
    done = subprocess.run([sys.executable, *args], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[:-1] == [
        'mine.py:5: error: "int" has no attribute "upper"  [attr-defined]',
        'mine.py:11: error: "str" has no attribute "real"  [attr-defined]',
    ]
