"""Reports that each rank of a command writes about its process before its first step."""

import os
import subprocess
import sys
from pathlib import Path

CALLBACK = """

from pathlib import Path

from runner import Callback


class Report(Callback):
    def on_start(self, run):
        Path(f"report_{run.rank}").write_text(report())  # lines of several ranks may mix on the terminal
"""


def run_python(folder: Path, *args: str) -> str:
    """Run Python and return its output. Fail the test if its status is not 0 or it writes to stderr."""
    # Without the settings of glibc's allocator that the user who runs the tests may have made.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, *args],
        cwd=folder,
        env=environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def reports_of_ranks(folder: Path, report: str, *launcher: str) -> list[str]:
    """Return the text of `report()` from each rank. `report` is code that defines this function."""
    (folder / "callbacks").mkdir()
    (folder / "callbacks" / "report.yaml").write_text("# reports\nreport:\n  _target_: reports.Report\n")
    (folder / "reports.py").write_text(report + CALLBACK)
    args = ("--config-dir=.", "callbacks=report", "model=mlp", "max_steps=1", "eval_batches=1", "logger=none")
    run_python(folder, "-m", "runner", *args, *launcher)
    return [path.read_text() for path in sorted(folder.glob("report_*"))]
