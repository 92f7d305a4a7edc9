"""Writers of the export formats, and example calls, on which an exported program is compared with the model."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.checkpoints.saved_state import EXTRA_STATE
from runner.config.schema import Config
from runner.errors import InputError, first_line
from runner.input.batch import MicroBatch, cast_floating
from runner.input.pytree import map_tensors, named_tensors, tensors
from runner.input.source import Source
from runner.objectives.supervised import Supervised, call_model
from runner.optimization.precision import Precision, convert
from runner.training.components import make_objective, make_parallel

SUFFIXES = {"safetensors": ".safetensors", "torch_export": ".pt2", "onnx": ".onnx"}
PACKAGES = {"safetensors": ("safetensors",), "torch_export": (), "onnx": ("onnx", "onnxruntime", "onnxscript")}


@dataclass(frozen=True)
class Example:
    """The arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_samples: int
    ragged: bool  # the sizes of dims other than the first may vary between batches

    def run(self, model: Callable[..., Any]) -> Any:
        with torch.no_grad():
            return model(*self.args, **self.kwargs)


def make_example(
    config: Config, choices: Mapping[str, str], model: nn.Module, dataset: Source, num_samples: int
) -> Example:
    """Return the model's call for the first samples. Raise InputError if the objective does not call the model."""
    dtype = Precision(config.precision, torch.device("cpu")).parameter_dtype
    objective = make_objective(config, choices, make_parallel(config, choices))
    if isinstance(objective, nn.Module):
        convert(objective, dtype)
    calls: list[tuple[Any, Any]] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((args, dict(kwargs))), with_kwargs=True
    )
    try:
        batch = map_tensors(lambda tensor: cast_floating(tensor, dtype), dataset.read(range(num_samples)))
        with torch.no_grad():
            if isinstance(objective, Supervised):
                call_model(model, MicroBatch(batch, range(num_samples)).inputs)
            else:
                objective.predict(model, batch)
    except Exception as error:  # the user's code
        raise InputError(f"the first samples of the data cannot be predicted: {first_line(error)}") from None
    finally:
        handle.remove()
    if not calls:
        raise InputError(f"objective={choices.get('objective')}: predict(model, batch) does not call the model")
    return Example(*calls[0], num_samples, ragged=hasattr(dataset, "collate"))


def describe_tensors(tree: Any, num_samples: int) -> list[dict[str, Any]]:
    """Return name, dtype and shape of each tensor of a pytree. The size of the sample dim is given as "batch"."""
    return [
        {
            "name": path.removeprefix(".") or "outputs",
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": ["batch" if dim == 0 and size == num_samples else size for dim, size in enumerate(tensor.shape)],
        }
        for path, tensor in named_tensors(tree).items()
    ]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the state dict, without extra states of modules (`get_extra_state`)."""
    return {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(EXTRA_STATE)}


def write_safetensors(model: nn.Module, path: Path) -> dict[str, str]:
    """Write the tensors of the state dict. Of tied tensors, which share their memory, only the first is written.

    Return the names of the other tied tensors, each with the name of the first. Raise ValueError if an extra state is
    no tensor, or if the file that is read back differs.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    state, kept, tied = model.state_dict(), {}, {}
    if others := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise ValueError(
            f"export.format=safetensors: {others[0]}, which get_extra_state returns, is no tensor; try "
            "export.format=torch_export"
        )
    first: dict[Any, str] = {}
    for name, tensor in state.items():
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and memory in first:
            tied[name] = first[memory]
        else:
            first[memory] = name
            kept[name] = tensor.clone(memory_format=torch.contiguous_format)
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
    """Return the model's forward as a program for any number of samples, or only for that of the example."""
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
    """Write a file of torch.export. Return a function that runs the program that is read back from the file."""
    with _quietly():
        torch.export.save(program, path)
        loaded = torch.export.load(path).module()
    return lambda example: tensors(example.run(loaded))


def write_onnx(program: torch.export.ExportedProgram, path: Path) -> Callable[[Example], list[Tensor]]:
    """Write an ONNX file, and a second one for more than 1 GiB. Return a function that runs it with onnxruntime."""
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


PROGRAM_WRITERS = {"torch_export": write_program, "onnx": write_onnx}


def difference(outputs: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest absolute difference, relative to the largest expected value; NaN if an output is NaN."""
    shapes = [[list(tensor.shape) for tensor in found] for found in (outputs, expected)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the program's outputs have the shapes {shapes[0]}, the model's have {shapes[1]}")
    found, wanted = (torch.cat([tensor.double().flatten() for tensor in each]) for each in (outputs, expected))
    largest, scale = (found - wanted).abs().max().item(), wanted.abs().max().item()
    return largest / scale if scale else largest


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
