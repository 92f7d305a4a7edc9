"""The package `runner`: its public names, and what importing it leaves alone."""

import subprocess
import sys
from pathlib import Path

import pytest

import runner

SCRIPT = """\
import sys

import data
import runner

assert not {"models", "torch", "hydra", "numpy"} & set(sys.modules), "importing runner imports more than itself"
config = runner.compose(["model=mlp", "data=digits"])
assert (config.model["_target_"], config.data["_target_"]) == ("models.mlp.MLP", "data.digits.Digits")
assert data.__file__ == sys.argv[1] and sys.modules["data"] is data and "models" not in sys.modules
assert "runner.shipped.models.mlp" in sys.modules
"""


def test_every_public_name_can_be_imported() -> None:
    assert set(runner.__all__) <= set(dir(runner))
    assert all(callable(getattr(runner, name)) for name in runner.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        runner.trian  # type: ignore[attr-defined]  # noqa: B018


def test_importing_runner_binds_no_module_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text("")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "error", "script.py", str(tmp_path / "data.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
