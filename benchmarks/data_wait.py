"""How long a step waits for in-memory data: read for several steps at once and split, or step by step.

usage: python benchmarks/data_wait.py [--work mlp,convnet,transformer] [--rounds 7] [--steps 60]
One process, one thread, and 60,000 random images of MNIST's size. The two ways are interleaved, `steps` of each per
round, with forward, backward and update, so that the caches are as in training.
"""

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from peers.works import MNIST, WORKS, Work, named
from random_workload import model_of
from runner.shipped.data.tensors import TensorData

from runner.input.batch import StepBatch
from runner.input.loader import Loader
from runner.input.sampler import Sampler
from runner.jobs.process_tuning import keep_freed_memory

CPU = torch.device("cpu")


class StepByStep(TensorData):
    reads_ahead = False


def measure(work: Work, steps: Iterator[StepBatch], model: torch.nn.Module) -> tuple[float, float]:
    """Return the mean seconds of a step, and of its wait for data."""
    optimizer = getattr(torch.optim, work.optimizer)(model.parameters(), **work.options)
    start, waited = time.perf_counter(), []
    for step in steps:
        waited.append(step.wait_s)
        batch = step.micro_batches[0]
        F.cross_entropy(model(batch.inputs), batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - start) / len(waited), statistics.mean(waited)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    of_images = [name for name, work in WORKS.items() if work.data is MNIST]
    parser.add_argument("--work", type=named, default="mlp,convnet,transformer", help=", ".join(of_images))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    if others := [name for name in given.work if name not in of_images]:
        parser.error(f"--work={others[0]} has other data; try {','.join(of_images)}")
    for option in ("rounds", "steps"):
        if getattr(given, option) < 2:
            parser.error(f"--{option}={getattr(given, option)} must be at least 2")
    torch.set_num_threads(1)
    keep_freed_memory()
    images = torch.randint(256, (MNIST.num_train, *MNIST.sample_shape), dtype=torch.uint8)
    classes = torch.randint(MNIST.num_outputs, (MNIST.num_train,))
    print("| work | way | waits, ms | step, ms | waits, part of a step | rate, x step by step |\n|" + "---|" * 6)
    for name in given.work:
        work = WORKS[name]
        model = model_of(work)
        sampler = Sampler(len(classes), work.batch_size, max_steps=given.steps)
        loaders = {
            way: Loader(kind(images, classes), sampler, torch.float32, CPU)
            for way, kind in (("step by step", StepByStep), ("ahead", TensorData))
        }
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in loaders}
        for number in range(1 + given.rounds):
            for way, loader in loaders.items():
                figures = measure(work, loader.steps(epoch=number), model)
                if number:  # the first round warms up
                    found[way].append(figures)
        for way, rounds in found.items():
            taken, waited = (1e3 * statistics.median(each) for each in zip(*rounds, strict=True))
            part = statistics.median(wait / step for step, wait in rounds)
            both = zip(found["step by step"], rounds, strict=True)
            ratio = statistics.median(one / other for (one, _), (other, _) in both)
            print(f"| {name} | {way} | {waited:.3f} | {taken:.2f} | {part:.1%} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
