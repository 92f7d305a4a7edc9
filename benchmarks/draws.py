"""The time of a step whose random numbers follow the samples, compared with torch's generator.

usage: python benchmarks/draws.py [--work transformer,gpt,convnet] [--dropout 0.1] [--rounds 60]
Forward, backward and update in one process with one thread, on random data, with this probability of every Dropout. The
two ways are interleaved, one step each, so that other work on the machine affects both. The ratio is that of the times
of each round; shown are its median and quartiles. convnet has no dropout: its ratio is the cost of the function mode,
which a run does not enter for a model without random numbers.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from peers.works import WORKS, Work, named
from random_workload import loss_of, model_of
from torch import nn

from runner.input.batch import MicroBatch
from runner.jobs.process_tuning import keep_freed_memory
from runner.training.draws.following import Draws

WARMUP_STEPS = 3


def step_of(work: Work, dropout: float, follows: bool) -> Callable[[int], None]:
    """Return a function that trains a new model for one step of this number."""
    model, loss = model_of(work), loss_of(work, work.batch_size)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = dropout
    optimizer = getattr(torch.optim, work.optimizer)(model.parameters(), **work.options)
    draws = Draws(follows=follows, sample_dims={("dropout", dims): 0 for dims in (2, 3, 4)})
    micro_batch = MicroBatch(None, range(work.batch_size))

    def step(number: int) -> None:
        draws.begin(0, number, data_rank=0)
        with draws.following(micro_batch):
            loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=named, default="transformer,gpt,convnet", help=", ".join(WORKS))
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error(f"--rounds={given.rounds} must be at least 2")
    torch.set_num_threads(1)
    keep_freed_memory()
    print("| work | torch: median, best, ms | followed: median, best, ms | ratio of times |\n|" + "---|" * 4)
    for name in given.work:
        steps = [step_of(WORKS[name], given.dropout, follows) for follows in (False, True)]
        seconds: list[list[float]] = [[], []]
        for number in range(WARMUP_STEPS + given.rounds):
            for way in (0, 1) if number % 2 else (1, 0):
                start = time.perf_counter()
                steps[way](number)
                seconds[way].append(time.perf_counter() - start)
        kept = [each[WARMUP_STEPS:] for each in seconds]
        cells = [f"{1e3 * statistics.median(each):.2f}, {1e3 * min(each):.2f}" for each in kept]
        ratios = [followed / of_torch for of_torch, followed in zip(*kept, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        print(f"| {name} | {cells[0]} | {cells[1]} | {median:.3f} ({low:.3f} to {high:.3f}) |", flush=True)


if __name__ == "__main__":
    main()
