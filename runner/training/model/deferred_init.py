"""Deferred initialization: a model is built on the meta device, and each submodule is initialized later."""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from runner.errors import first_line
from runner.input.pytree import tensors
from runner.objectives.objective import ForwardWrapper
from runner.training.model.attributes import map_attributes

T = TypeVar("T")
PLACEHOLDER = 0.01  # not 0, because normalizing weights would divide by it

Memory = dict[int, torch.UntypedStorage]  # by the meta tensors' storage


@dataclass(frozen=True)
class _Call:
    """An operator that the constructor called, with an alias of each tensor on the meta device (`_alias`)."""

    operator: Any
    args: Any
    kwargs: Any
    outputs: Any
    random_state: Tensor | None  # of the generator before the operator, if it draws


class Deferred(TorchDispatchMode):
    """Creates all tensors on the meta device while it is entered, and records the operators on them.

    `materialize` repeats the recorded operators of a submodule's tensors on the CPU, with the recorded random states.
    The weights are bit-identical to those of a normal construction. To obtain the random states, each random operator
    is executed once while recording, and so are the operators that a value requested by the constructor depends on.
    Their memory, usually that of one tensor, is freed immediately.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self.error: Exception | None = None  # of an operator on the meta device
        self.build_normally: Callable[[BaseException], BuiltModel]
        # The tensors as the constructor created them, with its dtypes, by module and name.
        self._origins: dict[tuple[nn.Module, str], Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = tensors((args, kwargs))
        if not given and any(argument.name == "device" for argument in func._schema.arguments):
            kwargs["device"] = torch.device("meta")
        elif not any(tensor.is_meta for tensor in given):
            return func(*args, **kwargs)  # only constants
        try:
            return self._record(func, args, kwargs)
        except Exception as error:
            self.error = error  # the constructor may catch it, and build another model than it would normally
            raise

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        seen = tree_map_only(Tensor, _alias, (args, kwargs))
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._run(func, seen, self._replay(_metas(seen)))
        draws = torch.Tag.nondeterministic_seeded in func.tags
        state = _generator(kwargs).get_state() if draws else None
        outputs = func(*args, **kwargs)
        if draws:  # advances the generator
            self._run(func, seen, self._replay(_metas(seen)))
        self._calls.append(_Call(func, seen[0], seen[1], tree_map_only(Tensor, _alias, outputs), state))
        return outputs

    def record_names(self, module: nn.Module) -> None:
        """Record the names of the model's tensors, before its dtype or memory format is converted."""
        for part in module.modules():
            for key, tensor in chain(part._parameters.items(), part._buffers.items()):
                if tensor is not None and tensor.is_meta:
                    self._origins[part, key] = _alias(tensor)

    def create_attributes(self, module: nn.Module) -> None:
        """Replace the tensors on the meta device that are neither parameters nor buffers: they are never sharded."""
        registered = {id(tensor) for tensor in chain(module.parameters(), module.buffers())}
        found: dict[int, Tensor] = {}

        def find(tensor: Tensor) -> Tensor:
            if tensor.is_meta and id(tensor) not in registered:
                found[id(tensor)] = tensor
            return tensor

        map_attributes(module, find)
        memory = self._replay([*found.values()])
        real = {key: _real(tensor, memory).requires_grad_(tensor.requires_grad) for key, tensor in found.items()}
        for key, tensor in found.items():
            if isinstance(tensor, nn.Parameter):  # of a module that is not registered as a submodule
                real[key] = nn.Parameter(real[key].detach(), tensor.requires_grad)
        map_attributes(module, lambda tensor: real.get(id(tensor), tensor))

    def materialize(
        self, submodules: Iterable[nn.Module], device: torch.device, without_values: Collection[Tensor] = ()
    ) -> None:
        """Allocate the submodules' tensors on the device with their initial values; shared tensors remain shared.

        without_values: tensors whose memory is not initialized, because the caller fills it.
        """
        uninitialized = {id(tensor) for tensor in without_values}
        slots: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []  # container, key, tensor, origin
        for module in {module: None for submodule in submodules for module in submodule.modules()}:
            containers: list[dict[str, Any]] = [module._parameters, module._buffers]
            for container in containers:
                for key, tensor in container.items():
                    if tensor is not None and tensor.is_meta:
                        slots.append((container, key, tensor, self._origins[module, key]))
                    elif tensor is not None:  # created from a constant
                        tensor.data = tensor.data.to(device)
        memory = self._replay([origin for _, _, tensor, origin in slots if id(tensor) not in uninitialized])
        created: dict[int, Tensor] = {}
        for container, key, tensor, origin in slots:
            if id(tensor) not in created:
                real = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
                if id(tensor) not in uninitialized:
                    real.copy_(_real(origin, memory))
                is_parameter = isinstance(tensor, nn.Parameter)
                created[id(tensor)] = nn.Parameter(real, tensor.requires_grad) if is_parameter else real
            container[key] = created[id(tensor)]

    @torch.no_grad()
    def _replay(self, wanted: list[Tensor]) -> Memory:
        """Return the memory of these tensors on the CPU, by repeating the calls that they depend on."""
        needed = {_key(tensor) for tensor in wanted}
        calls = []
        for call in reversed(self._calls):
            # In-place operators return what they write, except operators on lists, which return nothing.
            if any(_key(tensor) in needed for tensor in _metas(call.outputs) or _metas(call.args)):
                needed.update(_key(tensor) for tensor in _metas((call.args, call.kwargs, call.outputs)))
                calls.append(call)
        memory: Memory = {}
        for call in reversed(calls):
            generator = _generator(call.kwargs)
            before = generator.get_state()
            if call.random_state is not None:
                generator.set_state(call.random_state)
            outputs = self._run(call.operator, (call.args, call.kwargs), memory)
            generator.set_state(before)
            for alias, output in zip(_metas(call.outputs), tensors(outputs), strict=True):
                assert alias.stride() == output.stride()
                memory.setdefault(_key(alias), output.untyped_storage())
        return memory

    def _run(self, operator: Any, arguments: Any, memory: Memory) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda tensor: _real(tensor, memory), arguments)
        return operator(*args, **tree_map_only(torch.device, lambda _: torch.device("cpu"), kwargs))


@dataclass
class BuiltModel:
    """A model, and the recording by which its weights are created later, if the model is deferred."""

    module: nn.Module
    deferred: Deferred | None = None
    warnings: list[str] = field(default_factory=list)

    def run(self, function: Callable[[], T]) -> T:
        """Return the result of a dry run, a function that calls the module. If necessary, build it normally first.

        This is necessary if forward uses a tensor on the meta device that is found only here, such as one in a closure.
        """
        try:
            return function()
        except Exception as raised:
            error: BaseException | None = raised
            while not (error is None or isinstance(error, UninitializedTensor)):
                error = error.__context__
            if self.deferred is None or error is None:
                raise
        state = torch.get_rng_state()
        built = self.deferred.build_normally(error)
        torch.set_rng_state(state)
        self.module, self.deferred, self.warnings = built.module, None, built.warnings
        return function()


def build_deferred(name: str, make: Callable[[], nn.Module]) -> BuiltModel:
    """Return the model that `make` builds on the meta device, or else the normal model and a warning.

    A constructor that reads a file into tensors, for example, cannot be deferred: then it is called again normally,
    from the same random state. Its exceptions are raised.
    """
    random_state, deferred = torch.get_rng_state(), Deferred()

    def build_normally(error: BaseException) -> BuiltModel:
        reason = first_line(error).partition(". ")[0]  # torch explains what developers of operators can do
        warning = (
            f"model={name} cannot be built on the meta device ({reason}), so that every rank builds the whole model; "
            "if its constructor loads weights, load them with init_from=FILE instead"
        )
        torch.set_rng_state(random_state)
        return BuiltModel(make(), warnings=[warning])

    deferred.build_normally = build_normally
    records: list[tuple[logging.Logger, logging.LogRecord]] = []
    try:
        with _Mask(), _holding_log(records), deferred:
            module = make()
        if deferred.error is None:
            deferred.record_names(module)
            deferred.create_attributes(module)
            for logger, record in records:
                logger.handle(record)
            return BuiltModel(module, deferred)
        error = deferred.error
    except Exception as raised:  # the model's own errors are raised again below
        error = raised
    return build_normally(error)


@contextmanager
def _holding_log(records: list[tuple[logging.Logger, logging.LogRecord]]) -> Iterator[None]:
    """Collect what this thread logs: a constructor that fails on the meta device is called and logs again.

    It may also report weights as missing from a file that has them.
    """
    handle, thread = logging.Logger.handle, get_ident()

    def hold(logger: logging.Logger, record: logging.LogRecord) -> None:
        if record.thread == thread:
            records.append((logger, record))
        else:
            handle(logger, record)

    logging.Logger.handle = hold  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        logging.Logger.handle = handle  # type: ignore[method-assign]


class UninitializedTensor(Exception):
    """Forward uses a tensor on the meta device, which is neither a parameter nor a buffer."""


class RefusingMeta(TorchFunctionMode):
    """Raises UninitializedTensor if a function has an argument on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(tensor.is_meta for tensor in tensors((args, kwargs))):
            raise UninitializedTensor("forward uses a tensor that is found in no attribute of the model")
        return func(*args, **(kwargs or {}))


class _Mask(TorchFunctionMode):
    """Makes `is_meta` False, because some functions of torch.nn.init ignore tensors on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return False if getattr(func, "__self__", None) is torch.Tensor.is_meta else func(*args, **(kwargs or {}))


def probe(module: nn.Module, function: Callable[..., Any], *args: Any, device: torch.device | None = None) -> Any:
    """Call a function of the model and these arguments, with a placeholder for weights that are not initialized.

    The placeholder of a parameter is a view of few numbers, on the device of the arguments. Raises UninitializedTensor
    if the function uses another tensor that is not initialized.
    """

    def call(model: nn.Module) -> Any:
        with RefusingMeta():
            return function(model, *args)

    return call_with(placeholders(module, device or torch.device("cpu")), module, call)


def probe_with_random_weights(module: nn.Module, function: Callable[[nn.Module], T]) -> T:
    """Call a function of the model with `random_weights`; otherwise as `probe`."""

    def call(model: nn.Module) -> T:
        with RefusingMeta():
            return function(model)

    result: T = call_with(random_weights(module), module, call)
    return result


def placeholders(module: nn.Module, where: torch.device) -> dict[Tensor, Tensor]:
    """Return the replacements of the module's tensors that are on the meta device, or on another one than `where`."""
    generator = torch.Generator().manual_seed(0)
    return {
        tensor: _placeholder(tensor, where, generator)
        if tensor.is_meta and isinstance(tensor, nn.Parameter)
        else torch.full_like(tensor, PLACEHOLDER, device=where)  # forward may write to a buffer
        if tensor.is_meta
        else tensor.to(where)
        for tensor in chain(module.parameters(), module.buffers())
        if tensor.device != where
    }


def _placeholder(parameter: nn.Parameter, where: torch.device, generator: torch.Generator) -> Tensor:
    """Return a tensor like the parameter, of positive numbers that take little memory because its elements share them.

    Neighbors along all dims differ, as trained weights do: a layer of equal weights would hide which features belong to
    which sample.
    """
    length, strides = _overlapping(parameter.shape)
    numbers = torch.rand(length, generator=generator).add(0.5).mul(PLACEHOLDER).to(where, parameter.dtype)
    return numbers.as_strided(parameter.shape, strides).requires_grad_(parameter.requires_grad)


def _overlapping(shape: Sequence[int]) -> tuple[int, list[int]]:
    """Return the size and the strides of a tensor of this shape whose elements share memory."""
    strides = [2 * number + 1 for number in reversed(range(len(shape)))]
    return 1 + sum(max(0, size - 1) * stride for size, stride in zip(shape, strides, strict=True)), strides


def random_weights(module: nn.Module) -> dict[Tensor, Tensor]:
    """Return replacements of the module's tensors on the CPU, with which each output depends strongly on its inputs.

    Initial weights may be zero or so small that attention to other positions changes nothing, and so may placeholders.
    Matrices have both signs and keep the size of their inputs; other parameters are near 1. They take little memory.
    """
    generator = torch.Generator().manual_seed(0)
    new = placeholders(module, torch.device("cpu"))
    for parameter in module.parameters():
        if parameter.is_floating_point():
            length, strides = _overlapping(parameter.shape)
            numbers = torch.randn(length, generator=generator)
            numbers = numbers * 2 / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 1 + 0.3 * numbers
            new[parameter] = numbers.to(parameter.dtype).as_strided(parameter.shape, strides)
    return new


def call_with(new: Mapping[Any, Tensor], module: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of the model and these arguments. new: the replacements of the model's tensors."""
    wrapper = ForwardWrapper(module)
    by_name = {
        f"{prefix}.{name}": new[tensor]
        for prefix, part in wrapper.named_modules()
        for name, tensor in chain(part._parameters.items(), part._buffers.items())
        if tensor is not None and tensor in new
    }
    # With tie_weights=True, functional_call does not restore a module that is registered twice.
    return functional_call(wrapper, by_name, (function, *args), tie_weights=False)


def _metas(tree: Any) -> list[Tensor]:
    return [tensor for tensor in tensors(tree) if tensor.is_meta]


def _alias(tensor: Tensor) -> Tensor:
    """Return the tensor as an operator received it, because a later conversion changes a parameter in place."""
    return tensor.detach() if tensor.is_meta else tensor.clone()  # the constructor may change a constant later


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata  # unique, because the recorded aliases keep the storage
    return key


def _real(tensor: Tensor, memory: Memory) -> Tensor:
    if not tensor.is_meta:
        return tensor
    storage = memory[_key(tensor)]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _generator(kwargs: dict[str, Any]) -> torch.Generator:
    return kwargs.get("generator") or torch.default_generator
