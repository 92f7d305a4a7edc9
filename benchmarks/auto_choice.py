"""How fast the mode is that parallel=auto chooses, compared with the fastest measured one.

usage: python benchmarks/auto_choice.py [--models mlp,convnet,resnet18,gpt] [--ranks 2] [--rounds 3]
Nothing else may run. In each round, parallel=auto chooses a mode, and task=compare measures all modes that have the
numbers of parallel=none. The speed of a mode is its best of all rounds. A row shows the choices, the fastest mode, and
the speed of the slowest choice divided by that of the fastest mode.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODELS = {
    "mlp": ["model=mlp"],
    "convnet": ["model=convnet"],
    "resnet18": ["model=resnet18", "data=random", "data.sample_shape=[3,32,32]", "data.num_outputs=10"],
    "gpt": ["model=gpt", "data=text"],
}
MODES = ("allreduce", "ddp", "zero", "fsdp", "tp", "pipeline", "ps")


def run(folder: Path, *overrides: str) -> Path:
    """Run a command, and return its run directory."""
    command = [sys.executable, "-m", "runner", "logger=none", f"outputs={folder}", *overrides]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800)
    (path,) = (folder / "run").iterdir()
    return path


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print("| model | chosen | fastest | ratio |\n|---|---|---|---|")
    for model in args.models.split(","):
        chosen, rates = list[str](), dict[str, float]()
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as name:
                launcher = ["launcher=spawn", f"launcher.nproc_per_node={args.ranks}"]
                trained = run(Path(name) / "auto", *MODELS[model], "parallel=auto", *launcher, "max_steps=1")
                chosen.append(read(trained / "auto.json")["mode"])
                sizes = f"compare.world_sizes=[{args.ranks}]"
                modes = f"compare.modes=[{','.join(MODES)}]"
                compared = run(Path(name) / "compare", *MODELS[model], "task=compare", modes, sizes)
                for cell, rate in read(compared / "result.json")["metrics"].items():
                    mode, ranks = cell.split("/")
                    if int(ranks) == args.ranks:
                        rates[mode] = max(rates.get(mode, 0.0), rate)
        fastest = max(rates, key=lambda mode: rates[mode])
        ratio = min(rates[mode] for mode in chosen) / rates[fastest]
        print(f"| {model} | {', '.join(sorted(set(chosen)))} | {fastest} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
