"""Deferred initialization: a model is built on the meta device, and each submodule is initialized later."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from runner.objectives.objective import ForwardWrapper

PLACEHOLDER = 0.01  # not 0, by which a normalization of weights would divide

Memory = dict[int, torch.UntypedStorage]


@dataclass(frozen=True, eq=False)
class _View:
    """A tensor on the meta device as an operator received it; a later conversion changes a parameter in place."""

    storage: torch.UntypedStorage  # without memory; the reference keeps its address unique
    dtype: torch.dtype
    offset: int
    size: tuple[Any, ...]
    stride: tuple[Any, ...]

    @property
    def key(self) -> int:
        return self.storage._cdata


@dataclass(frozen=True)
class _Call:
    """An operator that the constructor called, with a _View for each tensor on the meta device."""

    operator: Any
    args: Any
    kwargs: Any
    outputs: Any
    random_state: Tensor | None  # of the generator before the operator, if it draws


class Deferred(TorchDispatchMode):
    """Creates all tensors on the meta device while it is entered, and records the operators on them.

    `materialize` repeats the recorded operators of a submodule's tensors on the CPU, with the recorded random states.
    The weights are bit-identical to those of a normal construction, whatever initializes them in any order. (Calling
    reset_parameters of each module, as is common, misses everything else that a constructor does.)

    To obtain the random states, each random operator is executed once while recording, and so are the operators that a
    value requested by the constructor depends on. Their memory, usually that of one tensor, is freed immediately.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._origins: dict[str, _View] = {}  # what the constructor left under each name, of the dtype it chose
        self._names: dict[nn.Module, str] = {}
        self._mask = _Mask()

    def __enter__(self) -> "Deferred":
        self._mask.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._mask.__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = _tensors((args, kwargs))
        if not tensors and any(argument.name == "device" for argument in func._schema.arguments):
            kwargs["device"] = torch.device("meta")
        elif not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)  # only constants
        seen = tree_map_only(Tensor, _view, (args, kwargs))
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._run(func, seen, self._replay(_views(seen)))
        draws = torch.Tag.nondeterministic_seeded in func.tags
        state = _generator(kwargs).get_state() if draws else None
        outputs = func(*args, **kwargs)
        if draws:  # advances the generator
            self._run(func, seen, self._replay(_views(seen)))
        self._calls.append(_Call(func, seen[0], seen[1], tree_map_only(Tensor, _view, outputs), state))
        return outputs

    def record_names(self, module: nn.Module) -> None:
        """Record the names of the model's tensors, before its dtype or memory format is converted."""
        self._names = {part: name for name, part in module.named_modules()}
        parameters = module.named_parameters(remove_duplicate=False)
        named = chain(parameters, module.named_buffers(remove_duplicate=False))
        self._origins = {name: _view(tensor) for name, tensor in named if tensor.is_meta}

    def materialize(self, submodules: Iterable[nn.Module], device: torch.device) -> None:
        """Allocate the submodules' tensors on the device with their initial values.

        Tensors that submodules share remain shared within one call.
        """
        slots: list[tuple[dict[str, Any], str, Tensor, _View]] = []  # container, key, tensor, origin
        for module in {module: None for submodule in submodules for module in submodule.modules()}:
            containers: list[dict[str, Any]] = [module._parameters, module._buffers]
            for container in containers:
                for key, tensor in container.items():
                    if tensor is not None and tensor.is_meta:
                        name = self._names[module]
                        slots.append((container, key, tensor, self._origins[f"{name}.{key}" if name else key]))
                    elif tensor is not None and container is module._buffers:
                        container[key] = tensor.to(device)
                    elif tensor is not None:  # created from a constant
                        tensor.data = tensor.data.to(device)
        memory = self._replay([origin for *_, origin in slots])
        created: dict[int, Tensor] = {}
        for container, key, tensor, origin in slots:
            if id(tensor) not in created:
                real = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
                real.copy_(_real(origin, memory))
                is_parameter = isinstance(tensor, nn.Parameter)
                created[id(tensor)] = nn.Parameter(real, tensor.requires_grad) if is_parameter else real
            container[key] = created[id(tensor)]

    @torch.no_grad()
    def _replay(self, wanted: list[_View]) -> Memory:
        """Return the memory of these tensors on the CPU, by repeating the calls that they depend on."""
        needed = {view.key for view in wanted}
        calls = []
        for call in reversed(self._calls):
            # In-place operators return what they write, except operators on lists, which return nothing.
            if any(view.key in needed for view in _views(call.outputs) or _views(call.args)):
                needed.update(view.key for view in _views((call.args, call.kwargs, call.outputs)))
                calls.append(call)
        memory: Memory = {}
        for call in reversed(calls):
            generator = _generator(call.kwargs)
            before = generator.get_state()
            if call.random_state is not None:
                generator.set_state(call.random_state)
            outputs = self._run(call.operator, (call.args, call.kwargs), memory)
            generator.set_state(before)
            for view, output in zip(_views(call.outputs), _tensors(outputs), strict=True):
                assert view.stride == output.stride()
                memory.setdefault(view.key, output.untyped_storage())
        return memory

    def _run(self, operator: Any, arguments: Any, memory: Memory) -> Any:
        args, kwargs = tree_map_only(_View, lambda view: _real(view, memory), arguments)
        return operator(*args, **tree_map_only(torch.device, lambda _: torch.device("cpu"), kwargs))


def build_deferred(make: Callable[[], nn.Module]) -> tuple[nn.Module, Deferred | None, str]:
    """Return the module that `make` builds, its recording, and an empty string, or why it cannot be deferred.

    A constructor that reads a file into tensors, for example, cannot be deferred: then it is called again normally,
    from the same random state. Its exceptions are raised.
    """
    random_state, deferred = torch.get_rng_state(), Deferred()
    try:
        with deferred:
            return make(), deferred, ""
    except Exception as error:  # the model's own errors are raised again below
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    torch.set_rng_state(random_state)
    return make(), None, reason


class _Mask(TorchFunctionMode):
    """Makes `is_meta` False, because some functions of torch.nn.init ignore tensors on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return False if getattr(func, "__self__", None) is torch.Tensor.is_meta else func(*args, **(kwargs or {}))


def probe(module: nn.Module, function: Callable[..., Any], *args: Any, device: torch.device | None = None) -> Any:
    """Call a function of the model and these arguments, with a placeholder for weights that are not initialized.

    Each placeholder is an expanded view of one number, so that the shape and dtype of the outputs are found without
    memory for the weights. `device` is that of the arguments, by default the CPU.
    """
    where = device or torch.device("cpu")

    def placeholder(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(where)
        return torch.full((), PLACEHOLDER, device=where).to(tensor.dtype).expand(tensor.size())

    named = chain(module.named_parameters(), module.named_buffers())
    placeholders = {f"model.{n}": placeholder(t) for n, t in named if t.is_meta or (device and t.device != device)}
    if not placeholders:
        return function(module, *args)
    return functional_call(ForwardWrapper(module), placeholders, (function, *args))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _views(tree: Any) -> list[_View]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, _View)]


def _view(tensor: Tensor) -> Any:
    if not tensor.is_meta:
        return tensor.clone()  # a constant, which the constructor may change later
    offset = int(tensor.storage_offset())
    return _View(tensor.untyped_storage(), tensor.dtype, offset, tensor.size(), tensor.stride())


def _real(view: _View, memory: Memory) -> Tensor:
    return torch.empty(0, dtype=view.dtype).set_(memory[view.key], view.offset, view.size, view.stride)


def _generator(kwargs: dict[str, Any]) -> torch.Generator:
    return kwargs.get("generator") or torch.default_generator
