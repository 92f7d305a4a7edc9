"""The events of a rank in a step, in order: operators with the shapes of their arguments, and messages."""

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from runner.distributed.traffic import CommunicationCounter

# Returns the device of a fake tensor, several times for each operator. A real rank does not call it.
DEVICE_QUERY = torch.ops.prim.device.default


class Shape(NamedTuple):
    """A tensor argument of an operator."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def extent(self) -> int:
        """The number of elements from the first to the last one in memory."""
        return (
            1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True)) if 0 not in self.size else 0
        )

    @property
    def num_bytes(self) -> int:
        """The bytes that the tensor occupies; an expanded dim occupies none."""
        counts = (n if step else 1 for n, step in zip(self.size, self.stride, strict=True))
        return functools.reduce(int.__mul__, counts, self.dtype.itemsize)


@dataclass(frozen=True)
class Operator:
    """A call of an operator of torch; calls with equal arguments, except for values of tensors, are equal."""

    function: Any
    leaves: tuple[Any, ...]  # of (args, kwargs); a Shape for each tensor
    outputs: tuple[Any, ...]  # a Shape for each tensor
    structure: TreeSpec = field(compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Name the function, because torch cannot pickle it."""
        name, overload = self.function._schema.name, self.function._schema.overload_name or "default"
        return _named_operator, (name, overload, self.leaves, self.outputs, self.structure)

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of the arguments and of the results."""
        return [leaf for leaf in (*self.leaves, *self.outputs) if isinstance(leaf, Shape)]

    def arguments(self, make: Any) -> tuple[Any, dict[str, Any]]:
        """Return args and kwargs, with tensors that `make` creates from their shapes."""
        leaves = [make(leaf) if isinstance(leaf, Shape) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.structure)
        return args, kwargs


def _named_operator(name: str, overload: str, *fields: Any) -> Operator:
    namespace, _, name = name.partition("::")
    return Operator(getattr(getattr(getattr(torch.ops, namespace), name), overload), *fields)


@dataclass(frozen=True)
class Message:
    """A collective of the ranks of a group, or a message to or from one rank."""

    kind: str  # one of runner.distributed.traffic.KINDS, or `receive`
    num_bytes: int  # the larger of input and output
    ranks: int  # the number of participating ranks
    span: tuple[int, int]  # the lowest and the highest participating rank
    peer: int | None = None  # the other rank of a send or receive
    uses_group: bool = False  # True for a message of torch's process group, False for shared memory or RPC


class Timeline(CommunicationCounter):
    """A context that records the operators and messages of this rank, and counts the bytes that it exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Counter[Operator] | Message] = [Counter()]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is DEVICE_QUERY:
            return args[0].fake_device
        if (result := super().__torch_dispatch__(function, types, args, kwargs)) is NotImplemented:
            return result
        if "c10d" not in function.namespace:
            operators = self.events[-1]
            assert isinstance(operators, Counter)
            leaves, structure = tree_flatten((args, kwargs or {}))
            results = [result] if isinstance(result, torch.Tensor) else tree_flatten(result)[0]
            outputs = tuple(map(_shape, results))
            operators[Operator(function, tuple(map(_shape, leaves)), outputs, structure)] += 1
        elif function.__name__.startswith("recv"):
            group = dist.ProcessGroup.unbox(args[1])
            self._append("receive", sum(t.nbytes for t in args[0]), group, args[2])
        return result

    def add(self, kind: str, num_bytes: int, group: Any = None, peer: int | None = None) -> None:
        super().add(kind, num_bytes, group, peer)
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        elif isinstance(group, str):  # the group's name in a functional collective, before torch 2.14
            group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
        self._append(kind, num_bytes, group, peer)

    def _append(self, kind: str, num_bytes: int, group: Any, peer: int | None) -> None:
        ranks = dist.get_process_group_ranks(group)
        if peer is not None:
            peer = ranks[peer]
        message = Message(kind, num_bytes, len(ranks), (min(ranks), max(ranks)), peer, uses_group=group is not None)
        self.events += [message, Counter()]


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        stride = tuple(leaf.stride()) if leaf.layout is torch.strided else tuple(1 for _ in leaf.shape)
        return Shape(tuple(leaf.shape), stride, leaf.dtype)
    if isinstance(leaf, torch.ScriptObject):  # for example the handle of a range in a profile; it cannot be pickled
        return type(leaf).__name__
    try:
        hash(leaf)
    except TypeError:
        return repr(leaf)
    return leaf
