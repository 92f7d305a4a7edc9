"""What is freed is had again at once in a process of the runner's own, and given back in between its jobs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.launchers.freed_memory import keep_freed_memory

TELLS = """\
from pathlib import Path

import torch

from runner.training.callback import Callback


class Tell(Callback):
    def on_start(self, run):
        block = torch.empty(20, 2**20, dtype=torch.uint8)  # which glibc would have from the system, and give back
        maps = Path("/proc/self/maps").read_text().splitlines()
        heap = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps if line.endswith("[heap]")]
        told = "heap" if any(first <= block.data_ptr() < last for first, last in heap) else "system"
        Path(f"told_{run.rank}").write_text(told)
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


def ran(folder: Path, *words: str) -> str:
    # As it is without a choice of the user's, whoever runs the tests.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("launcher", "num_ranks"),
    [(("launcher=env",), 1), pytest.param(("launcher=spawn", "parallel=ddp"), 2, marks=pytest.mark.thorough)],
)
def test_a_rank_keeps_large_blocks(launcher: tuple[str, ...], num_ranks: int, tmp_path: Path) -> None:
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks" / "tell.yaml").write_text("# tells\ntell:\n  _target_: told.Tell\n")
    (tmp_path / "told.py").write_text(TELLS)
    words = ("--config-dir=.", "callbacks=tell", "model=mlp", "max_steps=1", "eval_batches=1", "logger=none", *launcher)
    ran(tmp_path, "-m", "runner", *words)
    assert [path.read_text() for path in tmp_path.glob("told_*")] == ["heap"] * num_ranks


def test_a_job_has_none_of_the_one_before(tmp_path: Path) -> None:
    freed_mib, given_back_mib = map(float, ran(tmp_path, "-c", GIVES_BACK).split())
    assert freed_mib < 1 and given_back_mib > 50, "of 64"


@pytest.mark.parametrize("chosen", [{"MALLOC_TRIM_THRESHOLD_": "1"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}])
def test_what_the_environment_has_chosen_stays(chosen: dict[str, str]) -> None:
    assert not keep_freed_memory(chosen)
