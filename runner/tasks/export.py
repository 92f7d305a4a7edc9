"""task=export: the trained model of a run as a file that other programs read, with a JSON file that says what it is."""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.config.schema import Config
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.rendezvous import join
from runner.distributed.world import World
from runner.errors import InputError
from runner.fault_tolerance.checkpoint import weights_sha256
from runner.fault_tolerance.trained_model import Trained, restore_model
from runner.runs.provenance import git_state, versions
from runner.runs.records import lines_of
from runner.runs.run_directory import Request, read_result
from runner.runs.strict_json import dumps
from runner.tasks.example_call import Example, Examples, describe_call, describe_tensors
from runner.tasks.exported import (
    PACKAGES,
    SUFFIXES,
    check_installed,
    difference,
    explained,
    trace,
    write_onnx,
    write_program,
    write_safetensors,
)
from runner.training.pytree import tensors

WAIT_S = 3600.0  # that other ranks wait for rank 0, which exports
NUM_SAMPLES = 4  # of the data that an exported program is compared on
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}  # of outputs, relative to the largest


class Export:
    """Writes the model of config.run, with the weights of config.checkpoint.load, as config.export says.

    No process is started and no group formed for it: in a world of several ranks it is the work of rank 0 alone.
    """

    reads_run = True
    reads_checkpoint = True
    needs_experiment = False
    trains = False
    picks_split = False
    section = "export"

    def launch_jobs(self, config: Config, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Write the file and print where it is. All ranks must call it.

        Raises InputError for what cannot be exported, and where what was written is not the model; nothing stays then.
        """
        backend = as_backend(config.backend)
        world = join(rank_info, backend)
        world.begin_job(backend)
        world.agreement.timeout_s = WAIT_S
        try:
            world.agreement.share("export", lambda: str(_export(config, request)))
        except ValueError as error:
            raise InputError(*str(error).splitlines()) from None
        return {}


def _export(config: Config, request: Request) -> Path:
    """Returns the file's path. Raises ValueError or OSError as launch_jobs does."""
    assert config.run is not None
    check_installed(config.export.format)
    run = Path(config.run)
    trained = restore_model(config, request.choices, run, config.checkpoint.load)
    path = _path_of(config, request, run, trained)
    made = [folder for folder in path.parents if not folder.exists()]  # the innermost first
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"export.output={path}: its folder cannot be made ({error}); name another") from None
    partial = path.parent / f".{path.name}.tmp-{os.getpid()}"
    try:
        partial.mkdir()
        lines = _write(config, request, trained, partial / path.name)
        _take_place(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        for folder in made:
            folder.rmdir()
        raise
    partial.rmdir()
    size = sum(file.stat().st_size for file in (path, path.with_name(f"{path.name}.data")) if file.exists())
    model = f"{request.choices['model']}, {sum(p.numel() for p in trained.model.parameters()):,} parameters"
    print(f"export   {model}, {run.name} after step {trained.progress.step}", *lines, sep="\n")
    print(f"written  {path} ({size / 1e6:,.1f} MB), {path.name}.json", flush=True)
    return path


def _take_place(partial: Path, path: Path) -> None:
    """Of an earlier export of that name nothing stays: a large ONNX file has its weights in one beside it."""
    written = sorted(partial.iterdir(), key=lambda file: file.name == path.name)  # what says that all is there: last
    for file in written:
        file.replace(path.parent / file.name)
    if path.suffix == SUFFIXES["onnx"] and not any(file.name == f"{path.name}.data" for file in written):
        path.with_name(f"{path.name}.data").unlink(missing_ok=True)


def _path_of(config: Config, request: Request, run: Path, trained: Trained) -> Path:
    """Raises InputError for a file's name that says another format."""
    suffix = SUFFIXES[config.export.format]
    if config.export.output is None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", request.choices["model"])
        return run.absolute() / "export" / f"{name}-{trained.checkpoint.name}{suffix}"
    path = Path(config.export.output).absolute()
    if path.suffix != suffix or path.is_dir():
        raise InputError(
            f"export.output={config.export.output} must be a file that ends in {suffix}, as "
            f"export.format={config.export.format} writes; try export.output={path.stem or 'model'}{suffix}"
        )
    return path


def _write(config: Config, request: Request, trained: Trained, path: Path) -> list[str]:
    """The file and its JSON; what is to be told, a line each."""
    model, exported = trained.model, config.export.format
    alone = World(RankInfo(), None, as_backend(config.backend))
    facts = _facts(config, request, trained)
    lines: list[str] = []
    examples, example = None, None
    try:
        examples = Examples(config, request.choices, model, alone)
        example = examples.of(min(NUM_SAMPLES, len(examples)))
        facts |= {
            "inputs": describe_call(model, example),
            "outputs": describe_tensors(example.run(model), example.num_samples),
            "classes": examples.classes,
        }
    except InputError as error:
        if exported != "safetensors":
            raise InputError(f"export.format={exported} tries the model on samples: {error.messages[0]}") from None
        lines.append(f"inputs   not described: {error.messages[0]}")
    if exported == "safetensors":
        facts["tied"] = write_safetensors(model, path)
        lines += [f"tied     {name} is {kept}, which the file has" for name, kept in facts["tied"].items()]
        lines.append("checked  the file was read again, and holds these weights")
    else:
        assert examples is not None and example is not None
        facts["batch"], largest = _write_program(config, trained, examples, example, path)
        facts["largest_difference"] = largest
        taken = "of any number of samples" if facts["batch"] is None else "of one sample, which the model insists on"
        lines.append(f"batches  {taken}")
        lines.append(f"checked  outputs differ from the model's by {largest:.1g} of the largest at most")
    path.with_name(f"{path.name}.json").write_text(dumps(facts, indent=1, default=str) + "\n")
    return lines


def _write_program(
    config: Config, trained: Trained, examples: Examples, example: Example, path: Path
) -> tuple[int | None, float]:
    """The number of samples that it takes, None for any, and its largest difference to the model's outputs."""
    model, exported = trained.model, config.export.format
    writes: Callable[..., Callable[[Example], list[Tensor]]] = write_onnx if exported == "onnx" else write_program
    tried, program = [example, examples.of(1)], None
    if example.num_samples > 1:
        try:
            program = trace(model, example, any_batch=True)
        except Exception:  # whatever tracing does not know; a batch of one may go
            tried = tried[1:]
    batch = None if program else 1
    try:
        program = program or trace(model, tried[0], any_batch=False)
        run = writes(program, path)
        found = [(run(each), tensors(each.run(model))) for each in tried]
    except Exception as error:
        # What a tracer or a backend lacks for a model has as many kinds of errors as they have parts.
        told = f"export.format={exported}: the model cannot be exported so, with: {explained(error)}"
        if exported == "onnx" and config.precision == "fp64":
            raise InputError(f"{told}; onnxruntime lacks operators in float64: try precision=fp32") from None
        raise InputError(f"{told}; try export.format=safetensors") from None
    allowed = config.export.tolerance
    if allowed is None:
        allowed = TOLERANCES[next((p.dtype for p in model.parameters()), torch.float32)]
    largest = max((difference(*pair) for pair in found), key=lambda value: (value != value, value))
    if not largest <= allowed:
        raise InputError(
            f"export.format={exported}: the outputs of what was exported differ from the model's by {largest:.3g} of "
            f"the largest, and export.tolerance={allowed:g} is allowed; nothing was kept"
        )
    return batch, largest


def _facts(config: Config, request: Request, trained: Trained) -> dict[str, Any]:
    """What the file is, for whoever finds it without the runner."""
    assert config.run is not None
    run = Path(config.run)
    recorded, step = read_result(run) or {}, trained.progress.step
    packages = ("safetensors",) if config.export.format == "safetensors" else PACKAGES.get(config.export.format, ())
    return {
        "format": config.export.format,
        "model": {
            "name": request.choices["model"],
            "target": config.model["_target_"],
            "options": {key: value for key, value in config.model.items() if key != "_target_"},
        },
        "dtype": str(next((p.dtype for p in trained.model.parameters()), None)).removeprefix("torch."),
        "weights_sha256": weights_sha256(trained.model.state_dict()),
        "run": str(run),
        "checkpoint": {"read_as": config.checkpoint.load, "step": step, "epoch": trained.progress.epoch},
        "monitor": recorded.get("monitor"),
        "metrics": _metrics_at(run, step),
        "versions": versions() | _versions_of(packages),
        "git": {"trained": recorded.get("git"), "exported": git_state()},
        "choices": dict(request.choices),
        "configuration": asdict(config),
    }


def _metrics_at(run: Path, step: int) -> dict[str, float]:
    """What the run measured at that step."""
    found: dict[str, float] = {}
    for measured in lines_of(run):
        if measured.get("step") == step:
            found |= {key: value for key, value in measured.items() if "/" in key and not key.startswith("perf/")}
    return found


def _versions_of(packages: tuple[str, ...]) -> dict[str, str]:
    from importlib.metadata import version

    return {package: version(package) for package in packages}
