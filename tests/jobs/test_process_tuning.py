"""Garbage collection and memory allocation in the runner's own processes, and in a caller's."""

import os
import resource
import sys
from pathlib import Path

import pytest
from commands import Commands
from rank_reports import reports_of_ranks, run_python

from runner.jobs.process_tuning import keep_freed_memory

REPORT = """\
import gc
import sys
from pathlib import Path

import torch


def report():
    block = torch.empty(20, 2**20, dtype=torch.uint8)  # by default glibc requests such a block from the system
    maps = Path("/proc/self/maps").read_text().splitlines()
    heap = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps if line.endswith("[heap]")]
    place = "heap" if any(first <= block.data_ptr() < last for first, last in heap) else "system"
    origin = "forked" if "runner.launchers.preload" in sys.modules else "started"
    return f"{origin} {gc.isenabled()} {gc.get_freeze_count() > 100_000} {place}"
"""
RETURNS = """\
from runner.jobs.process_tuning import keep_freed_memory, returning_large_blocks
from runner.process.freed_memory import return_freed_memory


def resident_mib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


assert keep_freed_memory()
blocks = [b"x" * 2**22 for _ in range(16)]
whole = resident_mib()
del blocks
kept = resident_mib()
return_freed_memory()
print(whole - kept, kept - resident_mib())
with returning_large_blocks():
    blocks = [b"x" * 2**22 for _ in range(16)]
    whole = resident_mib()
    del blocks
print(whole - resident_mib())
"""

needs_glibc = pytest.mark.skipif(
    not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""),
    reason="another C library than glibc",
)


@needs_glibc
@pytest.mark.parametrize(
    ("launcher", "num_ranks", "origin"),
    [
        pytest.param(("launcher=env",), 1, "started", marks=pytest.mark.thorough),
        pytest.param(("launcher=spawn", "parallel=ddp"), 2, "forked", marks=pytest.mark.thorough),
    ],
)
def test_a_rank_freezes_its_imports_and_keeps_large_blocks(
    launcher: tuple[str, ...], num_ranks: int, origin: str, tmp_path: Path
) -> None:
    """The ranks of a launcher are forked after the imports.

    The command also writes no warning at its exit about objects that were never collected.
    """
    assert reports_of_ranks(tmp_path, REPORT, *launcher) == [f"{origin} True True heap"] * num_ranks


@needs_glibc
def test_the_memory_of_a_finished_job_is_returned(tmp_path: Path) -> None:
    freed_mib, returned_mib, while_built_mib = map(float, run_python(tmp_path, "-c", RETURNS).split())
    assert freed_mib < 1 and returned_mib > 50 and while_built_mib > 50, "of 64"


@needs_glibc
def test_settings_of_the_environment_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert not keep_freed_memory()


@pytest.mark.fault("too little memory to load torch (ulimit -v)", outcome="refused")
def test_a_limit_that_prevents_the_import_of_torch_is_named(commands: Commands) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (2**42, 2**42))
        sys.modules["torch"] = None  # type: ignore[assignment]  # its import fails

    done = commands.forked("model=toy", prepare=limit)
    assert done.returncode == 2
    assert done.stderr.startswith("torch cannot be imported (ModuleNotFoundError: import of torch halted")
    assert done.stderr.endswith("; `ulimit -v` limits this process to 4,294,967,296 KiB, raise it\n")
