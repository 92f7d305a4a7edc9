"""The seconds lost by kill -9 of a rank, or of the whole run: until a step is done that none had done before the kill.

usage: python benchmarks/recovery.py [--rounds N] [--ranks N] [--torchft PYTHON] [--heartbeat-ms N]

Five cases, interleaved: a rank is killed and the others continue (elastic_every_steps); a rank is killed and the
launcher restarts the world (launcher=torchrun with max_restarts); all processes are killed and a new command runs with
resume=last; a rank of torchrun is killed, which restarts a hand-written script with its own checkpoints; and a process
is killed that torchft's other process continues without. The last one needs PYTHON, the interpreter of an environment
with torch and torchft. All train ConvNet on the built-in digits, ddp over gloo, one thread per rank, and save a
checkpoint every 10 steps; the kill comes 5 steps after a checkpoint. Linux only: ranks are found in /proc.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / "peers"
KILLED_AFTER = 25  # steps, of which the last 5 are not in a checkpoint
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


def start(words: Sequence[str], folder: Path, **variables: str) -> subprocess.Popen[bytes]:
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            words,
            cwd=ROOT,
            env={**os.environ, **variables},
            start_new_session=True,
            stdout=output,
            stderr=output,
        )


def start_runner(folder: Path, num_ranks: int, *words: str) -> subprocess.Popen[bytes]:
    own = (f"launcher.nproc_per_node={num_ranks}", f"outputs={folder}")
    return start([sys.executable, "-m", "runner", *WORDS, *own, *words], folder)


def descendants(process: int) -> dict[int, bytes]:
    """Return the command lines of the process and of all processes that it has started, directly or not."""
    lines, parents = {}, {}
    for path in (path for path in Path("/proc").iterdir() if path.name.isdigit()):
        try:
            lines[int(path.name)] = (path / "cmdline").read_bytes()
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has exited
            continue
    found = {process: lines.get(process, b"")}
    while more := {number: lines[number] for number in parents if number not in found and parents[number] in found}:
        found |= more
    return found


RUNNER, SCRIPT = b"multiprocessing.forkserver", b"with_checkpoints.py"  # in the command lines of ranks


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"nothing happened for {WAIT_S} s")
        time.sleep(0.01)


def steps(folder: Path) -> list[int]:
    """Return the logged steps; an incomplete line is left out."""
    for path in (*folder.glob("run/*/metrics.jsonl"), folder / "metrics.jsonl", folder / "metrics-0.jsonl"):
        if path.exists():
            lines = path.read_bytes().split(b"\n")[:-1]
            return [step for line in lines if (step := json.loads(line).get("step")) is not None]
    return []


def newest(folder: Path) -> int:
    return max(steps(folder), default=0)


def until_killable(folder: Path) -> None:
    """Wait until 5 more steps than those of the newest checkpoint are done, and some more than before."""
    least = newest(folder) + KILLED_AFTER
    until(lambda: (step := newest(folder)) >= least and step % 10 == 5)


def lost_s(folder: Path, killed: Iterable[int], restart: Callable[[], object] = lambda: None) -> float:
    """Kill processes, and return the seconds until a later step than before is done."""
    start_s = time.monotonic()
    for number in killed:
        os.kill(number, signal.SIGKILL)
    before = newest(folder)
    restart()
    until(lambda: newest(folder) > before + 1)  # the step in which a rank was killed may still be logged
    return time.monotonic() - start_s


def end(*processes: subprocess.Popen[bytes]) -> None:
    """Kill the processes and all that they have started, and wait until all have exited."""
    started = {number for process in processes if process.poll() is None for number in descendants(process.pid)}
    for number in started:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    for process in processes:
        process.wait()
    until(lambda: not any(map(is_running, started)))


def is_running(number: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def last_rank(process: int, command: bytes) -> int:
    """Return the last one of the ranks, whose parent has the same text in its command line: fork server or torchrun."""
    return max(number for number, line in descendants(process).items() if command in line)


def measure_lost_rank(folder: Path, num_ranks: int, *words: str) -> float:
    process = start_runner(folder, num_ranks, *words)
    try:
        until_killable(folder)
        return lost_s(folder, [last_rank(process.pid, RUNNER)])
    finally:
        end(process)


def measure_command(folder: Path, num_ranks: int) -> float:
    processes = [start_runner(folder, num_ranks)]

    def restart() -> None:
        processes[0].wait()
        processes.append(start_runner(folder, num_ranks, "resume=last"))

    try:
        until_killable(folder)
        return lost_s(folder, descendants(processes[0].pid), restart)
    finally:
        end(*processes)


def measure_torchrun(folder: Path, num_ranks: int) -> float:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=3"]
    words = [*torchrun, f"--nproc-per-node={num_ranks}", str(PEERS / SCRIPT.decode()), str(folder)]
    # Otherwise the restarted ranks read the addresses of the lost ones: https://github.com/pytorch/pytorch/issues/135712
    process = start(words, folder, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    try:
        until_killable(folder)
        return lost_s(folder, [last_rank(process.pid, SCRIPT)])
    finally:
        end(process)


def measure_torchft(folder: Path, num_ranks: int, python: str, heartbeat_ms: int) -> float:
    """Return the seconds lost of torchft's first process, while the last one is killed."""
    address = "127.0.0.1:29511"
    options = (f"--heartbeat_timeout_ms={heartbeat_ms}", "--join_timeout_ms=10000")
    lighthouse = [str(Path(python).parent / "torchft_lighthouse"), f"--bind={address}", "--min_replicas=1", *options]
    processes = [start(lighthouse, folder)]
    try:
        for group in range(num_ranks):
            words = [python, str(PEERS / "with_torchft.py"), str(folder), str(group), str(num_ranks)]
            processes.append(start(words, folder, TORCHFT_LIGHTHOUSE=f"http://{address}"))
        until((folder / f"metrics-{num_ranks - 1}.jsonl").exists)  # the first process may have begun alone
        until_killable(folder)
        return lost_s(folder, [processes[-1].pid])
    finally:
        end(*processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--torchft", metavar="PYTHON")
    parser.add_argument("--heartbeat-ms", type=int, default=5000, help="torchft's default is 5000")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what was started
    cases: dict[str, Callable[[Path, int], float]] = {
        "a rank killed, the others continue": lambda *given: measure_lost_rank(*given, "elastic_every_steps=1"),
        "a rank killed, restarted by its launcher": measure_lost_rank,
        "all killed, resume=last": measure_command,
        "a rank of torchrun killed, a script with checkpoints": measure_torchrun,
    }
    if given.torchft:
        name = f"a process of torchft killed, heartbeats of {given.heartbeat_ms} ms"
        cases[name] = lambda folder, ranks: measure_torchft(folder, ranks, given.torchft, given.heartbeat_ms)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(given.rounds):
        for name, measure in cases.items():
            with tempfile.TemporaryDirectory() as folder:
                seconds[name].append(measure(Path(folder), given.ranks))
            print(f"{name}: {seconds[name][-1]:.2f} s", file=sys.stderr, flush=True)
    for name, found in seconds.items():
        best, median = min(found), statistics.median(found)
        print(f"{name}: {best:.2f} s at best, {median:.2f} s in the median of {given.rounds}, on {given.ranks} ranks")


if __name__ == "__main__":
    main()
