"""task=export: the trained model of a run in a format of other programs, with a JSON file that describes it."""

import contextlib
import inspect
import io
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.checkpoints.layout import choose_checkpoint
from runner.checkpoints.saved_state import weights_sha256, without_extra_state
from runner.checkpoints.shard_file import SavedTensor
from runner.checkpoints.weights_file import write_safetensors
from runner.config.request import Request
from runner.config.schema import Exporting
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.rendezvous import join
from runner.distributed.world import World
from runner.errors import InputError, as_input_error, failed_with, first_line, require_packages
from runner.input.batch import MicroBatch, cast_floating
from runner.input.datasets import load_split
from runner.input.pytree import map_tensors, named_tensors, tensors
from runner.input.source import Source
from runner.jobs.process_tuning import returning_large_blocks
from runner.jobs.task import LaunchingTask
from runner.jobs.trained_model import Trained, make_trained, restore_model
from runner.objectives.supervised import Supervised, call_model
from runner.optimization.precision import Precision, convert
from runner.records.provenance import git_state, versions
from runner.records.run_directory import CHECKPOINTS
from runner.records.run_files import dumps, make_directory, read_metrics
from runner.records.run_record import find_run
from runner.tasks.hf_directory import open_trained, write_directory
from runner.training.components import make_objective, make_parallel
from runner.training.model.adapters import make_adapters

SUFFIXES = {"safetensors": ".safetensors", "torch_export": ".pt2", "onnx": ".onnx"}  # other formats are directories
PACKAGES = {
    "safetensors": ("safetensors",),
    "peft": ("peft",),
    "hf": ("transformers", "safetensors"),
    "torch_export": (),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
}
WAIT_S = 3600.0  # the other ranks' timeout while rank 0 exports
NUM_SAMPLES = 4  # samples on which an exported program is compared with the model
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}  # for outputs, relative to the largest one


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


class Export(LaunchingTask):
    """Exports the model of `config.run` with the weights of `config.checkpoint.load`, according to `config.export`."""

    section = "export"
    reads_run = reads_checkpoint = True

    def launch_jobs(self, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Write the file and print its path; leave no file if that fails. All ranks must call it."""
        backend = as_backend(request.config.backend)
        world = join(rank_info, backend)
        world.begin_job(backend)
        world.consensus.timeout_s = WAIT_S
        with as_input_error():
            world.consensus.broadcast("export", lambda: str(_export(request)))
        return {}


def _export(request: Request) -> Path:
    """Export the model and return the path of the file or directory. Raise ValueError or OSError if that fails."""
    config, choices = request.config, request.command.choices
    assert config.run is not None
    kind, adapters = config.export.format, make_adapters(config.adapters, choices)
    if kind == "peft" and not adapters.is_active:
        raise InputError("export.format=peft needs a run with adapters; try export.format=safetensors")
    require_packages(f"export.format={kind}", kind, *PACKAGES[kind])
    run = Path(config.run)
    checkpoint = choose_checkpoint(run / CHECKPOINTS, config.checkpoint.load)
    path = _path_of(config.export, choices, run, checkpoint)
    weights: Mapping[str, Tensor | SavedTensor] | None = None
    if kind == "hf" and not adapters.is_active:
        with _quietly(), returning_large_blocks():
            trained, weights = open_trained(config, choices, checkpoint)
    else:
        model = make_trained(config, choices, adapters)
        is_averaged, named = config.ema.decay is not None, f"model={choices['model']}"
        trained = restore_model(model, checkpoint, named, is_averaged, config.init_from.path)
    try:
        make_directory(path.parent)
    except OSError as error:
        raise InputError(f"export.output={path}: cannot create its directory ({error}); choose another one") from None
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as partial:
        if kind == "peft":
            adapters.write(trained.model, Path(partial) / path.name)
        trained = replace(trained, model=adapters.merge(trained.model))
        weights = weights or without_extra_state(trained.model.state_dict())
        lines = _write(request, trained, weights, Path(partial) / path.name)
        for file in sorted(Path(partial).iterdir(), key=lambda file: file.name == path.name):
            file.replace(path.parent / file.name)  # the file itself comes last, to mark completion
    described = f"{choices['model']}, {sum(p.numel() for p in trained.model.parameters()):,} parameters"
    print(f"export   {described}, {run.name} after step {trained.progress.step}", *lines, sep="\n")
    print(f"written  {path}, {path.name}.json", flush=True)
    return path


def _path_of(options: Exporting, choices: Mapping[str, str], run: Path, checkpoint: Path) -> Path:
    """Return the path of the export. Raise InputError for another format's suffix, or a directory that exists."""
    suffix = SUFFIXES.get(options.format, "")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", choices["model"])
    default = run.absolute() / "export" / f"{name}-{checkpoint.name}{suffix or f'-{options.format}'}"
    path = default if options.output is None else Path(options.output).absolute()
    if not suffix and path.exists():
        raise InputError(f"export.output={path} exists already; export.format={options.format} writes a new directory")
    if suffix and (path.suffix != suffix or path.is_dir()):
        raise InputError(
            f"export.output={options.output} must be a file that ends in {suffix} for export.format={options.format}"
        )
    return path


def _write(request: Request, trained: Trained, weights: Mapping[str, Tensor | SavedTensor], path: Path) -> list[str]:
    """Write the file or directory and its JSON description. Return the lines to print."""
    config = request.config
    facts = _facts(request, trained, weights)
    if config.export.format == "hf":
        origin, tokenizer = _path_in(config.model, "config"), _path_in(config.data, "tokenizer")
        with _quietly():
            facts["tied"], lines = write_directory(
                trained.model, weights, origin, tokenizer, config.export.shard_gb, path
            )
    else:
        lines = _write_file(request, trained.model, facts, path)
    path.with_name(f"{path.name}.json").write_text(dumps(facts, indent=1, default=str) + "\n")
    return lines


def _path_in(node: Mapping[str, Any], name: str) -> Path | None:
    """Return the existing file or directory that an option of a node names, or None."""
    return Path(found) if isinstance(found := node.get(name), str) and Path(found).exists() else None


def _write_file(request: Request, model: nn.Module, facts: dict[str, Any], path: Path) -> list[str]:
    """Write the file and complete the facts that describe it. Return the lines to print."""
    config, choices = request.config, request.command.choices
    kind = config.export.format
    lines: list[str] = []
    examples: list[Example] = []  # with several samples, and with one
    try:
        dataset = load_split(config, choices, World(RankInfo(), None, as_backend(config.backend)), config.split)
        for num_samples in (min(NUM_SAMPLES, len(dataset)), 1):
            examples.append(make_example(request, model, dataset, num_samples))
        arguments = inspect.signature(model.forward).bind(*examples[0].args, **examples[0].kwargs).arguments
        classes = getattr(dataset, "classes", None)
        facts |= {
            "inputs": describe_tensors(arguments, examples[0].num_samples),
            "outputs": describe_tensors(examples[0].run(model), examples[0].num_samples),
            "classes": [str(name) for name in classes] if isinstance(classes, (list, tuple)) else None,
        }
    except InputError as error:
        if kind in PROGRAM_WRITERS:
            raise InputError(f"export.format={kind} runs the model on samples: {error.messages[0]}") from None
        lines.append(f"inputs   not described: {error.messages[0]}")
    if kind == "safetensors":
        facts["tied"] = write_safetensors(model, path)
        lines += [f"tied     {name} is stored as {kept}" for name, kept in facts["tied"].items()]
        lines.append("checked  the file was read again and contains these weights")
    elif kind in PROGRAM_WRITERS:
        facts["batch"], largest = _write_program(config.export, config.precision, model, examples, path)
        facts["largest_difference"] = largest
        batch = "any number of samples" if facts["batch"] is None else "one sample only, because of the model"
        lines.append(f"batches  {batch}")
        lines.append(f"checked  outputs differ from the model's by at most {largest:.1g} of the largest output")
    return lines


def _write_program(
    options: Exporting, precision: str, model: nn.Module, examples: list[Example], path: Path
) -> tuple[int | None, float]:
    """Write a program and compare its outputs with the model's.

    Return the number of samples that it accepts (None for any number), and the largest difference of its outputs.
    """
    kind = options.format
    batch, program = None, None
    with contextlib.suppress(Exception):  # tracing raises many types of errors; a batch of one sample may still work
        program = trace(model, examples[0], any_batch=True) if examples[0].num_samples > 1 else None
    if program is None:
        batch, examples = 1, examples[1:]
    try:
        run = PROGRAM_WRITERS[kind](program or trace(model, examples[0], any_batch=False), path)
        found = [difference(run(each), tensors(each.run(model))) for each in examples]
    except Exception as error:
        # Each part of a tracer or backend raises other exceptions for unsupported models.
        if known := _known_reason(error):
            raise InputError(f"export.format={kind}: {known}") from None
        reason = f"export.format={kind}: the export of the model failed{failed_with(error)}"
        if kind == "onnx" and precision == "fp64":
            raise InputError(f"{reason}; onnxruntime lacks float64 operators: try precision=fp32") from None
        raise InputError(f"{reason}; try export.format=safetensors") from None
    allowed = options.tolerance
    if allowed is None:
        allowed = TOLERANCES[next((p.dtype for p in model.parameters()), torch.float32)]
    largest = torch.tensor(found, dtype=torch.float64).max().item()  # NaN if any is NaN
    if not largest <= allowed:
        raise InputError(
            f"export.tolerance={allowed:g}: the outputs of the exported program differ from the model's by "
            f"{largest:.3g} of the largest output; no file was kept"
        )
    return batch, largest


def _known_reason(error: Exception) -> str | None:
    """Return what a message of torch.export means that explains torch's internals; None for any other message."""
    if found := re.search(r"Found <class '([\w.]+)'> in output", str(error)):
        return (
            f"forward returns a {found[1].rpartition('.')[2]}, but a program returns only tensors, also in lists and "
            "dicts; change forward, for a model of transformers by config.use_cache=false"
        )
    if found := re.search(r"Guard failed: (.*)", str(error)):
        return f"the model works only for the sizes of its first samples ({found[1]}); try export.format=safetensors"
    return None


def _facts(request: Request, trained: Trained, weights: Mapping[str, Tensor | SavedTensor]) -> dict[str, Any]:
    config, choices = request.config, request.command.choices
    assert config.run is not None
    run = Path(config.run)
    recorded, step = find_run(run), trained.progress.step
    logged = [line.items() for line in read_metrics(run) if line.get("step") == step]
    metrics = {key: value for items in logged for key, value in items if "/" in key and not key.startswith("perf/")}
    return {
        "format": config.export.format,
        "model": {
            "name": choices["model"],
            "target": config.model["_target_"],
            "options": {key: value for key, value in config.model.items() if key != "_target_"},
        },
        "dtype": str(next((p.dtype for p in trained.model.parameters()), None)).removeprefix("torch."),
        "weights_sha256": weights_sha256(weights),
        "run": str(run),
        "checkpoint": {"read_as": config.checkpoint.load, "step": step, "epoch": trained.progress.epoch},
        "monitor": recorded.monitor,
        "metrics": metrics,
        "versions": versions() | {package: version(package) for package in PACKAGES[config.export.format]},
        "git": {"trained": recorded.git, "exported": git_state()},
        "choices": dict(choices),
        "configuration": asdict(config),
    }


def make_example(request: Request, model: nn.Module, dataset: Source, num_samples: int) -> Example:
    """Return the model's call for the first samples. Raise InputError if the objective does not call the model."""
    config, choices = request.config, request.command.choices
    dtype = Precision(config.precision, torch.device("cpu")).parameter_dtype
    objective = make_objective(config.objective, config.loss, choices, make_parallel(config.parallel, choices))
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


def trace(model: nn.Module, example: Example, any_batch: bool) -> torch.export.ExportedProgram:
    """Return the model's forward as a program for any number of samples, or only for that of the example."""
    shapes = None
    if any_batch:
        collection, batch = torch.export.ShapesCollection(), torch.export.Dim("batch")
        for tensor in tensors((example.args, example.kwargs)):
            other = dict.fromkeys(range(1, tensor.dim()), torch.export.Dim.AUTO) if example.ragged else {}
            if tensor.dim() and len(tensor) == example.num_samples:
                collection[tensor] = {0: batch, **other}
            elif tensor.dim():  # such as the nodes of graphs
                collection[tensor] = {0: torch.export.Dim.AUTO, **other}
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
