"""How many bytes a piece of code has the ranks exchange, by collective."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NAMES = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "reduce": "reduce",
}
RPC = "rpc"
KINDS = sorted({*_NAMES.values(), RPC})  # what bytes are counted by
_entered: list["CommunicationCounter"] = []
_lock = threading.Lock()  # RPC's threads count too


class CommunicationCounter(TorchDispatchMode):
    """While entered, counts the bytes of this rank's collectives: of a call, the larger of what goes in and comes out.

    Every collective of a process group passes the dispatcher, those that DDP calls from C++ too; a receive is counted
    where it is sent. Others do not: who uses RPC tells `count_rpc`, and runner.distributed.local_exchange `count`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __enter__(self) -> "CommunicationCounter":
        _entered.append(self)
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        _entered.remove(self)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if "c10d" in function.namespace and (name := _name(function.__name__)):
            schema = [argument.name for argument in function._schema.arguments]
            given = dict(zip(schema, args, strict=False))
            outputs = [value for key, value in given.items() if key.startswith("output")]
            inputs = [value for key, value in given.items() if not key.startswith("output")]
            if "functional" in function.namespace:
                outputs = [result]
            self.bytes[name] += max(_size(inputs), _size(outputs))
        return result


def count(kind: str, num_bytes: int) -> None:
    """Count what has passed by no process group, in any thread. kind: one of KINDS."""
    if not _entered:
        return
    with _lock:
        for counter in _entered:
            counter.bytes[kind] += num_bytes


def count_rpc(*values: Any) -> None:
    """Count the tensors among the values as what RPC carries from or to this rank."""
    if _entered:
        count(RPC, _size(values))


def _name(function: str) -> str | None:
    word = function.split(".")[0].strip("_").removesuffix("_")
    found = [name for name in _NAMES if word.startswith(name)]
    return _NAMES[max(found, key=len)] if found else None


def _size(values: Any) -> int:
    if isinstance(values, torch.Tensor):
        return values.numel() * values.element_size()
    if isinstance(values, Mapping):
        return _size(values.values())
    if isinstance(values, Iterable) and not isinstance(values, str):
        return sum(_size(value) for value in values)
    return 0
