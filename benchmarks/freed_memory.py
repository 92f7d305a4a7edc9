"""The gain from keeping the memory that a step frees for the next step: the runner with and without it.

usage: python benchmarks/freed_memory.py [--work convnet,resnet18] [--rounds 3]
One process, one thread; the two are interleaved. Without it, glibc decides whether memory is returned to the system,
which depends on the layout of the heap, so that rounds differ. Pages are the page faults of the whole command, in
thousands.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from peers.commands import ROOT, RUNNER, Place, command, measure
from peers.works import WORKS, named

LEFT = {"MALLOC_ARENA_TEST": "8"}  # glibc's default; the runner does not override a setting of the user


def pages() -> int:
    """Return the page faults of all commands that have exited so far."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=named, default="convnet,resnet18", help=", ".join(WORKS))
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error(f"--rounds={given.rounds} must be at least 1; 3 show how much it varies")
    with tempfile.TemporaryDirectory() as scratch:
        place = Place(Path(scratch, "data"), Path(scratch))
        subprocess.run([sys.executable, ROOT / "benchmarks" / "mnist_files.py", place.data], check=True)
        for work in given.work:
            found: dict[str, list[tuple[float, float]]] = {"kept": [], "left to glibc": []}
            for _ in range(given.rounds):
                for way, measured in found.items():
                    os.environ.pop(*LEFT, None)
                    if way != "kept":
                        os.environ.update(LEFT)
                    before = pages()
                    figures = measure(command(RUNNER, work, 1, WORKS[work].steps, place), place)
                    measured.append((figures["samples_per_second"], (pages() - before) / 1000))
            for way, measured in found.items():
                rates, thousands = zip(*measured, strict=True)
                print(
                    f"{work}, {way:13s}  {max(rates):8,.0f} samples/s at best, {statistics.median(rates):8,.0f} in the "
                    f"median, {min(rates):,.0f} at worst; {min(thousands):,.0f} to {max(thousands):,.0f} thousand pages"
                )
            best, median = (
                what([rate for rate, _ in found["kept"]]) / what([rate for rate, _ in found["left to glibc"]])
                for what in (max, statistics.median)
            )
            print(f"{work}: {best:.2f} of the rate at best, {median:.2f} in the median of {given.rounds}")


if __name__ == "__main__":
    main()
