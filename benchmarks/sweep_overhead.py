"""The overhead of a job in addition to its training, in a sweep under one torchrun and in a shell loop of torchrun.

usage: python benchmarks/sweep_overhead.py [--nproc 2] [--jobs 12] [OVERRIDE ...]
The time of a job in the sweep is the average from the start of the first job to the end of the last one, by the
sweep's ledger. A second row also divides the start and the end of the whole command among the jobs. The training time
of a job is its number of samples divided by the measured rate. Overrides are passed to the runner.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOB = ["model=toy", "data=toy", "parallel=ddp", "epochs=2", "backend=gloo"]
SAMPLES = 2 * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.nproc)]
    with tempfile.TemporaryDirectory() as scratch:
        overrides = [*JOB, f"outputs={scratch}", *args.overrides]
        start = time.time()
        run([*torchrun, "-m", "runner", "-m", *overrides, "name=sweep", f"seed=range({args.jobs})"])
        whole = (time.time() - start) / args.jobs
        (ledger,) = Path(scratch, "sweep").glob("*/ledger.jsonl")
        lines = [json.loads(line) for line in ledger.read_text().splitlines()]
        starts = [line["at"] for line in lines if line.get("state") == "running"]
        ends = [line["at"] for line in lines if line.get("state") == "finished"]
        in_sweep = (ends[-1] - starts[0]) / args.jobs
        loop = []
        for seed in range(args.jobs):
            start = time.time()
            run([*torchrun, "-m", "runner", *overrides, "name=loop", f"seed={seed}"])
            loop.append(time.time() - start)
        training = {name: train_s(Path(scratch, name)) for name in ("sweep", "loop")}
    in_loop = statistics.mean(loop) - training["loop"]
    rows = {
        "shell loop": in_loop,
        "sweep, job to job": in_sweep - training["sweep"],
        "sweep, with its start": whole - training["sweep"],
    }
    for name, overhead in rows.items():
        print(f"{name:22s}  {overhead:6.3f} s per job in addition to training  {overhead / in_loop:6.3f} x the loop's")
    print(f"{args.jobs} jobs on {args.nproc} ranks; training {training['loop']:.3f} s per job in the loop")


def run(command: list[str]) -> None:
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)


def train_s(folder: Path) -> float:
    """Return the mean seconds of training of a job."""
    rates = [json.loads(path.read_text())["samples_per_second"] for path in folder.rglob("result.json")]
    return statistics.mean(SAMPLES / rate for rate in rates)


if __name__ == "__main__":
    main()
