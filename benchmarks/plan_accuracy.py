"""How accurate task=plan is on this machine: bytes, memory, and the order of modes by speed.

usage: python benchmarks/plan_accuracy.py [--models mlp,convnet,resnet18,gpt] [--ranks 1,2,4] [--only memory|speed]
           [--modes none,ddp] [--device h100]
Nothing else may run, except with --only memory. For each model, task=plan plans all modes, task=compare measures their
bytes and step times, and allocated_memory.py, with a C compiler, the peak memory of each rank. Prints a row for each
mode and number of ranks. For each model and number of ranks, it then counts the pairs of modes whose measured step
times differ by more than 20%, and names those that the plan orders wrongly.

--device plans for that data sheet. The machine must have such GPUs, one per rank; the memory is then what torch has
allocated on them, without cuDNN's and cuBLAS's workspaces.
"""

import argparse
import csv
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Models are large compared with the samples that the loader reads ahead, which a plan does not include. Batches are at
# most a sixth of the training data, because a checkpoint is copied at the end of an epoch.
TOKENS = ["data=text", "data.sample_shape=[1024]"]
IMAGES = ["data=random", "data.sample_shape=[3,32,32]", "data.num_outputs=10"]
MODELS = {
    "mlp": ["model=mlp", "model.hidden=[2048,2048]", "batch_size=192"],
    "convnet": ["model=convnet", "batch_size=192"],
    "resnet18": ["model=resnet18", *IMAGES, "batch_size=64"],
    "gpt": ["model=gpt", "data=text", "batch_size=64"],
}
# Models that keep a large GPU busy.
GPU_MODELS = {
    "mlp": ["model=mlp", "model.hidden=[8192,8192]", *IMAGES, "batch_size=1024"],
    "convnet": ["model=convnet", "model.channels=[128,256]", *IMAGES, "batch_size=512"],
    "resnet18": ["model=resnet18", *IMAGES, "batch_size=512", "precision=bf16"],
    "gpt": [
        "model=gpt",
        "model.dim=1024",
        "model.depth=16",
        "model.heads=16",
        *TOKENS,
        "batch_size=32",
        "precision=bf16",
    ],
}
MODES = ("none", "allreduce", "ddp", "zero", "fsdp", "tp", "pipeline", "ps", "local_sgd")
LARGE = 1.2  # ratio of step times that a plan must order correctly


def run(folder: Path, *command: str, **variables: str) -> None:
    words, env = [sys.executable, *command, f"outputs={folder}"], os.environ | variables
    done = subprocess.run(words, capture_output=True, text=True, timeout=3600, env=env, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")


def plan(
    folder: Path, words: Sequence[str], sizes: Sequence[int], chosen: Sequence[str], device: str
) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the planned cells by mode and number of ranks."""
    modes, of = f"plan.modes=[{','.join(chosen)}]", f"plan.world_sizes={[*sizes]}".replace(" ", "")
    run(folder / "plan", "-m", "runner", *words, "task=plan", modes, of, f"plan.device={device}")
    (file,) = (folder / "plan").glob("*/*/plan.json")
    cells = json.loads(file.read_text())["cells"]
    return {(cell["mode"], cell["world_size"]): cell for cell in cells if "reason" not in cell}


def compare(
    folder: Path, words: Sequence[str], sizes: Sequence[int], chosen: Sequence[str]
) -> dict[tuple[str, int], dict[str, str]]:
    """Return the measured cells by mode and number of ranks."""
    modes, of = f"compare.modes=[{','.join(chosen)}]", f"compare.world_sizes={[*sizes]}".replace(" ", "")
    run(folder / "compare", "-m", "runner", *words, "task=compare", modes, of)
    (file,) = (folder / "compare").glob("*/*/compare.csv")
    rows = csv.DictReader(file.read_text().splitlines())
    return {(row["mode"], int(row["world_size"])): row for row in rows if row["step_time_s"]}


def compile_counter(folder: Path) -> Path:
    """Return the shared library of cpu_allocator.c."""
    library, source = folder / "cpu_allocator.so", Path(__file__).with_name("cpu_allocator.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
    return library


def allocated(folder: Path, words: Sequence[str], mode: str, size: int, counter: Path) -> int:
    """Return the peak of the rank that needs the most memory, in bytes."""
    file = folder / f"{mode}.{size}"
    script = str(Path(__file__).parent / "allocated_memory.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", script, str(file)]
    run(folder / "train", *torchrun, *words, f"parallel={mode}", LD_PRELOAD=str(counter))
    return max(int(path.read_text()) for path in folder.glob(f"{mode}.{size}.*"))


def differing_bytes(planned: dict[str, Any], measured: dict[str, str]) -> list[str]:
    """Return the collectives whose bytes per step differ."""
    prefix = "bytes_per_step/"
    real = {name.removeprefix(prefix): float(value or 0) for name, value in measured.items() if prefix in name}
    kinds = sorted(real.keys() | planned["bytes_per_step"].keys())
    both = {kind: (real.get(kind, 0), planned["bytes_per_step"].get(kind, 0)) for kind in kinds}
    return [kind for kind, values in both.items() if not math.isclose(*values)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--only", choices=("memory", "speed"))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--device", default="this")
    args = parser.parse_args()
    sizes, modes, on_gpu = [*map(int, args.ranks.split(","))], args.modes.split(","), args.device != "this"
    print("| model | mode | ranks | planned MiB | peak MiB | error | planned step ms | step ms | other bytes |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    orders = []
    for model in args.models.split(","):
        # A logged step also sums the loss over the ranks, and a smaller last batch exchanges less.
        words = [*(GPU_MODELS if on_gpu else MODELS)[model], "log_every=1000", "loader.drop_last=true"]
        words.append("optimizer.lr=1e-4")  # no loss may become infinite
        with tempfile.TemporaryDirectory() as name:
            counter = None if on_gpu else compile_counter(Path(name))
            cells = plan(Path(name), words, sizes, modes, args.device)
            measured = {} if counter and args.only == "memory" else compare(Path(name), words, sizes, modes)
            for (mode, size), cell in sorted(cells.items(), key=lambda item: item[0][1]):
                planned = max(sum(parts.values()) for parts in cell["memory_bytes"].values()) / 2**20
                row = [model, mode, str(size), f"{planned:.1f}", "", ""]
                peak = 0.0
                if counter and args.only != "speed":
                    peak = allocated(Path(name), words, mode, size, counter) / 2**20
                elif on_gpu and (mode, size) in measured:
                    memory = [value for key, value in measured[mode, size].items() if key.startswith("memory_mib/")]
                    peak = max(float(value) for value in memory if value)
                if peak:
                    row[4:] = [f"{peak:.1f}", f"{planned / peak - 1:+.1%}"]
                if (mode, size) in measured:
                    real = measured[mode, size]
                    times = [f"{1000 * float(step_s):.1f}" for step_s in (cell["step_time_s"], real["step_time_s"])]
                    row += [*times, ", ".join(differing_bytes(cell, real))]
                print("| " + " | ".join(row) + " |", flush=True)
        for size in sizes if measured else []:
            times_of = {
                mode: (float(measured[mode, n]["step_time_s"]), cells[mode, n]["step_time_s"])
                for mode, n in cells.keys() & measured.keys()
                if n == size
            }
            pairs = itertools.combinations(sorted(times_of, key=lambda mode: times_of[mode]), 2)  # faster, slower
            large = [(a, b) for a, b in pairs if times_of[b][0] > LARGE * times_of[a][0]]
            wrong = [f"{a} < {b}" for a, b in large if times_of[a][1] >= times_of[b][1]]
            orders.append(f"| {model} | {size} | {len(large)} | {len(wrong)} | {', '.join(wrong)} |")
    if orders:
        print("\n| model | ranks | pairs | wrong | which |\n|---|---|---|---|---|", *orders, sep="\n")


if __name__ == "__main__":
    main()
