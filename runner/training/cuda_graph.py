"""CUDA graphs: the operators of a computation are recorded once, and launched together afterwards."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.errors import JobFailed, failed_with, is_out_of_memory

NUM_WARMUPS = 3  # ordinary calls before a capture: they create the optimizer's state, and choose kernels
OFF = "try cuda_graph=false"
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Graph:
    """A computation that is captured after `NUM_WARMUPS` calls with equal signatures.

    Attributes:
        signature: The values on the host on which the captured computation depended; None if there is none.
        result: What the captured computation returned: tensors that each replay overwrites.
        number: The number of captures.
        last, before: The last signature, and the last one that differed from it.
    """

    def __init__(self) -> None:
        self.signature: Any = None
        self.result: Any = None
        self.number = 0
        self.last: Any = None
        self.before: Any = None
        self._graph: torch.cuda.CUDAGraph
        self._num_equal = 0  # preceding calls with the same signature

    def is_due(self, signature: Any) -> bool:
        """Return True if this call is replayed, after a capture if its signature is not the captured one."""
        if signature == self.last:
            self._num_equal += 1
        else:
            self._num_equal, self.before, self.last = 0, self.last, signature
        return signature == self.signature or self._num_equal >= NUM_WARMUPS

    def capture(self, signature: Any, compute: Callable[[], Any]) -> None:
        """Record the operators of `compute` without executing them. Raise JobFailed if a graph cannot repeat them."""
        graph, result, failure = torch.cuda.CUDAGraph(), None, None
        try:
            # Other threads, such as that of a checkpoint, may use the GPU meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                try:
                    with Repeatable():
                        result = compute()
                except Exception as error:  # the end of a failed capture raises another one
                    failure = error
        except RuntimeError as error:
            failure = failure or error
        if failure is not None and is_out_of_memory(failure):
            raise failure
        if failure is not None:
            problem = f"a step cannot be captured in a CUDA graph{failed_with(failure)}"
            raise JobFailed(f"cuda_graph=true: {problem}; {OFF}") from failure
        self._graph, self.signature, self.result = graph, signature, result
        self.number += 1

    def replay(self) -> None:
        self._graph.replay()

    def forget(self) -> None:
        """Require another capture, after ordinary calls."""
        self.signature = self.last = None


class Repeatable(TorchDispatchMode):
    """Raises RuntimeError for an operator that waits for the device, or that copies from or to the host.

    torch raises for most of the former, but not for all of the latter: a graph would copy from memory that the host has
    reused.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, operator = kwargs or {}, str(func.overloadpacket)
        if operator in ("aten._to_copy", "aten.copy_"):
            places = {each.device.type for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
            if kwargs.get("device") is not None:
                places.add(torch.device(kwargs["device"]).type)
            if len(places) > 1:
                raise RuntimeError(f"{func} copies between the host and the device")
        reads = not _READS.isdisjoint(func.tags)
        if operator in ("aten.index", "aten.index_put_"):  # the host reads how many elements of a mask are True
            reads = any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
        if reads:
            raise RuntimeError(f"{func} waits for a value of the device")
        return func(*args, **kwargs)
