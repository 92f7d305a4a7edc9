"""Count of the bytes that a rank exchanges, by collective."""

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
KINDS = sorted({*_NAMES.values(), RPC})  # under which bytes are counted
_entered: list["CommunicationCounter"] = []
_lock = threading.Lock()  # exchanges may run in threads


class CommunicationCounter(TorchDispatchMode):
    """A context that counts the bytes of this rank's collectives: of each call, the larger of its input and output.

    Every collective of a process group passes the dispatcher, also those that DDP calls from C++. A point-to-point
    message is counted by its sender. Exchanges without a process group call `count` or `count_tensors`.
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
    """Count bytes that were exchanged without a process group, in any thread. kind: one of KINDS."""
    if not _entered:
        return
    with _lock:
        for counter in _entered:
            counter.bytes[kind] += num_bytes


def count_tensors(kind: str, *values: Any) -> None:
    """Count the tensors in these pytrees as sent or received by this rank. kind: one of KINDS."""
    if _entered:
        count(kind, _size(values))


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
