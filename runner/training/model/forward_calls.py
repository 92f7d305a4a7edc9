"""A dry run that finds the modules that forward does not use as a whole, whose calls mark no boundary."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runner.errors import InputError
from runner.input.batch import MicroBatch
from runner.input.pytree import tensors
from runner.objectives.objective import Objective
from runner.training.components import Components
from runner.training.model.deferred_init import RefusingMeta, UninitializedTensor, call_with, placeholders
from runner.training.model.forward_state import restoring_state

# Functions that return no tensor and depend on values, not only on a shape or a dtype.
READERS = ("item", "tolist", "numpy", "equal", "allclose", "__bool__", "__float__", "__int__")


def find_divided(components: Components) -> list[nn.Module]:
    """Return the modules that forward does not use as a whole, in training or in evaluation.

    Their parts are called instead of them, or code outside of their calls uses their parameters, or they write to their
    inputs. The modules that no pass calls are left out, and so are those that a pass would have called after an
    exception, which training reports.

    Raises InputError if parameters are sharded, but forward uses a parameter by another reference than the attribute of
    its module, which the shards replace.
    """
    module, objective = components.module, components.objective
    new = {parameter: parameter.detach() for parameter in module.parameters()}
    recording = _Recording(new | placeholders(module, torch.device("cpu")))
    eager = torch.compiler.set_stance("force_eager")
    try:
        micro_batch = components.samples.batch([0, 0])  # BatchNorm needs two samples
        with restoring_state(module, objective), recording.watching(module), eager:
            call_with(recording.new, module, _run, recording, objective, micro_batch)
    except UninitializedTensor:
        raise
    except Exception:  # custom code can raise anything
        pass
    finally:
        module.train()
    shards = components.parallel.shards_matrices
    if shards and (kept := [name for name, parameter in module.named_parameters() if parameter in recording.kept]):
        choices = components.choices
        raise InputError(
            f"parallel={choices['parallel']}: the forward of model={choices['model']} uses {kept[0]} by a reference "
            "that is not an attribute of its module, such as an item of a list, and would not see the sharded "
            "parameter; try parallel=ddp"
        )
    return [part for part in module.modules() if recording.divides(part)]


def _run(model: nn.Module, recording: "_Recording", objective: Objective, micro_batch: MicroBatch) -> None:
    with recording:
        for name in objective.losses:
            objective.measure(model, name, micro_batch)
        model.eval()
        objective.evaluate(model, micro_batch)


class _Recording(RefusingMeta):
    """Records which modules are called, and within which of these calls each parameter is used.

    Attributes:
        new: The tensors that forward gets in place of the module's.
        kept: Parameters that are used although they are replaced.
    """

    def __init__(self, new: dict[Tensor, Tensor]):
        super().__init__()
        self.new, self.kept = new, set[Tensor]()
        self._replaced = {id(tensor): old for old, tensor in new.items()}
        self._active: list[nn.Module] = []
        self._versions: list[list[tuple[Tensor, int]]] = []  # of the inputs of the active modules
        self._called, self._writing = set[nn.Module](), set[nn.Module]()
        self._enclosing: dict[Tensor, set[nn.Module]] = {}  # the modules within whose calls all uses of a parameter are

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        used = [
            tensor
            for tensor in tensors((args, kwargs))
            if isinstance(tensor, nn.Parameter) or id(tensor) in self._replaced
        ]
        if used and (tensors(result) or getattr(func, "__name__", "") in READERS):
            for tensor in used:
                self.kept.update({tensor} & self.new.keys())
                parameter = self._replaced.get(id(tensor), tensor)
                self._enclosing[parameter] = self._enclosing.get(parameter, {*self._active}).intersection(self._active)
        return result

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Record the calls of the model's modules."""

        def enter(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
            self._called.add(module)
            self._active.append(module)
            inputs = [tensor for tensor in tensors((args, dict(kwargs))) if not tensor.is_inference()]
            self._versions.append([(tensor, tensor._version) for tensor in inputs])

        def leave(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            self._active.pop()
            if any(tensor._version != version for tensor, version in self._versions.pop()):
                self._writing.add(module)

        handles = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def divides(self, module: nn.Module) -> bool:
        used = [parameter for parameter in module.parameters() if parameter in self._enclosing]
        if module not in self._called:
            return bool(used) or not self._called.isdisjoint(module.modules())
        return module in self._writing or any(module not in self._enclosing[parameter] for parameter in used)
