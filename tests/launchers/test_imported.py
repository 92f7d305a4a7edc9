"""What is imported is not gone through by the garbage collector, which works in training; a caller's is left alone."""

from pathlib import Path

import pytest
from told_by_ranks import ran, told_by_ranks

TELL = """\
import gc


def tell():
    return f"{gc.isenabled()} {gc.get_freeze_count() > 100_000}"
"""


@pytest.mark.parametrize(
    ("launcher", "num_ranks"),
    [(("launcher=env",), 1), pytest.param(("launcher=spawn", "parallel=ddp"), 2, marks=pytest.mark.thorough)],
)
def test_a_rank_collects_its_own_garbage_alone(launcher: tuple[str, ...], num_ranks: int, tmp_path: Path) -> None:
    # Nor does anything complain at the exit that it has not been cleared away.
    assert told_by_ranks(tmp_path, TELL, *launcher) == ["True True"] * num_ranks


def test_a_callers_collector_is_left_alone(tmp_path: Path) -> None:
    code = """\
import gc
from runner.launchers.imported import begin_imports, end_imports
end_imports()
assert gc.isenabled() and not gc.get_freeze_count()
begin_imports()
assert not gc.isenabled()
end_imports()
assert gc.isenabled() and gc.get_freeze_count()
"""
    ran(tmp_path, "-c", code)
