"""The project installed as a package, not as the folder that it is developed in, in places that hold its names too."""

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


# A distribution of somebody else's, in the same site-packages: pip lets one overwrite the files of another.
OTHERS = ("models/__init__.py", "data/__init__.py", "data/digits.py", "conf/config.yaml")
OF_OTHERS = "raise ImportError('of another distribution')\n"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A wheel of the project, built from a copy of it, and one that is built from its sdist."""
    copy, unpacked, built = (tmp_path_factory.mktemp(name) for name in ("source", "unpacked", "built"))
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    sdist = build("sdist", copy, built)
    shutil.unpack_archive(sdist, unpacked, filter="data")
    return [build("wheel", copy, built / "1"), build("wheel", next(unpacked.iterdir()), built / "2")]


def build(kind: str, source: Path, target: Path) -> Path:
    """As pip has it built, except that nothing is fetched: what builds it is there already."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(target)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "deprecated" not in done.stderr.lower(), done.stderr
    return target / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def installed(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel is installed in, beside another distribution that has the project's names."""
    target = tmp_path_factory.mktemp("installed")
    for name in OTHERS:
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(OF_OTHERS)
    words = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target, wheels[0])
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return target


@pytest.mark.parametrize(("folder", "form"), [("packages", "module"), ("modules", "script"), ("bare", "module")])
def test_it_runs_in_a_folder_that_holds_its_names(
    folder: str, form: str, commands: Commands, tmp_path: Path, installed: Path
) -> None:
    for name in FOLDERS[folder]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("raise ImportError('not of the runner')\n")
    words = ["-m", "runner"] if form == "module" else [str(installed / "bin" / "runner")]
    done = commands.finish(commands.start(*words, *TINY, env={"PYTHONPATH": str(installed)}))
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = (tmp_path / "outputs" / "run").iterdir()
    result = Run(path).result
    assert result["state"] == "finished" and result["command"][1 : len(words) + 1] == words


def test_it_is_the_installed_one_that_runs(commands: Commands, installed: Path) -> None:
    """Without this, the folder under development could pass the tests above in its place."""
    names = "runner.__file__, models.__file__, data.__file__, hydra_plugins.runner.__file__"
    code = f"import runner, models, data, hydra_plugins.runner; print({names})"
    done = commands.finish(commands.start("-c", code, env={"PYTHONPATH": str(installed)}))
    assert [Path(word).is_relative_to(installed) for word in done.stdout.split()] == [True] * 4


def test_every_file_is_installed_and_none_over_anothers(installed: Path, wheels: list[Path]) -> None:
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


def test_a_users_own_code_is_checked_against_the_types(wheels: list[Path], tmp_path: Path) -> None:
    """By mypy, which reads the annotations of what is installed only where a py.typed says that they are meant."""
    environment = tmp_path / "environment"
    venv.create(environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    shutil.unpack_archive(wheels[0], packages, format="zip")
    (tmp_path / "mine.py").write_text(
        "from runner.training.callback import Callback, RunInfo\n\n"
        "class Mine(Callback):\n    def on_start(self, run: RunInfo) -> None:\n        run.world_size.upper()\n\n"
        "import runner\n\ndone: list[runner.Run] = runner.sweep(['seed=0,1'])\n"
        "try:\n    runner.train('seed=0').metrics.keys(), runner.runs()[-1].state.real\n"
        "except runner.JobFailed as error:\n    runner.open_run(error.directory)\n"
    )
    # What stands in for the libraries, which are not in that environment, and would take mypy half a minute.
    (tmp_path / "mypy.ini").write_text("[mypy]\nignore_missing_imports = true\n")
    words = ("-m", "mypy", "--python-executable", environment / "bin" / "python", "--cache-dir", os.devnull, "mine.py")
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[:-1] == [
        'mine.py:5: error: "int" has no attribute "upper"  [attr-defined]',
        'mine.py:11: error: "str" has no attribute "real"  [attr-defined]',
    ]
