"""Tests of runner/errors.py."""

from pathlib import Path

import pytest

from runner.errors import user_line


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_a_line_of_a_library_in_another_environment_is_not_user_code(folder: str, tmp_path: Path) -> None:
    """Packages of the system are imported from there in an environment created with --system-site-packages."""
    library = compile("1 / 0", str(tmp_path / "lib" / folder / "torch" / "ops.py"), "exec")
    model = compile("exec(library)", str(tmp_path / "model.py"), "exec")
    with pytest.raises(ZeroDivisionError) as caught:
        exec(model, {"library": library})
    assert user_line(caught.value) == f"{tmp_path}/model.py:1"
