"""The facts on which a run's results depend besides its configuration: state of the code, versions, and machine."""

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner import __version__
from runner.paths import ROOT
from runner.records.code_copy import running_copy

DIFF = "git.diff"
MAX_DIFF_BYTES = 1 << 20
TIMEOUT_S = 10
# Options with which `git apply` accepts the diff, whatever the user's configuration is.
PLAIN = ("--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")


def custom_repositories(directories: Iterable[str | Path]) -> dict[str, dict[str, Any]]:
    """Return the states of the repositories that contain the directories, by path, without the runner's repository."""
    if copy := running_copy():
        return copy[1].repositories
    tops = {_git(Path(directory), "rev-parse", "--show-toplevel") for directory in directories}
    tops.discard(_git(ROOT, "rev-parse", "--show-toplevel"))
    return {top.strip(): _state(Path(top.strip())) for top in sorted(filter(None, tops))}


def diff_name(repository: str) -> str:
    """Return the name of the file with the uncommitted changes of a custom repository."""
    name = re.sub(r"[^A-Za-z0-9._-]+", ".", Path(repository).name)
    return f"git-{name}-{hashlib.sha256(repository.encode()).hexdigest()[:6]}.diff"  # names may be equal


def versions() -> dict[str, str]:
    """Return the versions of the runner, of Python and of the packages that compute."""
    from importlib.metadata import version  # takes 12 ms, which --help does not need

    packages = ("torch", "torchvision", "hydra-core", "omegaconf")
    own = {"experiment-runner": __version__, "python": platform.python_version()}
    return own | {package: version(package) for package in packages}


def machine() -> dict[str, Any]:
    """Return the properties of the machine that affect rounding: processor, number of threads, GPUs."""
    import torch  # not at the top, because --help does not need it

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(n) for n in range(num_gpus)],
    }


def git_state() -> dict[str, Any]:
    """Return the commit of the runner's repository, or else the working directory's, and whether it has changes."""
    if copy := running_copy():
        return copy[1].git
    return _state(_repository())


def _state(directory: Path) -> dict[str, Any]:
    commit, changes = _git(directory, "rev-parse", "HEAD"), _git(directory, "status", "--porcelain")
    if commit is None or changes is None:
        return {"commit": None, "dirty": None}
    return {"commit": commit.strip(), "dirty": bool(changes)}


def git_diff(repository: str | None = None) -> str:
    """Return the names of untracked files and a diff for `git apply`, by default of the repository of `git_state`."""
    if copy := running_copy():
        file = copy[0] / (DIFF if repository is None else diff_name(repository))
        return file.read_text() if file.exists() else ""
    directory = _repository() if repository is None else Path(repository)
    new = _git(directory, "ls-files", "--others", "--exclude-standard")
    diff = _git(directory, "diff", *PLAIN, "--binary", "HEAD")
    if new is None or diff is None:
        return ""
    text = "".join(f"new file, not in this diff: {name}\n" for name in new.splitlines()) + diff
    content = text.encode()
    if len(content) <= MAX_DIFF_BYTES:
        return text
    return content[:MAX_DIFF_BYTES].decode(errors="ignore") + "\ntruncated here\n"


def uncommitted_changes(git: Mapping[str, Any], repositories: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the diffs of the repository of `git_state` and of custom ones, by file name; None without changes."""
    diffs = {DIFF: git_diff() if git["dirty"] else None}
    for path, state in repositories.items():
        diffs[diff_name(path)] = git_diff(path) if state["dirty"] else None
    return diffs


def _repository() -> Path:
    """Return the runner's directory if it is in a repository, else the working directory."""
    return ROOT if _git(ROOT, "rev-parse", "HEAD") is not None else Path.cwd()


def _git(directory: Path, *arguments: str) -> str | None:
    """Return git's output; None if it fails, for example because the directory is in no repository."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(directory), *arguments]
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=True)
        return done.stdout.decode(errors="replace")
    return None


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"
