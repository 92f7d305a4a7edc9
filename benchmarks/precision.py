"""The time of a step in each number format: forward, backward and update in one process with one thread.

usage: python benchmarks/precision.py [--work gpt,transformer,convnet] [--rounds 15] [--no-compile]
The formats are interleaved in the same process, one step each, on random data, so that other work on the machine
affects all. The ratio is that of the rates to fp32 in each round; shown are its median and quartiles. `autocast` is
bf16 with torch's attention; `fused=false` is fp32 with an unfused update (for Adam).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from peers.works import WORKS, Work, named
from random_workload import loss_of, model_of

from runner.jobs.process_tuning import keep_freed_memory
from runner.optimization.precision import Precision

CPU = torch.device("cpu")
WARMUP_STEPS = 3
Within = Callable[[], AbstractContextManager[object]]


def step_of(work: Work, within: Within, compiled: bool = False, fused: bool = True) -> Callable[[], None]:
    """Return a function that trains a new model for one step, with forward in the given context."""
    model, loss = model_of(work), loss_of(work, work.batch_size)
    if compiled:
        model.compile()
    options = {"fused": fused} if "Adam" in work.optimizer else {}
    optimizer = getattr(torch.optim, work.optimizer)(model.parameters(), **work.options, **options)

    def step() -> None:
        with within():
            share = loss(model)
        share.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ways_of(work: Work, compiles: bool) -> dict[str, Callable[[], None]]:
    """Return the formats; the first is the baseline."""
    fp32, bf16 = Precision("fp32", CPU).autocast, Precision("bf16", CPU).autocast
    ways = {"fp32": step_of(work, fp32)}
    if "Adam" in work.optimizer:
        ways["fp32 fused=false"] = step_of(work, fp32, fused=False)
    ways["autocast"] = step_of(work, lambda: torch.autocast("cpu", torch.bfloat16))
    ways["bf16"] = step_of(work, bf16)
    if compiles:
        ways |= {"fp32 compile": step_of(work, fp32, compiled=True), "bf16 compile": step_of(work, bf16, compiled=True)}
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=named, default="gpt,transformer,convnet", help=", ".join(WORKS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-compile", action="store_true", help="leave out what takes a minute to compile")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error(f"--rounds={given.rounds} must be at least 2; 15 show how much it varies")
    torch.set_num_threads(1)
    keep_freed_memory()
    print("| work | way | best, ms | median, ms | rate, x fp32 |\n|---|---|---|---|---|", flush=True)
    for work in given.work:
        ways = ways_of(WORKS[work], not given.no_compile)
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(WARMUP_STEPS + given.rounds):
            for way, step in ways.items():
                start = time.perf_counter()
                step()
                if number >= WARMUP_STEPS:
                    taken[way].append(1e3 * (time.perf_counter() - start))
        whole = next(iter(taken.values()))
        for way, ms in taken.items():
            lower, ratio, upper = statistics.quantiles([of / own for of, own in zip(whole, ms, strict=True)], n=4)
            quartiles = f"{ratio:.2f} ({lower:.2f} to {upper:.2f})"
            print(f"| {work} | {way} | {min(ms):.1f} | {statistics.median(ms):.1f} | {quartiles} |", flush=True)


if __name__ == "__main__":
    main()
