"""How much memory this process may still use: of the machine, and of the control groups that it is in."""

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MEMINFO, OWN_GROUPS, GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def memory_left() -> float:
    """Bytes; infinite where the system does not say."""
    return min([*_of_machine(), *_of_groups()], default=math.inf)


def _of_machine() -> Iterator[int]:
    with suppress(OSError):
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


def _of_groups() -> Iterator[int]:
    """Of each group that has a limit: this process's own and those around it (cgroups(7); versions 2 and 1)."""
    with suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                top, names = GROUPS, ("memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                top, names = GROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            else:
                continue
            own = Path(path.lstrip("/"))
            for group in (own, *own.parents):  # in a container the path may be the host's: what is there counts
                with suppress(OSError, ValueError):  # "max" is no limit
                    limit, used = (int((top / group / name).read_text()) for name in names)
                    yield max(0, limit - used)
