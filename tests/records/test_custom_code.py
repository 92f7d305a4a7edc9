"""The custom modules of a configuration, their copy, and the state of their repository."""

import importlib
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from custom_files import write_files

from runner.config.recorded_code import describe_code, importing_code_of
from runner.errors import InputError
from runner.records.custom_code import imported_code, read_code
from runner.records.provenance import custom_repositories, git_diff
from runner.records.run_record import RunRecord

NETS = """\
import shapes

try:
    from ... import far
except ImportError:
    pass

def build():
    from shapes import late
    return late
"""
FILES = {
    "shapes/__init__.py": "from shapes.sizes import WIDTH\n",
    "shapes/sizes.py": "WIDTH = 3\n",
    "shapes/unused.py": "",
    "shapes/late.py": "",
    "plain/nets.py": NETS,
    "watcher.py": "from plain import nets\n",
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Import custom modules, and remove them from sys.modules at the end."""
    write_files(tmp_path / "own", FILES)
    monkeypatch.syspath_prepend(tmp_path / "own")
    before = set(sys.modules)
    for name in ("plain.nets", "shapes.unused", "shapes.late", "watcher"):
        __import__(name)
    yield tmp_path / "own"
    for name in set(sys.modules) - before:
        del sys.modules[name]


CONFIG = {"model": {"_target_": "plain.nets.build"}, "callbacks": {"one": {"_target_": "watcher.Watcher"}}}


def test_the_modules_are_those_that_the_configuration_imports(own: Path) -> None:
    code = imported_code(CONFIG)
    decisive = {name: module.decisive for name, module in code.modules.items()}
    assert decisive == dict.fromkeys(("plain.nets", "shapes", "shapes.sizes", "shapes.late"), True) | {"watcher": False}
    assert code.modules["shapes"].copy == "shapes/__init__.py"
    assert imported_code({"model": {"_target_": "torch.nn.Linear"}}).hash is None


def test_a_copy_is_imported_and_compared(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = imported_code(CONFIG)
    run = tmp_path / "run"
    run.mkdir()
    code.write(run)
    code.write(run)  # it exists
    assert [path.name for path in (run / "code").iterdir()] == [code.hash]
    RunRecord(run, code=code.record).save()
    (own / "shapes" / "sizes.py").write_text("WIDTH = 4\n")
    (own / "shapes" / "late.py").unlink()
    recorded = read_code(run)
    assert recorded is not None and recorded.changed() == ["shapes.late", "shapes.sizes"]
    assert recorded.describe(["shapes.late"]) == f"{own}/shapes/late.py (missing)"
    current = sys.modules["shapes"]
    with importing_code_of(run):
        import shapes
        import watcher
        from plain import nets

        assert shapes.WIDTH == 3 and shapes is not current
        assert shapes.__file__ == f"{own}/shapes/__init__.py"  # data of a package is next to it
        assert watcher.nets is nets and nets.build().__name__ == "shapes.late"
        assert imported_code(CONFIG).hash == code.hash  # of a run that imports the copy
        # A command that imports the copy does not read it again.
        monkeypatch.setattr("runner.config.recorded_code.read_code", lambda *_: pytest.fail("read again"))
        with importing_code_of(run):
            assert "the current code differs" in str(describe_code(run, uses_copy=True))
        sys.modules.pop("shapes.unused")
        assert importlib.import_module("shapes.unused")  # a module that the run has not recorded
    assert sys.modules["shapes"] is current


def test_a_damaged_copy_is_refused(own: Path, tmp_path: Path) -> None:
    code = imported_code(CONFIG)
    code.write(tmp_path)
    modules = {name: asdict(module) for name, module in code.modules.items()}
    (tmp_path / "a.py").write_text("")
    outside = {"watcher": modules["watcher"] | {"copy": "../../a.py"}}
    for wrong in ([], {"watcher": {}}, outside, {"watcher": modules["watcher"] | {"copy": "missing.py"}}):
        RunRecord(tmp_path, code=code.record | {"modules": wrong}).save()
        with pytest.raises(InputError, match="the copy of the run's code is damaged"):
            read_code(tmp_path)
    RunRecord(tmp_path, code=code.record).save()
    (tmp_path / "code" / str(code.hash) / "watcher.py").write_text("changed = True\n")
    with pytest.raises(InputError, match=r"the copy of the run's code is damaged \(watcher.py has changed\)"):
        read_code(tmp_path)
    RunRecord(tmp_path, code=code.record | {"copy": "../own"}).save()
    with pytest.raises(InputError, match="missing"):
        read_code(tmp_path)


def test_the_repository_of_custom_code_is_recorded_with_its_diff(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    git("init", "--quiet")
    (tmp_path / "net.py").write_text("WIDTH = 3\n")
    git("add", ".")
    git("commit", "--quiet", "--message=one")
    (tmp_path / "sub").mkdir()
    state = {"commit": git("rev-parse", "HEAD"), "dirty": False}
    assert custom_repositories([tmp_path, tmp_path / "sub", Path("/")]) == {str(tmp_path): state}
    (tmp_path / "net.py").write_text("WIDTH = 4\n")
    assert custom_repositories([tmp_path]) == {str(tmp_path): state | {"dirty": True}}
    assert "+WIDTH = 4" in git_diff(str(tmp_path))
