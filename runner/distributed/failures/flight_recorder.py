"""Collectives that a GPU has not completed, from torch's flight recorder, which lists the last 2,000 with their calls.

A rank that waits for NCCL waits for its GPU, and torch raises no exception in it. After the timeout of the process
group, a thread of torch terminates the process.
"""

import pickle
import sys
import threading
import time
import traceback
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from runner.distributed.failures.hung_ranks import position_in

# The variable that sets how many collectives are recorded. 0 disables the recorder.
BUFFER = {"TORCH_FR_BUFFER_SIZE": "2000"}


class Pending(NamedTuple):
    """A collective that has not completed."""

    name: str  # for example "nccl:all_reduce"
    group: str  # the name of its process group
    shapes: list[list[int]]  # of its inputs
    called_at: str  # FILE:LINE in FUNCTION
    since_s: float


def oldest_pending(after_ns: int) -> Pending | None:
    """Return the first collective that was called after a time and has not completed. after_ns: of `time.time_ns`."""
    # A message of a batch is not tracked, but the batch is, with the name "nccl:coalesced".
    entries = (
        entry
        for entry in recorded()
        if not entry["retired"]
        and entry["time_created_ns"] > after_ns
        and (not entry["is_p2p"] or "coalesced" in entry["profiling_name"])
    )
    entry = min(entries, key=lambda entry: entry["time_created_ns"], default=None)
    if entry is None:
        return None
    calls = [(frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", [])]
    # A collective of a backward is called by a thread without Python frames.
    called_at = position_in(calls) or position_in(_main_thread())
    name, (_, group) = entry["profiling_name"], entry["process_group"]
    return Pending(name, group, entry["input_sizes"], called_at, (time.time_ns() - entry["time_created_ns"]) / 1e9)


def recorded() -> list[dict[str, Any]]:
    """Return the recorded collectives of NCCL; none for gloo, where a wait raises an exception after the timeout."""
    if not dist.is_initialized() or "nccl" not in dist.get_backend_config():
        return []
    c10d: Any = torch._C._distributed_c10d
    return list(pickle.loads(c10d._dump_nccl_trace())["entries"])


def _main_thread() -> list[tuple[str, int, str]]:
    """Return the calls of the main thread, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return [(each.f_code.co_filename, line, each.f_code.co_name) for each, line in traceback.walk_stack(frame)]
