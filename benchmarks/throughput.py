"""The runner against the loop written by hand, on the same work, in turn: medians and their ratio.

usage: python benchmarks/throughput.py [--nproc 2] [--rounds 3] [OVERRIDE ...]
One epoch of the ConvNet on MNIST-format files, global batch 200, one thread per process. Overrides go to the runner.
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

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, HERE / "mnist_files.py", scratch], check=True)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.nproc)]
        ours = ["data=mnist", f"data.root={scratch}", "parallel=ddp", "batch_size=200", "epochs=1", "optimizer.lr=0.01"]
        ours += ["optimizer.momentum=0", f"outputs={scratch}/outputs", *args.overrides]
        commands = {
            "hand-written": [*torchrun, str(HERE / "hand_written.py"), scratch],
            "runner": [*torchrun, "-m", "runner", *ours],
        }
        rates: dict[str, list[float]] = {name: [] for name in commands}
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(args.rounds):
            for name, command in commands.items():
                start = time.perf_counter()
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
                seconds[name].append(time.perf_counter() - start)
                if name == "runner":
                    newest = max(Path(scratch, "outputs", "run").iterdir(), key=lambda path: path.stat().st_ctime)
                    rates[name].append(json.loads((newest / "result.json").read_text())["samples_per_second"])
                else:
                    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
                    rates[name].append(json.loads(line)["samples_per_second"])
        yardstick = statistics.median(rates["hand-written"])
        for name in commands:
            rate, wall = statistics.median(rates[name]), statistics.median(seconds[name])
            print(
                f"{name:12s}  {rate:7,.0f} samples/s  {rate / yardstick:5.2f} x hand-written  "
                f"{wall:5.1f} s whole command  n={args.rounds}"
            )


if __name__ == "__main__":
    main()
