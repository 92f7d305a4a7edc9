"""The peak memory of torch's CPU allocator on each rank, counted by cpu_allocator.c.

usage: LD_PRELOAD=cpu_allocator.so torchrun --nproc-per-node N benchmarks/allocated_memory.py FILE OVERRIDES...
Each rank runs five steps of `runner OVERRIDES`, and writes the peak of steps 2 to 5 to FILE.RANK: the bytes without
those that exist when the datasets are loaded.
"""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from runner.cli import main as run
from runner.training import build
from runner.training.callbacks.contract import Callback, Progress

OPTIONS = ["max_steps=5", "logger=none", "callbacks=allocated_memory"]


class Peak(Callback):
    """Writes the peak of the steps after the first one to the file of the variable PEAK_FILE, in bytes."""

    def after_step(self, now: Progress) -> None:
        Path(os.environ["PEAK_FILE"]).write_text(str(_counter("most_allocated")()))
        if now.step == 1:
            _counter("forget_peak")()


def _counter(name: str) -> Any:
    """Return a function of cpu_allocator.c."""
    function = getattr(ctypes.CDLL(None), name)
    function.restype = ctypes.c_int64
    return function


def main() -> None:
    load_data, loaded = build.load_data, list[int]()

    def load(*args: Any) -> Any:
        data = load_data(*args)
        loaded.append(_counter("allocated")())
        return data

    build.load_data = load
    file = Path(f"{sys.argv[1]}.{os.environ['RANK']}")
    os.environ["PEAK_FILE"] = str(file)
    sys.argv[1:] = [*sys.argv[2:], *OPTIONS, f"--config-dir={Path(__file__).parent}"]
    if status := run():
        sys.exit(status)
    file.write_text(str(int(file.read_text()) - loaded[0]))


if __name__ == "__main__":
    main()
