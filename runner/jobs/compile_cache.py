"""The caches of torch.compile: it executes their content, which must belong to this user and be for this CPU."""

import os
import stat
from pathlib import Path

import torch

from runner.config.diagnostics.type_hints import show

TRUSTED = (0, os.geteuid())  # root can replace any file


def separate_by_cpu() -> None:
    """Let this process find only code that was generated for the vector instructions of its CPU.

    torch's keys do not contain them, but generated loops have steps of a vector's size: compiled for vectors of another
    size, they skip values or use them twice. The CPUs of machines that share a directory may differ, and
    ATEN_CPU_CAPABILITY selects other instructions. Restore the setting before a second call, as `reset_process` does.
    """
    torch.compiler.config.cache_key_tag += f" {torch.backends.cpu.get_cpu_capability()}"


def check_compile_caches(compiles: bool | str) -> list[str]:
    """Return a message for each cache directory that another user can change. Create the missing directories.

    torch's default is a predictable directory in TMPDIR, which any user of the machine may create first. It also keeps
    precompiled headers there if TORCHINDUCTOR_CACHE_DIR names another directory. compiles: the key `compile`.
    """
    from torch._inductor.runtime.runtime_utils import default_cache_dir  # imports the compiler

    directories = {"TMPDIR": default_cache_dir()}
    variables = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    directories |= {name: value for name in variables if (value := os.environ.get(name))}
    problems = {name: _problem_of(Path(path)) for name, path in directories.items()}
    return [
        f"compile={show(compiles)}: {directories[name]} {problem}; set {name} to a directory of yours"
        for name, problem in problems.items()
        if problem
    ]


def _problem_of(path: Path) -> str | None:
    """Return why another user could make torch execute code from the directory; None if no user can."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found, parent = os.lstat(path), os.stat(path.parent)
    except OSError as error:
        return f"cannot be created ({error.strerror})"
    if found.st_uid not in TRUSTED:
        return f"belongs to another user (uid {found.st_uid}), whose code torch.compile would execute"
    if path.is_symlink() and os.stat(path).st_uid not in TRUSTED:
        return "is a link to a directory of another user, whose code torch.compile would execute"
    is_replaceable = parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX
    if os.stat(path).st_mode & stat.S_IWOTH or is_replaceable or parent.st_uid not in TRUSTED:
        return "can be changed by other users, whose code torch.compile would execute"
    return None
