"""Tests of runner/errors.py."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import runner
from runner.errors import calling_line, user_line


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_a_line_of_a_library_in_another_environment_is_not_user_code(folder: str, tmp_path: Path) -> None:
    """Packages of the system are imported from there in an environment created with --system-site-packages."""
    library = compile("1 / 0", str(tmp_path / "lib" / folder / "torch" / "ops.py"), "exec")
    model = compile("exec(library)", str(tmp_path / "model.py"), "exec")
    with pytest.raises(ZeroDivisionError) as caught:
        exec(model, {"library": library})
    assert user_line(caught.value) == f"{tmp_path}/model.py:1"


def test_a_call_within_an_installed_model_is_named_by_its_line(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "site-packages"
    scope = {"calling_line": calling_line}
    exec(compile("def draw():\n    return calling_line()", str(packages / "torch" / "ops.py"), "exec"), scope)
    exec(compile("def forward():\n    return draw()", str(packages / "zoo" / "model.py"), "exec"), scope)
    hydra = Path(runner.__file__).parents[1] / "hydra_plugins" / "runner" / "sweeps.py"
    code = compile("line = forward()", str(hydra), "exec")
    with ThreadPoolExecutor(1) as pool:  # its stack has no line of this file
        pool.submit(exec, code, scope).result()
    assert scope["line"] == f"{packages}/zoo/model.py:2"
