"""Compare the runner with a hand-written loop, the limit of that loop, and other frameworks on the same workloads.

usage: python benchmarks/suite.py [--work convnet,gpt] [--nproc 1,2] [--only hand-written,runner] [--rounds 5]
           [--runner 'KEY=VALUE ...'] [--steps N] [--minutes 18.5] [--root DIR] [--write benchmarks/measured.md]

Without --work, --nproc and --only the suite measures the workloads and commands of benchmarks/measured.md. In each
round the commands of a workload run one after the other. The tables have the median and range of the rounds' ratios.
Everything runs on the CPU with one thread per rank, or with BENCHMARK_DEVICE=cuda in the environment on GPUs. Each
--runner adds a row for the runner with these overrides.
Frameworks that are not installed are skipped: pip install lightning accelerate pytorch-ignite.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from page import facts
from peers.commands import BASELINE, PEERS, ROOT, RUNNER, CommandFailed, Place, command, measure, missing
from peers.works import MNIST, WORKS
from suite_table import MEASURED, Cell, render

FEW = (BASELINE, RUNNER)
LOCAL_BATCH_NORM = f"{RUNNER} sync_batchnorm=false"  # as in the other frameworks
NUM_RANKS = (1, 2, 4)


@dataclass(frozen=True)
class Group:
    """The commands that are compared with each other: one workload on one number of ranks."""

    work: str
    num_ranks: int
    peers: tuple[str, ...]


def planned() -> list[Group]:
    """Return all frameworks at 2 ranks on three workloads, and the runner and the baseline on all of them.

    One round takes about 6 minutes on 2 cores.
    """
    peers: dict[tuple[str, int], tuple[str, ...]] = {(work, num_ranks): FEW for work in WORKS for num_ranks in (1, 2)}
    peers |= {("convnet", num_ranks): (BASELINE, "limit", RUNNER) for num_ranks in (1, 4)}
    peers |= {("convnet", 2): (*PEERS, LOCAL_BATCH_NORM), ("resnet18", 2): PEERS, ("transformer", 2): PEERS}
    peers |= {("transformer", 4): FEW}
    by_work = sorted(peers.items(), key=lambda item: (list(WORKS).index(item[0][0]), item[0][1]))
    return [Group(work, num_ranks, names) for (work, num_ranks), names in by_work]


def groups_of(given: argparse.Namespace) -> list[Group]:
    if given.work or given.nproc or given.only:
        works, numbers = given.work or list(WORKS), given.nproc or NUM_RANKS
        groups = [Group(work, num_ranks, tuple(given.only or PEERS)) for work in works for num_ranks in numbers]
    else:
        groups = planned()
    more = [f"{RUNNER} {overrides}" for overrides in given.runner]
    rows = [Group(group.work, group.num_ranks, tuple(dict.fromkeys((*group.peers, *more)))) for group in groups]
    return list(dict.fromkeys(rows))  # each once


def run(groups: Sequence[Group], given: argparse.Namespace, place: Place, end: float) -> list[Cell]:
    """Measure round after round, until `given.rounds` are done or the next group would exceed the time."""
    cells = {(group, peer): Cell(group.work, group.num_ranks, peer) for group in groups for peer in group.peers}
    took = dict.fromkeys(groups, 0.0)
    for number in range(1, given.rounds + 1):
        for group in groups:
            start = time.monotonic()
            if start + took[group] > end:
                continue
            for peer in group.peers:
                cell = cells[group, peer]
                steps = given.steps or WORKS[group.work].steps
                print(f"round {number}: {group.work}, ranks {group.num_ranks}, {peer}: ", end="", file=sys.stderr)
                try:
                    figures = measure(command(peer, group.work, group.num_ranks, steps, place), place)
                except CommandFailed as error:
                    cell.failures.append(str(error))
                    print(error, file=sys.stderr)
                    continue
                cell.rounds[number] = figures
                rate, seconds = figures["samples_per_second"], figures["command_s"]
                print(f"{rate:,.0f} samples/s, {seconds:.1f} s in all", file=sys.stderr)
            took[group] = time.monotonic() - start
    return list(cells.values())


def arguments() -> argparse.Namespace:
    """Parse the command line. Exit with status 2 if a value is invalid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=_words, help=", ".join(WORKS))
    parser.add_argument("--nproc", type=_numbers, help="numbers of ranks: 1,2,4")
    parser.add_argument("--only", type=_words, help=", ".join(PEERS))
    parser.add_argument(
        "--runner",
        action="append",
        default=[],
        metavar="OVERRIDES",
        help="add a row for the runner with these overrides",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="optimizer steps of every command; default: those of the workload")
    parser.add_argument("--minutes", type=float, default=18.5, help="start no comparison that would end later")
    parser.add_argument(
        "--root", type=Path, help="directory of MNIST-format files, created if missing; default: a temporary one"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the tables and the plot into this page")
    given = parser.parse_args()
    for option, known in (("work", WORKS), ("only", PEERS)):
        for word in getattr(given, option) or ():
            if word not in known:
                parser.error(f"--{option}={word} must be one of {', '.join(known)}")
    if given.rounds < 1:
        parser.error(f"--rounds={given.rounds} must be at least 1; 5 or more show the range of the ratios")
    for group in groups_of(given):
        work = WORKS[group.work]
        if group.num_ranks < 1 or work.batch_size % group.num_ranks:
            parser.error(f"--nproc={group.num_ranks} must divide {group.work}'s batch of {work.batch_size}; try 1,2,4")
        if given.steps is not None and not 2 <= given.steps <= work.steps_per_epoch:
            most = work.steps_per_epoch
            parser.error(f"--steps={given.steps} must be at least 2 and at most {most}, an epoch of {group.work}")
    MEASURED.check_typed(parser, given.write)
    return given


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> int:
    given = arguments()
    end = time.monotonic() + 60 * given.minutes
    load = os.getloadavg()[0]
    groups = groups_of(given)
    lines = missing([peer for peer in PEERS if any(peer in group.peers for group in groups)])
    absent = [f"{peer} is not installed and is skipped: {line}" for peer, line in lines.items()]
    print(*absent, sep="\n", file=sys.stderr, end="\n" if absent else "")
    groups = [Group(each.work, each.num_ranks, tuple(p for p in each.peers if p not in lines)) for each in groups]
    with tempfile.TemporaryDirectory() as scratch:
        place = Place(given.root.resolve() if given.root else Path(scratch, "data"), Path(scratch))
        if any(WORKS[group.work].data is MNIST for group in groups) and not (place.data / "MNIST").exists():
            subprocess.run([sys.executable, ROOT / "benchmarks" / "mnist_files.py", place.data], check=True)
        cells = run(groups, given, place, end)
    measured = f"{facts(load, absent)}\n\n{render(cells, BASELINE)}"
    print(measured)
    if given.write:
        from suite_plot import draw

        draw(cells, given.write.parent / "images" / "benchmarks.png")
        MEASURED.write(given.write, f"{measured}\n![samples per second against ranks](images/benchmarks.png)")
    return 0 if all(cell.rounds for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
