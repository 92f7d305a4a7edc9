"""What a run's numbers depend on besides its configuration: the code's state, the versions, the machine."""

import os
import platform
import socket
import subprocess
from pathlib import Path
from typing import Any

from runner import ROOT, __version__
from runner.runs.code_state import FACTS, copy_that_runs, read_state

DIFF = "git.diff"
MAX_DIFF_BYTES = 1 << 20
TIMEOUT_S = 10
# Whatever the user's own settings are, this is what `git apply` takes.
PLAIN = ("--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")


def versions() -> dict[str, str]:
    """Of the runner, of Python and of the packages that compute."""
    from importlib.metadata import PackageNotFoundError, version  # 12 ms that --help does without

    found = {"experiment-runner": __version__, "python": platform.python_version()}
    for package in ("torch", "torchvision", "hydra-core", "omegaconf"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """What the last bits of a float depend on: the processor, the threads that share a sum, the GPU."""
    import torch  # whoever runs a job has it by now

    gpus = (
        [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
    }


def git_state() -> dict[str, Any]:
    """Commit and state of the repository that the runner's code is in, or else the working directory.

    Of code that was kept for a job, those at the time.
    """
    if copy := copy_that_runs():
        return read_state(copy / FACTS).git
    for folder in (ROOT, Path.cwd()):
        try:
            commit = _git_says(folder, "rev-parse", "HEAD").strip()
            return {"commit": commit, "dirty": bool(_git_says(folder, "status", "--porcelain"))}
        except (OSError, subprocess.SubprocessError):
            continue
    return {"commit": None, "dirty": None}


def git_diff() -> str:
    """What `git apply` makes of the commit; new files are named above it, and a very long one is cut."""
    if copy := copy_that_runs():
        return (copy / DIFF).read_text() if (copy / DIFF).exists() else ""
    for folder in (ROOT, Path.cwd()):
        try:
            new = _git_says(folder, "ls-files", "--others", "--exclude-standard").splitlines()
            diff = _git_says(folder, "diff", *PLAIN, "--binary", "HEAD")
        except (OSError, subprocess.SubprocessError):
            continue
        text = "".join(f"new file, not in this diff: {name}\n" for name in new) + diff
        if len(text.encode()) <= MAX_DIFF_BYTES:
            return text
        kept = text.encode()[:MAX_DIFF_BYTES].decode(errors="ignore")
        return f"{kept}\ncut here: the whole diff has {len(text.encode()):,} bytes\n"
    return ""


def _git_says(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=True)
    return done.stdout.decode(errors="replace")


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"
