"""Initial weights part by part: a model is built without memory, and each part gets later what it would have got."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from runner.training.objective import Within

STAND_IN = 0.01  # not 0, by which a normalisation of weights would divide

Memory = dict[int, torch.UntypedStorage]


@dataclass(frozen=True, eq=False)
class _View:
    """A tensor on the meta device as it was when an operator saw it: a conversion changes a parameter in place."""

    storage: torch.UntypedStorage  # without memory; held here, so that its address names it for as long as needed
    dtype: torch.dtype
    offset: int
    size: tuple[Any, ...]
    stride: tuple[Any, ...]

    @property
    def key(self) -> int:
        return self.storage._cdata


@dataclass(frozen=True)
class _Call:
    """One operator that the constructor ran, with a _View in the place of each tensor on the meta device."""

    operator: Any
    args: Any
    kwargs: Any
    outputs: Any
    random_state: Tensor | None  # of the generator before it, where it drew


class Deferred(TorchDispatchMode):
    """While entered, whatever makes a tensor makes one on the meta device, and all that is done to it is recorded.

    To materialize a part is to do again, on the CPU, what was done to its tensors: with the random state of then, so
    that its weights are bit by bit those of the same constructor run as usual, whatever initialises them in whichever
    order. (Calling each module's reset_parameters, the usual way, misses what a constructor does besides.)

    To know the random states each draw is made once while recording, and so is what a value that the constructor asks
    for depends on; the memory is dropped at once. As a rule that is one tensor's.
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
            return func(*args, **kwargs)  # of constants, which stay what they are
        seen = tree_map_only(Tensor, _view, (args, kwargs))
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._run(func, seen, self._replay(_views(seen)))
        draws = torch.Tag.nondeterministic_seeded in func.tags
        state = _generator(kwargs).get_state() if draws else None
        outputs = func(*args, **kwargs)
        if draws:  # moves the generator on
            self._run(func, seen, self._replay(_views(seen)))
        self._calls.append(_Call(func, seen[0], seen[1], tree_map_only(Tensor, _view, outputs), state))
        return outputs

    def keep(self, module: nn.Module) -> None:
        """Take note of the model that was built; conversions of its dtype or memory format may follow."""
        self._names = {part: name for name, part in module.named_modules()}
        parameters = module.named_parameters(remove_duplicate=False)
        held = chain(parameters, module.named_buffers(remove_duplicate=False))
        self._origins = {name: _view(tensor) for name, tensor in held if tensor.is_meta}

    def materialize(self, parts: Iterable[nn.Module], device: torch.device) -> None:
        """Give the parts' tensors memory on the device and their initial values.

        What modules share stays shared within one call.
        """
        slots: list[tuple[dict[str, Any], str, Tensor, _View]] = []  # where it is, the tensor, its origin
        for module in {module: None for part in parts for module in part.modules()}:
            of_module: list[dict[str, Any]] = [module._parameters, module._buffers]
            for held in of_module:
                for key, tensor in held.items():
                    if tensor is not None and tensor.is_meta:
                        name = self._names[module]
                        slots.append((held, key, tensor, self._origins[f"{name}.{key}" if name else key]))
                    elif tensor is not None and held is module._buffers:
                        held[key] = tensor.to(device)
                    elif tensor is not None:  # made of a constant
                        tensor.data = tensor.data.to(device)
        memory = self._replay([origin for *_, origin in slots])
        made: dict[int, Tensor] = {}
        for held, key, tensor, origin in slots:
            if id(tensor) not in made:
                real = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
                real.copy_(_real(origin, memory))
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(real, tensor.requires_grad) if is_parameter else real
            held[key] = made[id(tensor)]

    @torch.no_grad()
    def _replay(self, wanted: list[_View]) -> Memory:
        """The memory of these tensors, on the CPU, by the calls that had a part in it."""
        needed = {view.key for view in wanted}
        calls = []
        for call in reversed(self._calls):
            # What is written in place is returned, but by the operators on lists, which return nothing.
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
        return operator(*args, **tree_map(_on_cpu, kwargs))


def build_deferred(make: Callable[[], nn.Module]) -> tuple[nn.Module, Deferred | None, str]:
    """The module that `make` builds, without memory if it can be, and why it cannot.

    Reading a file into tensors is what a constructor cannot do without memory: then it is run as usual, from the same
    random state. Raises what it raises.
    """
    random_state, deferred = torch.get_rng_state(), Deferred()
    try:
        with deferred:
            return make(), deferred, ""
    except Exception as error:  # whatever an operator says that finds no memory; what is the user's to mend comes again
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    torch.set_rng_state(random_state)
    return make(), None, reason


class _Mask(TorchFunctionMode):
    """Lets a tensor on the meta device say that it is none: some functions of torch.nn.init do nothing for one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return False if getattr(func, "__self__", None) is torch.Tensor.is_meta else func(*args, **(kwargs or {}))


def probe(module: nn.Module, function: Callable[..., Any], *args: Any, device: torch.device | None = None) -> Any:
    """What a function of the model and these arguments returns, with one number in the place of all weights not made.

    Each such weight is a view of that number: no memory is needed to see which shape and kind of outputs there are.
    device: of the arguments, where that is not the CPU.
    """
    where = device or torch.device("cpu")

    def stand_in(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(where)
        return torch.full((), STAND_IN, device=where).to(tensor.dtype).expand(tensor.size())

    held = chain(module.named_parameters(), module.named_buffers())
    stand_ins = {f"model.{n}": stand_in(t) for n, t in held if t.is_meta or (device and t.device != device)}
    if not stand_ins:
        return function(module, *args)
    return functional_call(Within(module), stand_ins, (function, *args))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _views(tree: Any) -> list[_View]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, _View)]


def _view(tensor: Tensor) -> Any:
    if not tensor.is_meta:
        return tensor.clone()  # a constant, which the constructor may change afterwards
    offset = int(tensor.storage_offset())
    return _View(tensor.untyped_storage(), tensor.dtype, offset, tensor.size(), tensor.stride())


def _real(view: _View, memory: Memory) -> Tensor:
    return torch.empty(0, dtype=view.dtype).set_(memory[view.key], view.offset, view.size, view.stride)


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _generator(kwargs: dict[str, Any]) -> torch.Generator:
    return kwargs.get("generator") or torch.default_generator
