"""The time of a sum over the ranks of one machine: with gloo's all_reduce and with the runner's exchange, interleaved.

usage: python benchmarks/exchanges.py [--ranks 2 4] [--bytes 256 4096 25000000] [--rounds 5] [--repeats 200]
Each round times `repeats` exchanges of each kind (fewer of large ones), in processes that do nothing else. The last row
is the vote of a step, from its start to its result.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from process_group import process_group

from runner.distributed.collectives import sum_over
from runner.distributed.local.exchange import LocalExchange

FULL = 65_536  # larger exchanges are repeated less often


def kinds(exchange: LocalExchange, num_bytes: int) -> dict[str, Callable[[], object]]:
    """Return the timed functions for a number of bytes, by name; a vote for 0 bytes."""
    if num_bytes == 0:
        votes = torch.zeros(2, dtype=torch.int32)
        return {
            "gloo": lambda: dist.all_reduce(votes, op=dist.ReduceOp.MAX, async_op=True).wait(),  # type: ignore[union-attr]
            "runner": lambda: exchange.any_of_async([False, False])(),
        }
    tensor = torch.zeros(num_bytes // 4)
    return {"gloo": lambda: dist.all_reduce(tensor), "runner": lambda: sum_over(None, tensor)}


def measure(rank: int, world_size: int, store: str, sizes: list[int], rounds: int, repeats: int) -> None:
    """Print a row for each size on rank 0."""
    with process_group(rank, world_size, store) as exchange:
        for num_bytes in [*sizes, 0]:
            seconds: dict[str, list[float]] = {}
            number = max(10, min(repeats, repeats * FULL // max(num_bytes, 1)))
            for _ in range(rounds):
                for name, act in kinds(exchange, num_bytes).items():
                    for _ in range(number // 10):
                        act()
                    for _ in range(number):
                        start = time.perf_counter()
                        act()
                        seconds.setdefault(name, []).append(time.perf_counter() - start)
            if rank == 0:
                best = {name: 1e6 * min(taken) for name, taken in seconds.items()}
                median = {name: 1e6 * statistics.median(taken) for name, taken in seconds.items()}
                cells = [f"{best[name]:6,.0f} | {median[name]:6,.0f}" for name in seconds]
                what = f"{num_bytes:,} B" if num_bytes else "vote"
                ratio = median["gloo"] / median["runner"]
                print(f"| {world_size} | {what:>8} | {' | '.join(cells)} | {ratio:5.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bytes", type=int, nargs="+", default=[256, 4096, 65_536, 1_000_000, 25_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    print(f"microseconds, n={args.rounds * args.repeats}, fewer above {FULL:,} bytes\n")
    print("| ranks | exchange | gloo, best | median | runner, best | median | gloo / runner, of the medians |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for num_ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            options = (num_ranks, f"{folder}/store", args.bytes, args.rounds, args.repeats)
            mp.spawn(measure, options, nprocs=num_ranks)


if __name__ == "__main__":
    main()
