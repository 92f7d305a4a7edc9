"""Check and measure training on one GPU, and print a short table.

usage: python benchmarks/gpu.py [--minutes 10] [--work convnet-512,gpt-124m] [--variant bf16] [--rounds 5] [--steps N]
           [--root DIR] [--no-checks | --check-jobs] [--settings]

It first runs the tests that need a GPU, and with --check-jobs those of jobs in all modes, resumes, averages,
accumulation and precisions (`pytest --device cuda`), whose ranks share the GPU. Then, round after round until the time
is over, it measures a hand-written loop, the runner and the limit, which is the same step in a CUDA graph on batches in
the memory of the GPU. Each workload is measured in fp32, with cuda_graph=true, in bf16, and in bf16 with a compiled
model. `mfu` is the runner's perf/mfu.
With --settings it measures the runner with its default settings and with one of them changed instead, in fp32 and bf16.
Without a GPU it measures the workload convnet of the suite on the CPU, to test this script.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

ON_GPU = torch.cuda.is_available()
os.environ.setdefault("BENCHMARK_DEVICE", "cuda" if ON_GPU else "cpu")  # read when `peers` is imported

from page import facts  # noqa: E402
from peers.commands import BASELINE, ROOT, RUNNER, CommandFailed, Place, command, measure  # noqa: E402
from peers.works import ALL_WORKS, GPU_WORKS, MNIST  # noqa: E402

LIMIT, DEFAULTS = "limit", "defaults"
ALLOCATOR = "PYTORCH_ALLOC_CONF"
COMMANDS = (BASELINE, RUNNER, LIMIT)
# By name: the environment of the scripts, and the runner's overrides.
VARIANTS = {
    "fp32": ({"BENCHMARK_PRECISION": "fp32", "BENCHMARK_COMPILED": "0"}, ""),
    "graph": ({"BENCHMARK_PRECISION": "fp32", "BENCHMARK_COMPILED": "0"}, " cuda_graph=true"),
    "bf16": ({"BENCHMARK_PRECISION": "bf16", "BENCHMARK_COMPILED": "0"}, " precision=bf16"),
    "compiled": ({"BENCHMARK_PRECISION": "bf16", "BENCHMARK_COMPILED": "1"}, " precision=bf16 compile=true"),
}
OF_GPUS = ("-m", "gpu", "-n", "0", "tests/commands/test_gpu.py")
OF_JOBS = (
    *("-n", "4", "tests/parallel/test_parity.py", "tests/checkpoints/test_resume.py", "tests/parallel/test_ema.py"),
    *("tests/training/test_trainer.py", "tests/parallel/test_fsdp.py", "tests/parallel/test_objective_values.py"),
    *("tests/input/test_device_samples.py", "tests/training/test_nan_guard.py"),
    *("tests/training/test_replay.py", "tests/parallel/test_special_parameters.py"),
)
# Changes of the runner's default settings: overrides, or variables of the environment.
SETTINGS = {
    "fp32": ["tf32=true", "tf32=false", "cudnn_benchmark=true", "memory_format=contiguous", "cuda_graph=true"],
    "bf16": [
        *("cudnn_benchmark=true", "memory_format=contiguous", "+optimizer.fused=true", "optimizer.fused=false"),
        *("keep_samples=device", "loader.pin_memory=false", "loader.num_workers=2", "clip_grad_norm=1.0"),
        *("cuda_graph=true", "cuda_graph=true keep_samples=device"),
        f"{ALLOCATOR}=expandable_segments:True",
    ],
}
ON_CPU = ["keep_samples=device", "memory_format=contiguous"]
Figures = dict[tuple[str, str, str], list[float]]  # samples/s and mfu of each round, by workload, variant and command


def check(limit_s: float, tests: Sequence[str]) -> str:
    """Run tests on the GPU, and return pytest's last line."""
    words = [sys.executable, "-m", "pytest", "-q", "--device", "cuda", *tests]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"the tests were still running after {limit_s:.0f} s"
    print(done.stdout, file=sys.stderr)
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip()[-200:]


def measure_all(given: argparse.Namespace, place: Place, end: float) -> tuple[Figures, list[str]]:
    """Measure all commands in turn until the time is over. Return the figures, and the errors of failed commands."""
    figures: Figures = defaultdict(list)
    failures, took = list[str](), dict[tuple[str, str, str], float]()
    cells = [(work, variant, peer) for work in given.work for variant in given.variant for peer in COMMANDS]
    for _ in range(given.rounds):
        for work, variant, peer in cells:
            start = time.monotonic()
            if start + took.get((work, variant, peer), 0.0) >= end:
                continue
            environment, overrides = VARIANTS[variant]
            os.environ.update(environment)
            words = command(peer + overrides * (peer == RUNNER), work, 1, given.steps or ALL_WORKS[work].steps, place)
            try:
                figures[work, variant, peer].append(measure(words, place)["samples_per_second"])
                if peer == RUNNER and (mfu := _mfu(place)) is not None:
                    figures[work, variant, "mfu"].append(mfu)
            except CommandFailed as error:
                failures.append(f"{work}, {variant}, {peer}: {error}")
            took[work, variant, peer] = time.monotonic() - start
            print(f"{work}, {variant}, {peer}: {took[work, variant, peer]:.1f} s", file=sys.stderr)
    return figures, failures


def settings_of(work: str, variant: str) -> list[str]:
    """Return the changed settings that have an effect on a workload."""
    found = SETTINGS.get(variant, []) if ON_GPU else ON_CPU * (variant == "fp32")
    convolves, is_sgd = work.startswith(("convnet", "resnet18")), ALL_WORKS[work].optimizer == "SGD"
    unused = {"optimizer.fused=false" if is_sgd else "+optimizer.fused=true"}
    unused |= set() if convolves else {"cudnn_benchmark=true", "memory_format=contiguous"}
    return [setting for setting in found if setting not in unused]


def measure_settings(given: argparse.Namespace, place: Place, end: float) -> tuple[Figures, list[str]]:
    """Measure the runner with default and with changed settings in turn. Return the figures, and the errors."""
    figures: Figures = defaultdict(list)
    failures, longest = list[str](), 0.0
    cells = [(work, variant) for work in given.work for variant in given.variant if settings_of(work, variant)]
    for _ in range(given.rounds):
        for work, variant in cells:
            for setting in (DEFAULTS, *settings_of(work, variant)):
                start = time.monotonic()
                if start + longest >= end:
                    return figures, failures
                is_variable = setting.startswith(ALLOCATOR)
                os.environ |= {ALLOCATOR: setting.partition("=")[2]} if is_variable else {}
                changes = "" if is_variable or setting == DEFAULTS else f" {setting}"
                peer = RUNNER + VARIANTS[variant][1] + changes
                words = command(peer, work, 1, given.steps or ALL_WORKS[work].steps, place)
                try:
                    figures[work, variant, setting].append(measure(words, place)["samples_per_second"])
                except CommandFailed as error:
                    failures.append(f"{work}, {variant}, {setting}: {error}")
                if is_variable:
                    del os.environ[ALLOCATOR]
                longest = max(longest, time.monotonic() - start)
    return figures, failures


def render_settings(figures: Figures) -> str:
    """Return a table with the best and the median round of each setting, in samples/s, and the ratio to the defaults.

    The ratio is the median of those of the rounds.
    """
    lines = ["| workload | variant | setting | best | median | median / defaults | rounds |", "|---" * 7 + "|"]
    for (work, variant, setting), rates in figures.items():
        defaults = figures[work, variant, DEFAULTS]
        ratios = [rate / default for rate, default in zip(rates, defaults, strict=False)]
        cells = [f"{max(rates):,.0f}", f"{median(rates):,.0f}", f"{median(ratios):.3f}", str(len(rates))]
        lines.append(f"| {' | '.join([work, variant, f'`{setting}`', *cells])} |")
    return "\n".join(lines)


def _mfu(place: Place) -> float | None:
    (result,) = (place.scratch / "outputs").glob("*/*/result.json")
    mfu: float | None = json.loads(result.read_text())["mfu"]
    return mfu


def render(figures: Figures, works: Sequence[str], variants: Sequence[str]) -> str:
    """Return a table with the best round of each command, in samples/s, and the runner's ratio to the others."""
    lines = [f"| workload | variant | {BASELINE} | {RUNNER} | {LIMIT} | / {BASELINE} | / {LIMIT} | mfu | rounds |"]
    lines.append("|---" * 9 + "|")
    for work in works:
        for variant in variants:
            best = {name: max(figures[work, variant, name], default=0.0) for name in (*COMMANDS, "mfu")}
            speeds = [f"{best[name]:,.0f}" if best[name] else "-" for name in COMMANDS]
            ratios = [f"{best[RUNNER] / best[name]:.2f}" if best[name] else "-" for name in (BASELINE, LIMIT)]
            mfu = f"{best['mfu']:.3f}" if best["mfu"] else "-"
            cells = [work, variant, *speeds, *ratios, mfu, str(len(figures[work, variant, RUNNER]))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """Parse the command line. Exit with status 2 if a value is invalid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="start no command that would end later")
    parser.add_argument("--work", type=lambda words: words.split(","), help=", ".join(ALL_WORKS))
    parser.add_argument("--variant", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--steps", type=int, help="optimizer steps of every command; default: those of the workload")
    parser.add_argument("--root", type=Path, help="directory of MNIST-format files; default: a temporary one")
    checks = parser.add_mutually_exclusive_group()
    checks.add_argument("--no-checks", action="store_true", help="do not run the tests")
    checks.add_argument("--check-jobs", action="store_true", help="run also tests of jobs that CI runs on a CPU")
    parser.add_argument("--settings", action="store_true", help="compare the runner's default settings with others")
    given = parser.parse_args()
    given.work = given.work or (list(GPU_WORKS) if ON_GPU else ["convnet"])
    for work in given.work:
        if work not in ALL_WORKS:
            parser.error(f"--work={work} must be one of {', '.join(ALL_WORKS)}")
        most = ALL_WORKS[work].steps_per_epoch
        if given.steps is not None and not 2 <= given.steps <= most:
            parser.error(f"--steps={given.steps} must be at least 2 and at most {most}, an epoch of {work}")
    return given


def main() -> int:
    given, load = arguments(), os.getloadavg()[0]
    end = time.monotonic() + 60 * given.minutes
    checks = "checks: no GPU" if not ON_GPU else "checks: skipped"
    if ON_GPU and not given.no_checks:
        checks = f"checks: {check(60 * given.minutes / 2, OF_GPUS)}"
    if ON_GPU and given.check_jobs:
        checks += f"; of jobs: {check(max(60.0, end - time.monotonic() - 60), OF_JOBS)}"
    with tempfile.TemporaryDirectory() as scratch:
        place = Place(given.root.resolve() if given.root else Path(scratch, "data"), Path(scratch))
        if any(ALL_WORKS[work].data is MNIST for work in given.work) and not (place.data / "MNIST").exists():
            subprocess.run([sys.executable, ROOT / "benchmarks" / "mnist_files.py", place.data], check=True)
        figures, failures = (measure_settings if given.settings else measure_all)(given, place, end)
    device = torch.cuda.get_device_name() if ON_GPU else "CPU"
    print(
        facts(load, [f"measured on {device}", checks, *failures]),
        render_settings(figures) if given.settings else render(figures, given.work, given.variant),
        sep="\n\n",
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
