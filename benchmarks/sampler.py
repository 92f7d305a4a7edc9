"""The time of an epoch's order by number of samples: computed per step, and stored as a whole (torch.randperm).

usage: python benchmarks/sampler.py [--batch-size N] [--ranks N] [--stored 1e8] [--rounds N]

For one rank, in microseconds, the best of all rounds: the first step in the middle of an epoch, as after a resume, and
each following step; and the growth of the process in MiB. Above --stored samples only the computed order is measured,
because the stored one needs 8 bytes per sample. Linux only.
"""

import argparse
import itertools
import multiprocessing
import resource
import time

import torch

from runner.input.sampler import Sampler

SIZES = [10**exponent for exponent in range(3, 11)]
FOLLOWING = 400  # steps


def measure(num_samples: int, batch_size: int, num_ranks: int, stored: bool) -> tuple[float, float, float]:
    """Measure one round, in a new process."""
    for _ in Sampler(10, 2).local_batches(0):  # done once
        pass
    torch.randperm(10)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    sampler = Sampler(num_samples, batch_size, data_ranks=num_ranks)
    half = sampler.steps_per_epoch // 2
    if stored:
        whole = torch.randperm(num_samples)[half * batch_size :].split(max(1, batch_size // num_ranks))
        shares = (share.tolist() for share in whole)
    else:
        shares = sampler.local_batches(0, half)
    next(shares)
    first = time.perf_counter() - start
    start = time.perf_counter()
    num_shares = sum(1 for _ in itertools.islice(shares, FOLLOWING))
    each = (time.perf_counter() - start) / max(1, num_shares)
    return first * 1e6, each * 1e6, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=200, help="of all ranks")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--stored", type=float, default=1e8)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print("       samples   order       first, us   each, us   memory, MiB")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        for size, (name, stored) in itertools.product(SIZES, (("computed", False), ("stored", True))):
            if stored and size > given.stored:
                continue
            words = [(size, given.batch_size, given.ranks, stored)] * given.rounds
            rounds = [processes.apply(measure, each) for each in words]
            first, each, memory = (min(numbers) for numbers in zip(*rounds, strict=True))
            print(f"{size:14,}   {name:8} {first:12,.0f} {each:10.1f} {memory:13.1f}", flush=True)


if __name__ == "__main__":
    main()
