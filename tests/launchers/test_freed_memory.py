"""What is freed is had again at once in a process of the runner's own, and given back in between its jobs."""

import os
from pathlib import Path

import pytest
from told_by_ranks import ran, told_by_ranks

from runner.launchers.freed_memory import keep_freed_memory

TELL = """\
from pathlib import Path

import torch


def tell():
    block = torch.empty(20, 2**20, dtype=torch.uint8)  # which glibc would have from the system, and give back
    maps = Path("/proc/self/maps").read_text().splitlines()
    heap = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps if line.endswith("[heap]")]
    return "heap" if any(first <= block.data_ptr() < last for first, last in heap) else "system"
"""
GIVES_BACK = """\
import torch

from runner.launchers.freed_memory import give_back_freed_memory, keep_freed_memory


def resident_mib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


assert keep_freed_memory()
blocks = [torch.ones(2**20) for _ in range(16)]
whole = resident_mib()
del blocks
kept = resident_mib()
give_back_freed_memory()
print(whole - kept, kept - resident_mib())
"""

pytestmark = pytest.mark.skipif(
    not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""),
    reason="another C library than glibc",
)


@pytest.mark.parametrize(
    ("launcher", "num_ranks"),
    [(("launcher=env",), 1), pytest.param(("launcher=spawn", "parallel=ddp"), 2, marks=pytest.mark.thorough)],
)
def test_a_rank_keeps_large_blocks(launcher: tuple[str, ...], num_ranks: int, tmp_path: Path) -> None:
    assert told_by_ranks(tmp_path, TELL, *launcher) == ["heap"] * num_ranks


def test_a_job_has_none_of_the_one_before(tmp_path: Path) -> None:
    freed_mib, given_back_mib = map(float, ran(tmp_path, "-c", GIVES_BACK).split())
    assert freed_mib < 1 and given_back_mib > 50, "of 64"


@pytest.mark.parametrize("chosen", [{"MALLOC_TRIM_THRESHOLD_": "1"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}])
def test_what_the_environment_has_chosen_stays(chosen: dict[str, str]) -> None:
    assert not keep_freed_memory(chosen)
