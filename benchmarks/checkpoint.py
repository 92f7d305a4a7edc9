"""What a checkpoint costs the loop: written beside training against written while it waits, in turn.

usage: python benchmarks/checkpoint.py [--mib 400] [--rounds 5] [--between 100] [--saves 7] [--work mlp ...]
One process. First how long the loop stops for one checkpoint of so many MiB, best and median of the rounds. Then, in
one run of each work, what a checkpoint costs so many steps: those that follow one against those between which none is
taken, which come before and after, median and range of the saves.
"""

import argparse
import array
import functools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from runner.fault_tolerance.background import Background, Snapshot
from runner.fault_tolerance.checkpoint import save
from runner.fault_tolerance.writers import Writers
from runner.runs.train_state import TrainState
from runner.training.saved_state import HeldState, Piece

HERE = Path(__file__).parent
WORKS = {
    "convnet": [],  # what the first command trains
    "resnet18": ["model=resnet18", "data.sample_shape=[1,28,28]", "batch_size=8"],  # 85 MiB
    # 100 MiB, and nothing that has more bytes to write for its arithmetic.
    "mlp": ["model=mlp", "model.hidden=[1672,1672,1672,1672]", "optimizer=adamw", "batch_size=64"],
}


def stops(mib: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds that the loop stops for a checkpoint, by how it is written; not the first, of new memory."""
    tensors = {f"model.{number}": torch.randn(2**18) for number in range(mib)}  # 1 MiB each
    held = HeldState({name: Piece.of(tensor) for name, tensor in tensors.items()})
    snapshot, background, writers = Snapshot(), Background(), Writers()
    found: dict[str, list[float]] = {"synchronous": [], "asynchronous": []}
    for number in range(rounds + 1):
        start = time.perf_counter()
        save(folder / "synchronous", held, TrainState(number, 0, number, 1), writers)
        found["synchronous"].append(time.perf_counter() - start)
        start = time.perf_counter()
        copy = snapshot.of(held)
        work = functools.partial(save, folder / "asynchronous", copy, TrainState(number, 0, number, 1), writers)
        background.do(work)
        found["asynchronous"].append(time.perf_counter() - start)
        background.wait()
    return {way: seconds[1:] for way, seconds in found.items()}


def costs(words: Sequence[str], between: int, saves: int) -> list[float]:
    """Of each save: the rate of the steps that follow it, over that of as many before these and as many after."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "times"
        command = [sys.executable, "-m", "runner", f"--config-dir={HERE}", "callbacks=step_times", *words]
        command += [f"callbacks.step_times.file={file}", f"max_steps={2 * between * (saves + 1)}", "epochs=100000"]
        command += [f"checkpoint.every_steps={2 * between}", "checkpoint.every_epochs=100000", "checkpoint.keep=1"]
        command += ["checkpoint.keep_best=0", "eval_every=100000", "eval_batches=1", f"outputs={scratch}"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout}{done.stderr}")
        ends = array.array("d", file.read_bytes())
    # Of so many steps each, from the second on: none is before the first, which warms up. Every second follows a save.
    blocks = [ends[last] - ends[last - between] for last in range(2 * between - 1, len(ends), between)]
    return [(blocks[n - 1] + blocks[n + 1]) / 2 / blocks[n] for n in range(1, len(blocks), 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("mib", 400), ("rounds", 5), ("between", 100), ("saves", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--work", choices=WORKS, nargs="*", default=list(WORKS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = stops(args.mib, args.rounds, Path(scratch))
    for way, seconds in found.items():
        median = statistics.median(seconds)
        print(f"{way:12s}  the loop stops for {min(seconds):.3f} s at best, {median:.3f} s in the median")
    share = statistics.median(found["asynchronous"]) / statistics.median(found["synchronous"])
    print(f"{share:.3f} of a synchronous save of {args.mib} MiB")
    for work in args.work:
        ratios = sorted(costs(WORKS[work], args.between, args.saves))
        print(
            f"{work}: {statistics.median(ratios):.3f} of the rate with a checkpoint each {args.between} steps, median "
            f"of {args.saves}; {ratios[0]:.3f} to {ratios[-1]:.3f}"
        )


if __name__ == "__main__":
    main()
