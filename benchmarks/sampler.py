"""The order of an epoch against its samples: computed for each share, and drawn and stored as a whole (torch.randperm).

usage: python benchmarks/sampler.py [--batch-size N] [--ranks N] [--stored 1e8] [--rounds N]

Of one rank, in microseconds: the first share from the middle of an epoch on, as after a resume, and each of those that
follow it, the best of all rounds; and by how many MiB the process has grown. Above --stored samples nothing is stored,
8 bytes for each. For Linux: memory is the largest that a process has had.
"""

import argparse
import itertools
import multiprocessing
import resource
import time

from runner.runs.train_state import OLDER_ORDER, ORDER
from runner.training.sampler import Sampler

SIZES = [10**exponent for exponent in range(3, 11)]
FOLLOWING = 400  # shares


def measure(num_samples: int, batch_size: int, num_ranks: int, order: int) -> tuple[float, float, float]:
    """Of one round, in a process of its own."""
    for _ in Sampler(10, 2, order=order).shares(0):  # what is done once
        pass
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    sampler = Sampler(num_samples, batch_size, data_ranks=num_ranks, order=order)
    shares = sampler.shares(0, sampler.steps_per_epoch // 2)
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
        for size, (name, order) in itertools.product(SIZES, (("computed", ORDER), ("stored", OLDER_ORDER))):
            if order == OLDER_ORDER and size > given.stored:
                continue
            words = [(size, given.batch_size, given.ranks, order)] * given.rounds
            rounds = [processes.apply(measure, each) for each in words]
            first, each, memory = (min(numbers) for numbers in zip(*rounds, strict=True))
            print(f"{size:14,}   {name:8} {first:12,.0f} {each:10.1f} {memory:13.1f}", flush=True)


if __name__ == "__main__":
    main()
