"""task=export: the trained model of a run as a file for other programs, with a JSON file that describes it."""

import contextlib
import inspect
import re
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.checkpoints.saved_state import weights_sha256
from runner.config.schema import Config
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.rendezvous import join
from runner.distributed.world import World
from runner.errors import InputError, as_input_error, failed_with, require_packages
from runner.input.datasets import load_split
from runner.input.pytree import tensors
from runner.jobs.task import LaunchingTask
from runner.jobs.trained_model import Trained, restore_model
from runner.records.provenance import git_state, versions
from runner.records.result import read_result
from runner.records.run_directory import Request
from runner.records.run_files import dumps, make_directory, read_metrics
from runner.tasks import exported

WAIT_S = 3600.0  # the other ranks' timeout while rank 0 exports
NUM_SAMPLES = 4  # samples on which an exported program is compared with the model
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}  # for outputs, relative to the largest one


class Export(LaunchingTask):
    """Exports the model of `config.run` with the weights of `config.checkpoint.load`, according to `config.export`."""

    section = "export"
    reads_run = reads_checkpoint = True

    def launch_jobs(self, config: Config, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Write the file and print its path; leave no file if that fails. All ranks must call it."""
        backend = as_backend(config.backend)
        world = join(rank_info, backend)
        world.begin_job(backend)
        world.consensus.timeout_s = WAIT_S
        with as_input_error():
            world.consensus.broadcast("export", lambda: str(_export(config, request)))
        return {}


def _export(config: Config, request: Request) -> Path:
    """Export the model and return the file's path. Raise ValueError or OSError if that fails."""
    assert config.run is not None
    kind = config.export.format
    require_packages(f"export.format={kind}", kind, *exported.PACKAGES[kind])
    run = Path(config.run)
    trained = restore_model(config, request.choices, run, config.checkpoint.load)
    path = _path_of(config, request, run, trained)
    try:
        make_directory(path.parent)
    except OSError as error:
        raise InputError(f"export.output={path}: cannot create its directory ({error}); choose another one") from None
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as partial:
        lines = _write(config, request, trained, Path(partial) / path.name)
        for file in sorted(Path(partial).iterdir(), key=lambda file: file.name == path.name):
            file.replace(path.parent / file.name)  # the file itself comes last, to mark completion
    model = f"{request.choices['model']}, {sum(p.numel() for p in trained.model.parameters()):,} parameters"
    print(f"export   {model}, {run.name} after step {trained.progress.step}", *lines, sep="\n")
    print(f"written  {path}, {path.name}.json", flush=True)
    return path


def _path_of(config: Config, request: Request, run: Path, trained: Trained) -> Path:
    """Return the path of the exported file. Raise InputError if its suffix belongs to another format."""
    suffix = exported.SUFFIXES[config.export.format]
    if config.export.output is None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", request.choices["model"])
        return run.absolute() / "export" / f"{name}-{trained.checkpoint.name}{suffix}"
    path = Path(config.export.output).absolute()
    if path.suffix != suffix or path.is_dir():
        raise InputError(
            f"export.output={config.export.output} must be a file that ends in {suffix} for "
            f"export.format={config.export.format}"
        )
    return path


def _write(config: Config, request: Request, trained: Trained, path: Path) -> list[str]:
    """Write the file and its JSON description. Return the lines to print."""
    model, kind = trained.model, config.export.format
    facts = _facts(config, request, trained)
    lines: list[str] = []
    examples: list[exported.Example] = []  # with several samples, and with one
    try:
        dataset = load_split(config, request.choices, World(RankInfo(), None, as_backend(config.backend)), config.split)
        for num_samples in (min(NUM_SAMPLES, len(dataset)), 1):
            examples.append(exported.make_example(config, request.choices, model, dataset, num_samples))
        arguments = inspect.signature(model.forward).bind(*examples[0].args, **examples[0].kwargs).arguments
        classes = getattr(dataset, "classes", None)
        facts |= {
            "inputs": exported.describe_tensors(arguments, examples[0].num_samples),
            "outputs": exported.describe_tensors(examples[0].run(model), examples[0].num_samples),
            "classes": [str(name) for name in classes] if isinstance(classes, (list, tuple)) else None,
        }
    except InputError as error:
        if kind != "safetensors":
            raise InputError(f"export.format={kind} runs the model on samples: {error.messages[0]}") from None
        lines.append(f"inputs   not described: {error.messages[0]}")
    if kind == "safetensors":
        facts["tied"] = exported.write_safetensors(model, path)
        lines += [f"tied     {name} is stored as {kept}" for name, kept in facts["tied"].items()]
        lines.append("checked  the file was read again and contains these weights")
    else:
        facts["batch"], largest = _write_program(config, model, examples, path)
        facts["largest_difference"] = largest
        batch = "any number of samples" if facts["batch"] is None else "one sample only, because of the model"
        lines.append(f"batches  {batch}")
        lines.append(f"checked  outputs differ from the model's by at most {largest:.1g} of the largest output")
    path.with_name(f"{path.name}.json").write_text(dumps(facts, indent=1, default=str) + "\n")
    return lines


def _write_program(
    config: Config, model: nn.Module, examples: list[exported.Example], path: Path
) -> tuple[int | None, float]:
    """Write a program and compare its outputs with the model's.

    Return the number of samples that it accepts (None for any number), and the largest difference of its outputs.
    """
    kind = config.export.format
    batch, program = None, None
    with contextlib.suppress(Exception):  # tracing raises many types of errors; a batch of one sample may still work
        program = exported.trace(model, examples[0], any_batch=True) if examples[0].num_samples > 1 else None
    if program is None:
        batch, examples = 1, examples[1:]
    try:
        run = exported.PROGRAM_WRITERS[kind](program or exported.trace(model, examples[0], any_batch=False), path)
        found = [exported.difference(run(each), tensors(each.run(model))) for each in examples]
    except Exception as error:
        # Each part of a tracer or backend raises other exceptions for unsupported models.
        reason = f"export.format={kind}: the export of the model failed{failed_with(error)}"
        if kind == "onnx" and config.precision == "fp64":
            raise InputError(f"{reason}; onnxruntime lacks float64 operators: try precision=fp32") from None
        raise InputError(f"{reason}; try export.format=safetensors") from None
    allowed = config.export.tolerance
    if allowed is None:
        allowed = TOLERANCES[next((p.dtype for p in model.parameters()), torch.float32)]
    largest = torch.tensor(found, dtype=torch.float64).max().item()  # NaN if any is NaN
    if not largest <= allowed:
        raise InputError(
            f"export.tolerance={allowed:g}: the outputs of the exported program differ from the model's by "
            f"{largest:.3g} of the largest output; no file was kept"
        )
    return batch, largest


def _facts(config: Config, request: Request, trained: Trained) -> dict[str, Any]:
    assert config.run is not None
    run = Path(config.run)
    recorded, step = read_result(run) or {}, trained.progress.step
    logged = [line.items() for line in read_metrics(run) if line.get("step") == step]
    metrics = {key: value for items in logged for key, value in items if "/" in key and not key.startswith("perf/")}
    return {
        "format": config.export.format,
        "model": {
            "name": request.choices["model"],
            "target": config.model["_target_"],
            "options": {key: value for key, value in config.model.items() if key != "_target_"},
        },
        "dtype": str(next((p.dtype for p in trained.model.parameters()), None)).removeprefix("torch."),
        "weights_sha256": weights_sha256(exported.tensors_of(trained.model)),
        "run": str(run),
        "checkpoint": {"read_as": config.checkpoint.load, "step": step, "epoch": trained.progress.epoch},
        "monitor": recorded.get("monitor"),
        "metrics": metrics,
        "versions": versions() | {package: version(package) for package in exported.PACKAGES[config.export.format]},
        "git": {"trained": recorded.get("git"), "exported": git_state()},
        "choices": dict(request.choices),
        "configuration": asdict(config),
    }
