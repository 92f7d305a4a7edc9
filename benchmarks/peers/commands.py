"""The command of each peer, the packages that it needs, and a measured run."""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from peers.meter import DEVICE, FIGURES, STARTED
from peers.works import ALL_WORKS, Work

PEERS_FOLDER = Path(__file__).resolve().parent
ROOT = PEERS_FOLDER.parent.parent
BASELINE, RUNNER = "hand-written", "runner"
SCRIPTS = {
    BASELINE: "hand_written.py",
    "limit": "limit.py",
    "lightning": "with_lightning.py",
    "fabric": "with_fabric.py",
    "accelerate": "with_accelerate.py",
    "ignite": "with_ignite.py",
}
STARTS_ITS_RANKS = ("lightning", "fabric")
# The pip package of each import.
NEEDS = {
    "lightning": ("lightning", "lightning"),
    "fabric": ("lightning", "lightning"),
    "accelerate": ("accelerate", "accelerate"),
    "ignite": ("ignite", "pytorch-ignite"),
}
PEERS = (BASELINE, "limit", RUNNER, "lightning", "fabric", "accelerate", "ignite")
TIMEOUT_S = 300
TORCHRUN_REPORT = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic", re.MULTILINE)
ENDING_S = 45  # torchrun waits 30 s for its ranks


class CommandFailed(Exception):
    """A measured command failed or did not end in time."""


@dataclass(frozen=True)
class Place:
    """The directories of all commands of a suite."""

    data: Path  # directory of the MNIST-format files
    scratch: Path  # removed at the end


def missing(peers: list[str]) -> dict[str, str]:
    """Return the missing peers by name, with the command that installs each."""
    needed = {peer: NEEDS[peer] for peer in peers if peer in NEEDS}
    return {
        peer: f"pip install {package}"
        for peer, (module, package) in needed.items()
        if importlib.util.find_spec(module) is None
    }


def command(peer: str, work: str, num_ranks: int, steps: int, place: Place) -> list[str]:
    """Return the command of a peer: a plain script, or torchrun for several processes."""
    if num_ranks > 1 and peer not in STARTS_ITS_RANKS:
        python = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    else:
        python = [sys.executable]
    if peer.partition(" ")[0] == RUNNER:
        words = runner_words(ALL_WORKS[work], num_ranks, steps, place)
        return [*python, "-m", "runner", *words, *shlex.split(peer)[1:]]
    words = [str(PEERS_FOLDER / SCRIPTS[peer]), work, str(place.data), str(steps)]
    return [*python, *words, *([str(num_ranks)] if peer in STARTS_ITS_RANKS else [])]


def runner_words(work: Work, num_ranks: int, steps: int, place: Place) -> list[str]:
    """Return the runner's overrides for the same workload."""
    words = [f"--config-dir={PEERS_FOLDER}", "callbacks=meter", f"callbacks.meter.warmup_steps={work.warmup_of(steps)}"]
    words += [f"model={work.model_name}", f"data={work.data.name}", f"batch_size={work.batch_size}", "epochs=1"]
    words += [f"max_steps={steps}", f"eval_batches={work.eval_batches}", f"outputs={place.scratch}/outputs"]
    words += [f"parallel={'ddp' if num_ranks > 1 else 'none'}", f"optimizer={work.optimizer.lower()}"]
    words += [f"optimizer.{option}={value}" for option, value in work.options.items()]
    words += [f"model.{option}={value}" for option, value in work.model_options.items()]
    words += [f"data.sample_shape=[{','.join(map(str, work.data.sample_shape))}]"] if work.data.name == "text" else []
    return [*words, f"data.root={place.data}"] if work.data.name == "mnist" else words


def measure(words: list[str], place: Place) -> dict[str, float]:
    """Return the figures of one command, with one thread per rank. Raise CommandFailed if it fails."""
    path, temporary = place.scratch / "figures.json", place.scratch / "tmp"
    path.unlink(missing_ok=True)
    for folder in (temporary, place.scratch / "outputs"):  # outputs of the previous command
        shutil.rmtree(folder, ignore_errors=True)
    temporary.mkdir()
    own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), FIGURES: str(path)}
    if DEVICE == "cpu":
        own["CUDA_VISIBLE_DEVICES"] = ""
    searched = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **own, "PYTHONPATH": os.pathsep.join(searched)}
    started = time.time()
    done = _run(words, {**environment, STARTED: repr(started)})
    ended = time.time()
    if done.returncode or not path.exists():
        raise CommandFailed(f"status {done.returncode}: {_reason(done.stderr or done.stdout)}")
    figures: dict[str, float | None] = json.loads(path.read_text())
    last_step_at = figures.pop("last_step_at")
    assert last_step_at is not None
    measured = {name: value for name, value in figures.items() if value is not None}
    return {**measured, "command_s": ended - started, "after_last_step_s": ended - last_step_at}


def _reason(said: str) -> str:
    """Return the last line before torchrun's report."""
    lines = [line.strip() for line in TORCHRUN_REPORT.split(said, maxsplit=1)[0].splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _run(words: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the command, and kill its process group at its end or after the time limit."""
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except BaseException as error:  # Ctrl-C too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(
                process.pid, signal.SIGTERM
            )  # torchrun then terminates its ranks, which would continue if it were killed
        try:
            process.communicate(timeout=ENDING_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise CommandFailed(f"still ran after {TIMEOUT_S} s") from None
        raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)
