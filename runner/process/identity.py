"""What identifies a process and the machine that it runs on, on Linux."""

import os
from pathlib import Path


def machine_id() -> str:
    """Return an identifier of this boot of the machine and of the PID namespace, within which PIDs are unique."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def process_start(pid: int) -> int | None:
    """Return when the process started, which identifies it if its PID is reused; None if it has exited."""
    return process_state(pid)[1]


def process_state(pid: int) -> tuple[str, int | None]:
    """Return the state of a process and its start in clock ticks since boot; None if it has exited."""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", None
    return state, None if state in "ZX" else int(others[18])  # field 22 of proc(5)
