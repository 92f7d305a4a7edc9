"""Writers of the export formats. Each reads its file again, so that the file can be compared with the model."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.errors import first_line
from runner.input.pytree import tensors
from runner.tasks.example_call import Example

SUFFIXES = {"safetensors": ".safetensors", "torch_export": ".pt2", "onnx": ".onnx"}
PACKAGES = {"safetensors": ("safetensors",), "torch_export": (), "onnx": ("onnx", "onnxruntime", "onnxscript")}


def write_safetensors(model: nn.Module, path: Path) -> dict[str, str]:
    """Write the tensors of the state dict; of tied tensors, which share their memory, only the first.

    Return the names of the others, each with the name of the first. Raise ValueError if safetensors does not support a
    tensor, or if the file does not read back as it was written.
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
        path.chmod(mode)  # safetensors creates files that other users cannot read
        read = load_file(path)
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"safetensors cannot store these weights: {first_line(error)}") from None
    for name, tensor in state.items():
        if not torch.equal(read[tied.get(name, name)].nan_to_num(), tensor.nan_to_num()):
            raise ValueError(f"{name} does not read back from the file as it was written")
    return tied


def trace(model: nn.Module, example: Example, any_batch: bool) -> torch.export.ExportedProgram:
    """Return the model's forward as a program, which accepts any number of samples or only that of the example."""
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
    """Write a file of torch.export. Return a function that runs the program as read from the file."""
    with _quietly():
        torch.export.save(program, path)
        loaded = torch.export.load(path).module()
    return lambda example: tensors(example.run(loaded))


def write_onnx(program: torch.export.ExportedProgram, path: Path) -> Callable[[Example], list[Tensor]]:
    """Write an ONNX file, and for weights of more than 1 GiB a second file with the suffix .data.

    Return a function that runs the file with onnxruntime.
    """
    import onnxruntime

    size = sum(tensor.numel() * tensor.element_size() for tensor in program.state_dict.values())
    with _quietly():
        onnx_program = torch.onnx.export(program, dynamo=True, verbose=False)
    assert onnx_program is not None
    onnx_program.save(path, external_data=size > 1 << 30)  # the file is a protobuf, which is limited to 2 GiB
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(example: Example) -> list[Tensor]:
        inputs = zip(session.get_inputs(), tensors((example.args, example.kwargs)), strict=True)
        feed = {argument.name: tensor.numpy() for argument, tensor in inputs}
        return [torch.from_numpy(output) for output in session.run(None, feed)]

    return run


def difference(outputs: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest absolute difference, relative to the largest expected number; NaN if an output is NaN.

    Raises ValueError if the shapes differ.
    """
    shapes = [[list(tensor.shape) for tensor in found] for found in (outputs, expected)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"its outputs have the shapes {shapes[0]}, the model's have {shapes[1]}")
    pairs = [(one.double(), other.double()) for one, other in zip(outputs, expected, strict=True) if one.numel()]
    scale = max([other.abs().max().item() for _, other in pairs] or [0.0])
    largest = torch.tensor([(one - other).abs().max() for one, other in pairs] or [0.0], dtype=torch.float64).max()
    return largest.item() / scale if scale else largest.item()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress torch's internal log lines, warnings and prints."""
    before, ignored = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(ignored), contextlib.redirect_stderr(ignored):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
