"""The cost of elastic_every_steps when no rank is lost: samples per second with a copy each n steps, interleaved.

usage: python benchmarks/state_copies.py [--rounds N] [--ranks N] [--parallel ddp|allreduce|zero]

Over gloo, one thread per rank, float32: ConvNet on the built-in digits, and an MLP with 8.4 million parameters and
AdamW, which has the most bytes to copy for its arithmetic.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKS = {
    "convnet": ("model=convnet", "max_steps=400"),
    "mlp": ("model=mlp", "model.hidden=[1672,1672,1672,1672]", "optimizer=adamw", "max_steps=120"),
}
EVERY = ("null", "1", "10")


def rate(work: str, every: str, parallel: str, num_ranks: int) -> float:
    """Return the samples per second of a run."""
    with tempfile.TemporaryDirectory() as folder:
        words = (*WORKS[work], f"parallel={parallel}", "threads=1", "logger=none", "epochs=1000", f"outputs={folder}")
        launcher = ("launcher=spawn", f"launcher.nproc_per_node={num_ranks}")
        command = [sys.executable, "-m", "runner", *words, *launcher, f"elastic_every_steps={every}"]
        quiet = ("eval_every=1000", "checkpoint.every_epochs=1000", "log_every=20")
        subprocess.run([*command, *quiet], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (result,) = Path(folder).glob("run/*/result.json")
        return float(json.loads(result.read_text())["samples_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parallel", default="ddp")
    given = parser.parse_args()
    for work in WORKS:
        rounds = [
            {every: rate(work, every, given.parallel, given.ranks) for every in EVERY} for _ in range(given.rounds)
        ]
        for every in EVERY[1:]:
            ratios = [each[every] / each["null"] for each in rounds]
            median, best = statistics.median(ratios), max(ratios)
            print(
                f"{work}: elastic_every_steps={every}: {median:.3f} of the rate without, {best:.3f} at best", flush=True
            )


if __name__ == "__main__":
    main()
