"""Tests of runner/errors.py."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import runner
from runner.errors import calling_line, describe_system_error, user_line


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


@pytest.mark.parametrize(
    ("code", "problem", "fix"),
    [
        ("ENOSPC", "/f could not be written: No space left on device", "free disk space"),
        ("EDQUOT", "/f could not be written: Disk quota exceeded", "free disk space"),
        ("EFBIG", "/f could not be written: File too large", "raise the limit of file sizes (ulimit -f)"),
        ("EROFS", "/f could not be written: Read-only file system", "make the file system writable"),
        ("EIO", "/f could not be used: Input/output error", "check the disk or its server (dmesg)"),
        ("ESTALE", "/f could not be used: Stale file handle", "check the file server"),
        ("EACCES", "/f could not be used: Permission denied", "correct the permissions"),
        ("EMFILE", "/f could not be used: Too many open files", "raise the limit of open files (ulimit -n)"),
        ("ENFILE", "/f could not be used: Too many open files in system", "close files of other processes"),
        ("EAGAIN", "a process or thread could not be started: Resource temporarily unavailable", "raise the limit of"),
        ("ENOMEM", "/f could not be used: Cannot allocate memory", "free memory"),
    ],
)
def test_errors_of_the_system_are_described_in_one_line(code: str, problem: str, fix: str) -> None:
    number = getattr(errno, code)
    line = describe_system_error(OSError(number, os.strerror(number), "/f"))
    assert line is not None and line.startswith(f"{problem}; {fix}") and line.endswith(" and repeat the command")


def test_limits_of_threads_are_described_and_other_errors_are_not() -> None:
    for text in ("can't start new thread", "Resource temporarily unavailable"):
        assert "thread could not be started: " in str(describe_system_error(RuntimeError(text)))
    for error in (ValueError("x"), RuntimeError("x"), OSError("x"), FileNotFoundError(errno.ENOENT, "x", "/f")):
        assert describe_system_error(error) is None
