"""The time of a step, logging, the start, an evaluation and a checkpoint, by number of ranks, samples and parameters.

usage: python benchmarks/growth.py [--axis ranks,samples] [--most 8] [--rounds 6] [--minutes 18] [--cores N]
           [--write benchmarks/scaling.md]

Ranks: 1 to 32 in one world on this machine (launcher=spawn, ddp over gloo), 32 samples per step and rank. Samples: 10^3
to 10^10 of data=counting, which computes them from their indices. Parameters: an mlp of 10^4 to 10^8, plain SGD. All on
the CPU with one thread per rank. A round runs two commands per size: one logs every step, the other logs no step.
Without --axis and --most the benchmark takes under 20 minutes on 2 cores; a slower machine runs fewer rounds.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from growth_table import AXES, MEASURED, Cell, render
from page import facts
from peers.commands import CommandFailed, Place, measure

from runner.distributed.machine import available_memory

HERE = Path(__file__).resolve().parent
RANK_MIB = 300  # memory of a rank, without the memory that ranks share
MIB_PER_PARAMETER = 20 / 2**20  # weights, gradients, the copy for a checkpoint, and temporary memory
SAMPLE_SIZE, CLASSES = 32, 10
NEVER = 1_000_000


def command_of(axis: str, size: int, logs: bool, scratch: Path) -> list[str]:
    """Return the command of one size."""
    ranks, samples = (size if axis == "ranks" else 1), (size if axis == "samples" else 10**6)
    hidden = width_of(size) if axis == "parameters" else 256
    steps = steps_of(axis, size)
    command = [sys.executable, "-m", "runner", f"--config-dir={HERE}", "callbacks=growth_meter"]
    command += [f"callbacks.growth_meter.warmup_steps={min(5, steps // 3)}", "model=mlp"]
    command += [f"model.hidden=[{hidden},{hidden}]", "data=counting", f"data.num_train={samples}", "threads=1"]
    command += [
        f"batch_size={32 * ranks}",
        f"max_steps={steps}",
        "epochs=1000",
        f"eval_every={NEVER}",
        "eval_batches=16",
    ]
    command += ["optimizer=sgd", "optimizer.momentum=0.0", f"log_every={1 if logs else NEVER}"]
    # The last checkpoint is saved before the last step, so that none is between that step and the evaluation.
    command += [f"checkpoint.every_steps={(steps - 1) // (5 if steps > 9 else 2)}", f"checkpoint.every_epochs={NEVER}"]
    command += ["checkpoint.keep=1", "checkpoint.keep_best=0", f"outputs={scratch}/outputs"]
    if ranks > 1:
        command += ["launcher=spawn", f"launcher.nproc_per_node={ranks}", "parallel=ddp"]
    return command


def width_of(parameters: int) -> int:
    """Return the width h of both hidden layers, for about h (32 + 1) + h (h + 1) + 10 (h + 1) parameters."""
    linear = SAMPLE_SIZE + CLASSES + 2
    return round((-linear + math.sqrt(linear**2 + 4 * (parameters - CLASSES))) / 2)


def steps_of(axis: str, size: int) -> int:
    """Return a number of steps that takes a few seconds: one more than a multiple of the checkpoint interval."""
    if axis == "parameters" and size > 10**6:
        return 21 if size <= 10**7 else 9
    return 101 if axis != "ranks" or size <= 4 else 41 if size <= 8 else 21


def needed_mib(axis: str, size: int) -> float:
    """Return an estimate of the memory that a size needs."""
    return RANK_MIB * (size if axis == "ranks" else 2) + (MIB_PER_PARAMETER * size if axis == "parameters" else 0)


def left_out(sizes: Sequence[tuple[str, int]], free: float) -> dict[tuple[str, int], str]:
    """Return a message for each size for which this machine has too little memory."""
    return {
        (axis, size): f"{size:,} {axis} are skipped: they need about {need:,.0f} MiB, and {free:,.0f} are free"
        for axis, size in sizes
        if (need := needed_mib(axis, size)) > free
    }


def run(sizes: Sequence[tuple[str, int]], rounds: int, place: Place, end: float) -> list[Cell]:
    """Measure all sizes in each round. Skip a size if its previous measurement took longer than the time left."""
    cells = {(axis, size): Cell(axis, size) for axis, size in sizes}
    previous_s = dict.fromkeys(cells, 0.0)
    for number in range(1, rounds + 1):
        for axis, size in sorted(cells, key=lambda each: previous_s[each]):  # the slowest size may get fewer rounds
            cell, start = cells[axis, size], time.monotonic()
            if start + previous_s[axis, size] > end:
                continue
            for logs, found in ((True, cell.logged), (False, cell.silent)):
                print(f"round {number}: {size:,} {axis}, {'logged' if logs else 'silent'}: ", end="", file=sys.stderr)
                try:
                    figures = measure(command_of(axis, size, logs, place.scratch), place)
                except CommandFailed as error:
                    cell.failures.append(str(error))
                    print(error, file=sys.stderr)
                    continue
                found.append(figures)
                print(f"{1e3 * figures['step_s']:.2f} ms, {figures['command_s']:.1f} s in all", file=sys.stderr)
            previous_s[axis, size] = time.monotonic() - start
    return list(cells.values())


def arguments() -> argparse.Namespace:
    """Parse the command line. Exit with status 2 if a value is invalid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axis", type=lambda text: text.split(","), default=list(AXES), help=", ".join(AXES))
    parser.add_argument("--most", type=float, default=math.inf, help="the largest size")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=18, help="time limit; no size starts that would exceed it")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="number of cores for all ranks")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the tables and the plot into this page")
    given = parser.parse_args()
    for axis in given.axis:
        if axis not in AXES:
            parser.error(f"--axis={axis} must be one of {', '.join(AXES)}")
    if given.rounds < 1:
        parser.error(f"--rounds={given.rounds} must be at least 1; try 2, which shows how much the times vary")
    if given.cores < 1:
        parser.error(f"--cores={given.cores} must be at least 1; leave it out to use all cores")
    least = min(size for axis in given.axis for size in AXES[axis].sizes)
    if given.most < least:
        parser.error(f"--most={given.most:g} leaves no size; try {least}")
    MEASURED.check_typed(parser, given.write)
    return given


def main() -> int:
    given = arguments()
    end = time.monotonic() + 60 * given.minutes
    load = os.getloadavg()[0]
    sizes = [(axis, size) for axis in given.axis for size in AXES[axis].sizes if size <= given.most]
    skipped = left_out(sizes, available_memory() / 2**20)
    print(*skipped.values(), sep="\n", file=sys.stderr, end="\n" if skipped else "")
    with tempfile.TemporaryDirectory() as scratch:
        place = Place(Path(scratch), Path(scratch))
        cells = run([size for size in sizes if size not in skipped], given.rounds, place, end)
    measured = f"{facts(load, list(skipped.values()), ['torch'])}\n\n{render(cells, given.cores)}"
    print(measured)
    if given.write:
        from growth_plot import draw

        draw(cells, given.cores, given.write.parent / "images" / "growth.png")
        write = f"{measured}\n![seconds against ranks, samples and parameters](images/growth.png)"
        MEASURED.write(given.write, write)
    return 0 if all(cell.logged and cell.silent for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
