"""Count of the bytes that a rank exchanges, by collective."""

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

RPC = "rpc"
KINDS = (  # the collectives by which bytes are counted
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    RPC,
    "scatter",
    "send",
)
# A global, as torch's dispatch modes are; those are per thread, but all threads count here.
_entered: list["CommunicationCounter"] = []
_lock = threading.Lock()  # exchanges may run in threads


class CommunicationCounter(TorchDispatchMode):
    """A context that counts the bytes of this rank's collectives: of each call, the larger of its input and output.

    Every collective of a process group passes through the dispatcher, also those that DDP calls from C++. The sender
    counts a point-to-point message. Exchanges without a process group call `count` or `count_tensors`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def add(self, kind: str, num_bytes: int, group: Any = None, peer: int | None = None) -> None:
        """Count a message. group: as an operator's argument. peer: the rank in the group that receives the message."""
        self.bytes[kind] += num_bytes

    def __enter__(self) -> Self:
        _entered.append(self)
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        _entered.remove(self)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_wrapper(types):
            return NotImplemented  # it calls this mode again, with its inner tensors and its own collectives
        result = function(*args, **(kwargs or {}))
        if "c10d" in function.namespace and (kind := _kind(function.__name__)):
            schema = [argument.name for argument in function._schema.arguments]
            arguments = dict(zip(schema, args, strict=False))
            outputs = [value for key, value in arguments.items() if key.startswith("output")]
            inputs = [value for key, value in arguments.items() if not key.startswith("output")]
            if "functional" in function.namespace:
                outputs = [result]
            group = arguments.get("process_group", arguments.get("group_name"))
            self.add(kind, max(_size(inputs), _size(outputs)), group, arguments.get("dst"))
        return result


def has_wrapper(types: Iterable[type]) -> bool:
    """Return True if one of the classes wraps other tensors and computes with these, as DTensor does."""
    return any(map(is_traceable_wrapper_subclass_type, types))


def count(kind: str, num_bytes: int) -> None:
    """Count bytes that were exchanged without a process group, in any thread. kind: one of KINDS."""
    if not _entered:
        return
    with _lock:
        for counter in _entered:
            counter.add(kind, num_bytes)


def count_tensors(kind: str, *values: Any) -> None:
    """Count the tensors in these pytrees as sent or received by this rank. kind: one of KINDS."""
    if _entered:
        count(kind, _size(values))


def _kind(function: str) -> str | None:
    """Return the collective of an operator, whose name may have other underscores: allreduce_, _allgather_base_."""
    name = function.split(".")[0].replace("_", "")
    return max((kind for kind in KINDS if name.startswith(kind.replace("_", ""))), key=len, default=None)


def _size(values: Any) -> int:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
