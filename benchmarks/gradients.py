"""The gain from summing gradients in shared memory on one machine: a step of ddp, with it and with gloo.

usage: python benchmarks/gradients.py [--work transformer,resnet18] [--ranks 2 4] [--rounds 12] [--steps 4]
The two are interleaved in the same processes, `steps` steps each, so that other work on the machine affects both. Only
forward, backward, the exchange and the update are timed, on random data and without SyncBatchNorm. The ratio of the
rates is computed from the medians of each round; shown are its median and quartiles.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.multiprocessing as mp
from peers.works import WORKS, Work, named
from process_group import process_group
from random_workload import loss_of, model_of

from runner.jobs.process_tuning import keep_freed_memory
from runner.parallel.ddp import FixedBuckets

WARMUP_STEPS = 2


def step_of(work: Work, num_ranks: int, by_gloo: bool) -> Callable[[], None]:
    """Return a function that trains a new model for one step."""
    model, loss = FixedBuckets(model_of(work)), loss_of(work, work.batch_size // num_ranks)
    if not by_gloo:
        assert model.sum_on_cpu()
    optimizer = getattr(torch.optim, work.optimizer)(model.parameters(), **work.options)

    def step() -> None:
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(rank: int, num_ranks: int, store: str, name: str, rounds: int, num_steps: int) -> None:
    """Print a row on rank 0."""
    keep_freed_memory()
    with process_group(rank, num_ranks, store):
        ways = {way: step_of(WORKS[name], num_ranks, way == "gloo") for way in ("gloo", "runner")}
        medians: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, step in ways.items():
                taken = []
                for number in range(WARMUP_STEPS + num_steps):
                    start = time.perf_counter()
                    step()
                    if number >= WARMUP_STEPS:
                        taken.append(time.perf_counter() - start)
                medians[way].append(statistics.median(taken))
        if rank == 0:
            ratios = [gloo / own for gloo, own in zip(medians["gloo"], medians["runner"], strict=True)]
            lower, ratio, upper = statistics.quantiles(ratios, n=4)
            ms = [1e3 * statistics.median(medians[way]) for way in ways]
            quartiles = f"{ratio:.2f} ({lower:.2f} to {upper:.2f})"
            print(f"| {name} | {num_ranks} | {ms[0]:.1f} | {ms[1]:.1f} | {quartiles} |", flush=True)
        del ways, step  # a live DDP keeps the group alive: https://github.com/pytorch/pytorch/issues/190489


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=named, default="convnet,transformer,resnet18", help=", ".join(WORKS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error(f"--rounds={given.rounds} must be at least 2; 12 show how much it varies")
    print("| work | ranks | by gloo, ms | by the runner, ms | rate, x gloo |\n|---|---|---|---|---|", flush=True)
    for work in given.work:
        for num_ranks in given.ranks:
            with tempfile.TemporaryDirectory() as folder:
                options = (num_ranks, f"{folder}/store", work, given.rounds, given.steps)
                mp.spawn(measure, options, nprocs=num_ranks)


if __name__ == "__main__":
    main()
