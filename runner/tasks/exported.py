"""The files that a model is exported to, each read again and compared before it is said to be done."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.config.diagnostics.own_line import first_line, own_line
from runner.errors import InputError
from runner.tasks.example_call import Example
from runner.training.pytree import tensors

SUFFIXES = {"safetensors": ".safetensors", "torch_export": ".pt2", "onnx": ".onnx"}
PACKAGES = {"onnx": ("onnx", "onnxruntime", "onnxscript")}  # of the extra of the format's name


def check_installed(name: str) -> None:
    """Raises InputError with pip's line where the format needs what is not there."""
    if missing := [package for package in PACKAGES.get(name, ()) if find_spec(package) is None]:
        raise InputError(
            f"export.format={name} needs {' and '.join(missing)}, not installed; "
            f"pip install 'experiment-runner[{name}]'"
        )


def write_safetensors(model: nn.Module, path: Path) -> dict[str, str]:
    """All tensors of the state dict, each memory once. Returns the other names of it, each with the one in the file.

    Raises ValueError for a tensor that the format does not know, and where another one is read than was written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    state, kept, tied = model.state_dict(), {}, {}
    first: dict[Any, str] = {}
    for name, tensor in state.items():
        memory = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.numel() and memory in first:
            tied[name] = first[memory]
        else:
            first[memory] = name
            kept[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    try:
        path.touch()
        mode = path.stat().st_mode
        save_file(kept, path, metadata={"format": "pt"})
        path.chmod(mode)  # it makes files that no other user may read
        read = load_file(path)
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"safetensors cannot hold these weights: {first_line(error)}") from None
    for name, tensor in state.items():
        if not torch.equal(read[tied.get(name, name)].nan_to_num(), tensor.nan_to_num()):
            raise ValueError(f"{name} is read from the file as something else than was written")
    return tied


def trace(model: nn.Module, example: Example, any_batch: bool) -> torch.export.ExportedProgram:
    """The model's forward as a program. any_batch: the number of samples is not that of the example alone."""
    shapes = None
    if any_batch:
        collection, batch = torch.export.ShapesCollection(), torch.export.Dim("batch")
        for tensor in tensors((example.args, example.kwargs)):
            other = dict.fromkeys(range(1, tensor.dim()), torch.export.Dim.AUTO) if example.ragged else {}
            if tensor.dim() and len(tensor) == example.num_samples:
                collection[tensor] = {0: batch, **other}
        shapes = collection.dynamic_shapes(model, example.args, example.kwargs)
    with torch.no_grad(), _quietly():
        return torch.export.export(model, example.args, example.kwargs, dynamic_shapes=shapes)


def write_program(program: torch.export.ExportedProgram, path: Path) -> Callable[[Example], list[Tensor]]:
    """torch.export's file. Returns what runs it as it is read from there."""
    with _quietly():
        torch.export.save(program, path)
        loaded = torch.export.load(path).module()
    return lambda example: tensors(example.run(loaded))


def write_onnx(program: torch.export.ExportedProgram, path: Path) -> Callable[[Example], list[Tensor]]:
    """An ONNX file, with one of its name and .data for weights that it cannot hold. Returns what runs it as it is read.

    It is onnxruntime that runs it.
    """
    import onnxruntime

    size = sum(tensor.numel() * tensor.element_size() for tensor in program.state_dict.values())
    with _quietly():
        made = torch.onnx.export(program, dynamo=True, verbose=False)
    assert made is not None
    made.save(path, external_data=size > 1 << 30)  # protobuf, which the file is, ends at 2 GiB
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(example: Example) -> list[Tensor]:
        given = tensors((example.args, example.kwargs))
        feed = {taken.name: tensor.numpy() for taken, tensor in zip(session.get_inputs(), given, strict=True)}
        return [torch.from_numpy(output) for output in session.run(None, feed)]

    return run


def difference(outputs: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of any number, relative to the largest number expected. Not a number, where one is not.

    Raises ValueError where there are others.
    """
    shapes = [[list(tensor.shape) for tensor in found] for found in (outputs, expected)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"its outputs are of shapes {shapes[0]}, and the model's {shapes[1]}")
    pairs = [(one.double(), other.double()) for one, other in zip(outputs, expected, strict=True) if one.numel()]
    scale = max([other.abs().max().item() for _, other in pairs] or [0.0])
    largest = torch.tensor([(one - other).abs().max() for one, other in pairs] or [0.0], dtype=torch.float64).max()
    return largest.item() / scale if scale else largest.item()


def explained(error: Exception) -> str:
    """Why a model cannot be traced or run, in one line, with the user's own line of code where there is one."""
    line = own_line(error)
    return first_line(error) + (f" (at {line})" if line else "")


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without what torch tells of its own insides, in whichever way."""
    before, told = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
