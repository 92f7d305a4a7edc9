"""The memory of the tensors of a rank during real or imagined steps, by purpose."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.distributed.traffic import has_wrapper
from runner.planning.timeline import DEVICE_QUERY

GIB = 2**30
PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer state"
ACTIVATIONS, COMMUNICATION, REST = "activations", "communication buffers", "the rest"
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, COMMUNICATION, REST)


@dataclass(eq=False)
class _Storage:
    size: int  # bytes
    kind: str
    reference: Any  # a weak reference, whose callback removes the entry when torch frees the storage


class MemoryTracker(TorchDispatchMode):
    """A context that tracks the storages of all tensors that operators create, also on the meta device.

    Tensors that operators use internally are not included, except large ones on a CPU (`on_cpu`, see _copied). The
    kinds of the memory at a peak are determined at the end of the step, because only then is it known which tensors
    became gradients or optimizer state.
    """

    def __init__(self, on_cpu: bool = False) -> None:
        super().__init__()
        self._on_cpu = on_cpu
        self._live: dict[int, _Storage] = {}
        self._total = self._peak = 0
        self._is_higher = False  # the total is higher than at the last snapshot
        self._at_peak: list[tuple[_Storage, int]] = []

    def __enter__(self) -> "MemoryTracker":
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:  # with it, FSDP frees gathered parameters
            result = resize(storage, size)
            if (known := self._live.get(storage._cdata)) is not None:
                self._change(size - known.size)
                known.size = size
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*details)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_wrapper(types):
            return NotImplemented  # it calls this mode again, with its inner tensors
        if function is DEVICE_QUERY:
            return args[0].fake_device
        result = function(*args, **(kwargs or {}))
        in_backward = torch._C._current_graph_task_id() != -1
        kind = COMMUNICATION if "c10d" in function.namespace else REST if in_backward else ACTIVATIONS
        results = [result] if isinstance(result, torch.Tensor) else tree_leaves(result)  # which takes a while
        for tensor in results:
            if isinstance(tensor, torch.Tensor):
                self._add(tensor, kind)
        if self._on_cpu:
            copies = [torch.empty_like(tensor) for tensor in _copied(function, args, result)]  # freed on return
            for copy in copies:
                self._add(copy, kind)
        if kind == COMMUNICATION:
            self.mark(tree_leaves((args, kwargs)), kind, (ACTIVATIONS, REST))
        return result

    def mark(self, tensors: Iterable[Any], kind: str, instead_of: Iterable[str] = KINDS) -> None:
        """Set the kind of these tensors' storages to `kind`, if it is one of `instead_of`."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if isinstance(local, torch.Tensor):
                storage = self._add(local, kind)
                if storage is not None and storage.kind in instead_of:
                    storage.kind = kind

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors' storages as empty."""
        for tensor in tensors:
            if (storage := self._add(tensor, REST)) is not None:
                self._change(-storage.size)
                storage.size = 0

    def reset_peak(self) -> int:
        """Reset the peak to the current memory. Return the current memory in bytes."""
        self._peak, self._is_higher = self._total, True
        return self._total

    def peak(self) -> dict[str, int]:
        """Return the bytes at the peak since the last reset, by kind."""
        self._snapshot()
        return {kind: sum(size for storage, size in self._at_peak if storage.kind == kind) for kind in KINDS}

    def _add(self, tensor: torch.Tensor, kind: str) -> _Storage | None:
        """Return the tensor's storage, tracked from now on; None for tensors without one, such as sparse ones."""
        if tensor.layout is not torch.strided:
            return None
        untyped = tensor.untyped_storage()
        key = untyped._cdata  # unique while the storage exists
        if key not in self._live:
            reference = weakref.ref(untyped, lambda _: self._free(key))
            self._live[key] = _Storage(untyped.nbytes(), kind, reference)
            self._change(self._live[key].size)
        return self._live[key]

    def _free(self, key: int) -> None:
        self._change(-self._live[key].size)
        del self._live[key]

    def _change(self, size: int) -> None:
        if size < 0:
            self._snapshot()
        self._total += size
        if self._total > self._peak:
            self._peak, self._is_higher = self._total, True

    def _snapshot(self) -> None:
        """Record the storages that exist at the peak, before one of them is freed."""
        if self._is_higher:
            self._is_higher = False
            self._at_peak = [(storage, storage.size) for storage in self._live.values()]


def _copied(function: Any, args: Any, result: Any) -> list[torch.Tensor]:
    """Return the tensors of which the operator needs a copy on a CPU until it ends, measured with channels_last."""
    aten = torch.ops.aten
    if function is torch.ops.c10d._reduce_scatter_base_.default:  # gloo's
        return [args[1]]
    if function is aten.native_batch_norm_backward.default and result[0] is not None:
        return [result[0]]
    if function is aten.convolution_backward.default and result[1] is not None:  # of the weight, in oneDNN's formats
        return [args[2], args[2]]
    if function is aten.max_pool2d_with_indices_backward.default:
        layout = suggest_memory_format(args[0])
        return [tensor for tensor in (result, args[-1]) if not tensor.is_contiguous(memory_format=layout)]
    return []
