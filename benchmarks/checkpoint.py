"""The cost of a checkpoint for the training loop: written in the background, and synchronously; interleaved.

usage: python benchmarks/checkpoint.py [--mib 400] [--rounds 5] [--between 100] [--saves 7] [--work mlp ...]
One process. First the time for which the loop stops for one checkpoint of `--mib`, best and median of the rounds. Then,
in one run of each workload, the rate of the `--between` steps after a save, relative to as many steps before and after
that are not interrupted: median and range over the saves.
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

from runner.checkpoints.layout import TrainState
from runner.checkpoints.save import save
from runner.checkpoints.save_coordination import SaveCoordinator
from runner.checkpoints.saved_state import LocalState
from runner.checkpoints.shard_file import LocalChunk
from runner.checkpoints.snapshot import Snapshot
from runner.records.background import BackgroundThread

HERE = Path(__file__).parent
WORKS = {
    "convnet": [],  # the model of README's first command
    "resnet18": ["model=resnet18", "data.sample_shape=[1,28,28]", "batch_size=8"],  # 85 MiB
    # 100 MiB: the most bytes to write for its arithmetic
    "mlp": ["model=mlp", "model.hidden=[1672,1672,1672,1672]", "optimizer=adamw", "batch_size=64"],
}


def stops(mib: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Return how many seconds the loop stops for a checkpoint, by kind; without the first, which allocates memory."""
    tensors = {f"model.{number}": torch.randn(2**18) for number in range(mib)}  # 1 MiB each
    held = LocalState({name: LocalChunk.of(tensor) for name, tensor in tensors.items()})
    snapshot, writer, coordinator = Snapshot(), BackgroundThread("checkpoint"), SaveCoordinator()
    found: dict[str, list[float]] = {"synchronous": [], "asynchronous": []}
    for number in range(rounds + 1):
        start = time.perf_counter()
        save(folder / "synchronous", held, TrainState(number, 0, number, 1), coordinator)
        found["synchronous"].append(time.perf_counter() - start)
        start = time.perf_counter()
        copy = snapshot.of(held)
        work = functools.partial(save, folder / "asynchronous", copy, TrainState(number, 0, number, 1), coordinator)
        writer.submit(work)
        found["asynchronous"].append(time.perf_counter() - start)
        writer.wait()
    return {way: seconds[1:] for way, seconds in found.items()}


def costs(words: Sequence[str], between: int, saves: int) -> list[float]:
    """Return for each save the rate of the steps after it, relative to that of as many steps before and after these."""
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
    # Intervals of so many steps; the first one warms up, and every second one follows a save.
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
