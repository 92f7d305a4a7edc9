"""The seconds from kill -9 of a rank, or of the whole run, until a step is logged again.

usage: python benchmarks/recovery.py [--rounds N] [--ranks N]

Three cases, interleaved: a rank is killed and the others continue (elastic_every_steps), a rank is killed and the
launcher restarts the world (launcher=torchrun with max_restarts), and all processes are killed and a new command runs
with resume=last. ConvNet on the built-in digits, ddp over gloo, one
thread per rank. Linux only: ranks are found in /proc.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KILLED_AFTER = 25  # steps between two checkpoints
WAIT_S = 180
WORDS = (
    "model=convnet",
    "parallel=ddp",
    "threads=1",
    "logger=none",
    "epochs=1000",
    "checkpoint.every_steps=10",
    "launcher=torchrun",
    "launcher.max_restarts=3",
)


def start(outputs: Path, num_ranks: int, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "runner", *WORDS, f"launcher.nproc_per_node={num_ranks}", f"outputs={outputs}"]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*command, *words], cwd=ROOT, start_new_session=True, **silent)


def ranks_of(session: int) -> list[int]:
    """Return the ranks' processes of a command, by its session: the children of its fork server."""
    found, parents = {}, {}
    for process in (path for path in Path("/proc").iterdir() if path.name.isdigit()):
        try:
            if os.getsid(number := int(process.name)) == session:
                found[number] = b"multiprocessing.forkserver" in (process / "cmdline").read_bytes()
                parents[number] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has exited
            continue
    return [number for number, forked in found.items() if forked and found.get(parents[number])]


def metrics_of(outputs: Path) -> Path:
    return next(iter(outputs.glob("run/*/metrics.jsonl")), outputs / "none")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"nothing happened for {WAIT_S} s")
        time.sleep(0.01)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def until_training_again(path: Path, file_before: int) -> float:
    """Wait until the resumed run, which rewrites metrics.jsonl, has added a line. Return the time."""
    until(lambda: path.stat().st_ino != file_before)
    kept = lines(path)
    until(lambda: lines(path) > kept)
    return time.monotonic()


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the whole session, and wait until all its processes have exited."""
    os.killpg(process.pid, signal.SIGKILL)  # the ranks are in its group
    process.wait()
    until(lambda: not ranks_of(process.pid))


def measure_elastic(num_ranks: int) -> float:
    """Return the seconds after the loss of a rank that the others continue without."""
    with tempfile.TemporaryDirectory() as folder:
        process = start(Path(folder), num_ranks, "elastic_every_steps=1")
        try:
            until(lambda: lines(metrics_of(Path(folder))) > KILLED_AFTER)
            path, killed = metrics_of(Path(folder)), time.monotonic()
            os.kill(max(ranks_of(process.pid)), signal.SIGKILL)
            made = lines(path)
            until(lambda: lines(path) > made + 2)  # the line of the step in which it was killed may follow
            return time.monotonic() - killed
        finally:
            end(process)


def measure(num_ranks: int) -> tuple[float, float, float]:
    """Return the seconds after the loss of a rank, elastic and not, and after the loss of all processes."""
    elastic = measure_elastic(num_ranks)
    with tempfile.TemporaryDirectory() as folder:
        outputs = Path(folder)
        process = start(outputs, num_ranks)
        try:
            until(lambda: lines(metrics_of(outputs)) > KILLED_AFTER)
            path = metrics_of(outputs)
            file = path.stat().st_ino
            killed = time.monotonic()
            os.kill(max(ranks_of(process.pid)), signal.SIGKILL)
            after_rank = until_training_again(path, file) - killed
            made = lines(path)
            until(lambda: lines(path) > made + KILLED_AFTER)
        finally:
            end(process)
        file = path.stat().st_ino
        killed = time.monotonic()
        process = start(outputs, num_ranks, "resume=last")
        try:
            after_all = until_training_again(path, file) - killed
        finally:
            end(process)
    return elastic, after_rank, after_all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    measured = [measure(given.ranks) for _ in range(given.rounds)]
    for what, seconds in zip(
        ("a rank killed, the others continue", "a rank killed, restarted by its launcher", "all killed, resume=last"),
        zip(*measured, strict=True),
        strict=True,
    ):
        best, median = min(seconds), statistics.median(seconds)
        print(f"{what}: {best:.2f} s at best, {median:.2f} s in the median of {given.rounds}, on {given.ranks} ranks")


if __name__ == "__main__":
    main()
