"""The facts of a machine that is to run ranks: python -m runner.launchers.host_facts FILE prints them in JSON.

FILE is among the outputs, and contains the SHA-256 of each file of custom code, by path (see `write_hashes`).
"""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

from runner.process.cores import allowed_cores
from runner.records.custom_code import shipped_hash
from runner.records.provenance import versions

SPACE_BYTES = 1 << 20  # that a machine must be able to write
IN_USE_MIB = 1024  # of a GPU's memory; a display or an idle process needs less


@dataclass(frozen=True)
class HostFacts:
    """The facts of one machine. `versions` and `code` must be equal on all of them."""

    versions: dict[str, str]
    code: str  # of `shipped_hash`
    problems: list[str]  # that keep ranks from running there
    num_gpus: int  # that processes see
    used_gpus: list[str]  # for each GPU, how much of its memory is in use; empty if it is free
    cores: list[int]  # that processes may use
    address: str  # by which the starter has reached the machine
    port: int  # a free one


def write_hashes(shared: Path, code: Iterable[Path]) -> None:
    """Write the hashes of these files, with which `find_facts` compares those of each machine."""
    try:
        shared.write_text(json.dumps({str(path): _hash_file(path) for path in code}))
    except OSError as error:  # the disk is full
        error.filename = str(shared.parent)
        raise


def find_facts(shared: Path) -> HostFacts:
    address = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    gpus = _find_gpus()
    return HostFacts(
        versions(),
        shipped_hash(),
        [*_find_problems(shared)],
        len(gpus),
        gpus,
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
    except TypeError:
        return "another version of the runner than here"
    except ValueError:  # a message of a login script
        return f"unexpected answer: {_last_line(output)}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no response"


def _find_problems(shared: Path) -> Iterator[str]:
    """Yield what keeps ranks from running here."""
    if not os.path.exists(shared):
        yield f"does not see the files in {shared.parent}; set outputs= to a shared directory"
        return
    for directory in (shared.parent, None):  # None for that of temporary files
        try:
            with tempfile.TemporaryFile(dir=directory) as file:
                file.write(bytes(SPACE_BYTES))
        except OSError as error:
            place = directory or tempfile.tempdir or "a temporary file"
            yield f"cannot write {SPACE_BYTES >> 20} MiB to {place}: {error.strerror}"
    hashes: dict[str, str | None] = json.loads(shared.read_bytes())
    if differing := [path for path, digest in hashes.items() if _hash_file(Path(path)) != digest]:
        differs = "differs from here" if os.path.exists(differing[0]) else "is missing"
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        yield f"{differing[0]} {differs}{more}; copy your code there, or use a shared directory"


def _hash_file(path: Path) -> str | None:
    """Return the SHA-256 of the file; None if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _find_gpus() -> list[str]:
    """Return for each NVIDIA GPU that processes see how much of its memory is in use; empty text if it is free.

    Without importing torch, which takes seconds.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    command = ("nvidia-smi", "--query-gpu=index,memory.used,memory.total", "--format=csv,noheader,nounits")
    listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    gpus = {}
    for index, used, total in (line.split(", ") for line in listed.splitlines() if line.count(", ") == 2):
        is_used = used.isdigit() and total.isdigit() and int(used) > IN_USE_MIB  # some GPUs have no such number
        gpus[index] = f"GPU {index} ({int(used):,} of {int(total):,} MiB)" if is_used else ""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return [*gpus.values()]
    # As CUDA does: names other than indexes are those of the GPUs, and the first invalid one ends the list.
    names = takewhile(lambda name: name in gpus or name[:1].isalpha(), map(str.strip, visible.split(",")))
    return [gpus.get(name, "") for name in names]


if __name__ == "__main__":
    print(json.dumps(asdict(find_facts(Path(sys.argv[1])))))
