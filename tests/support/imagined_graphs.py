"""CUDA graphs on the CPU, for tests: a capture records operators with their tensors, and a replay executes them again.

As on a GPU, a capture has no effect on memory that exists before it, and no effect on the device's generator, for which
torch's CPU generator stands. A replay reads and writes the memory of the recorded tensors, and nothing else.
"""

import multiprocessing
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.config import validate
from runner.distributed import readings
from runner.jobs import job

# Of the graphs of all processes that are forked from this one.
NUM_CAPTURES, NUM_REPLAYS = multiprocessing.Value("q"), multiprocessing.Value("q")
# They write running_mean and running_var, which their schemas do not declare.
UNDECLARED = {"native_batch_norm": (3, 4), "_batch_norm_with_update": (3, 4)}


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in _tensors(tree)}


class Recorder(TorchDispatchMode):
    """Records operators, and restores at exit the memory that they have written."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(func.tags) and (
            func.overloadpacket not in (torch.ops.aten.index, torch.ops.aten.index_put_)
        ):
            raise RuntimeError("operation not permitted when stream is capturing")
        for argument, value in [*zip(func._schema.arguments, args, strict=False)]:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._save(value)
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in kwargs:
                self._save(kwargs[argument.name])
        for position in UNDECLARED.get(func._schema.name.removeprefix("aten::"), ()):
            self._save(args[position])
        state = torch.get_rng_state() if torch.Tag.nondeterministic_seeded in func.tags else None
        outputs = func(*args, **kwargs)
        if state is not None:
            torch.set_rng_state(state)
        self.calls.append((func, args, kwargs, outputs))
        return outputs

    def _save(self, written: Any) -> None:
        for key, storage in _storages(written).items():
            self._before.setdefault(key, (storage, storage.clone()))

    def restore(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)


class ImaginedGraph:
    """torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    @torch.no_grad()
    def replay(self) -> None:
        NUM_REPLAYS.value += 1
        for func, args, kwargs, recorded in self.calls:
            outputs = func(*args, **kwargs)
            read = _storages((args, kwargs))
            for target, source in zip(_tensors(recorded), _tensors(outputs), strict=True):
                if target.untyped_storage()._cdata not in read:  # otherwise it is a view, or the written argument
                    target.copy_(source)


class ImaginedStream:
    """torch.cuda.Stream; waiting for another stream is counted."""

    def __init__(self, device: torch.device | None = None):
        self.num_waits = 0

    def wait_stream(self, other: "ImaginedStream") -> None:
        assert isinstance(other, ImaginedStream)
        self.num_waits += 1


@contextmanager
def _capturing(graph: ImaginedGraph, capture_error_mode: str) -> Iterator[None]:
    assert capture_error_mode == "thread_local"
    recorder = Recorder()
    try:
        with recorder:
            yield
    finally:
        recorder.restore()
    graph.calls = recorder.calls
    NUM_CAPTURES.value += 1


def _on_stream(stream: ImaginedStream) -> AbstractContextManager[None]:
    assert isinstance(stream, ImaginedStream)
    return nullcontext()


def imagine_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CUDA graphs work on the CPU, and let cuda_graph=true be accepted there."""
    current = ImaginedStream()
    NUM_CAPTURES.value = NUM_REPLAYS.value = 0
    monkeypatch.setattr(torch.cuda, "CUDAGraph", ImaginedGraph)
    monkeypatch.setattr(torch.cuda, "graph", _capturing)
    monkeypatch.setattr(torch.cuda, "Stream", ImaginedStream)
    monkeypatch.setattr(torch.cuda, "stream", _on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(readings, "ASYNCHRONOUS", {"cpu"})
    check_fit = validate.check_fit

    def accept(config: Any, device_type: str | None) -> list[str]:
        return check_fit(config, device_type if not config.cuda_graph else "cuda")

    monkeypatch.setattr(job, "check_fit", accept)
