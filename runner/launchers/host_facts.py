"""The facts of a machine that is to run ranks: python -m runner.launchers.host_facts FILE prints them in JSON."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from runner.process.cores import allowed_cores
from runner.records.provenance import versions


@dataclass(frozen=True)
class HostFacts:
    """The facts of one machine. `versions` and `code` must be equal on all of them."""

    versions: dict[str, str]
    code: str  # a hash of the runner's own modules
    sees_file: bool  # the machine sees the file that the starter has created among the outputs
    num_gpus: int
    cores: list[int]  # that processes may use
    address: str  # by which the starter has reached the machine
    port: int  # a free one


def find_facts(shared: Path) -> HostFacts:
    address = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    return HostFacts(
        versions(),
        _hash_code(),
        shared.exists(),
        _count_gpus(),
        sorted(allowed_cores()),
        address[0] if address else "",
        port,
    )


def read_facts(status: int, output: str, errors: str) -> HostFacts | str:
    """Return the facts that this module has printed on a machine, or why there are none."""
    if status:
        return _last_line(errors)
    try:
        return HostFacts(**json.loads(_last_line(output)))
    except (TypeError, ValueError):  # another version of the runner, or a message of a login script
        return f"unexpected answer: {_last_line(output)}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no response"


def _hash_code() -> str:
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _count_gpus() -> int:
    """Return the number of NVIDIA GPUs, without importing torch, which takes seconds."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


if __name__ == "__main__":
    print(json.dumps(asdict(find_facts(Path(sys.argv[1])))))
