"""export.format=hf: a trained model of transformers as a directory that its from_pretrained reads."""

import copy
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.checkpoints.saved_state import SavedState, without_extra_state
from runner.checkpoints.shard_file import SavedTensor, write_tensors
from runner.checkpoints.weights_file import INDEX
from runner.config.instantiate import make_group
from runner.config.schema import Config
from runner.errors import first_line
from runner.jobs.trained_model import Trained, restore_model
from runner.optimization.parameter_patterns import names_of
from runner.optimization.precision import Precision, convert
from runner.training.model.deferred_init import build_deferred

GENERATION = "generation_config.json"
# Files of a tokenizer or a processor.
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template.*",
    "additional_chat_templates/*",
    "*processor_config.json",
)


def open_trained(
    config: Config, choices: Mapping[str, str], checkpoint: Path
) -> tuple[Trained, dict[str, SavedTensor]]:
    """Return the model, on the meta device if possible, and the weights that the run evaluated, to be read one by one.

    Raise ValueError if the model is not one of transformers, or if the checkpoint does not fit it.
    """
    named = f"model={choices['model']}"
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        model = build_deferred(choices["model"], lambda: make_group(choices, "model", dict(config.model))).module
    class_of(model)
    convert(model, Precision(config.precision, torch.device("cpu")).parameter_dtype)
    is_averaged = config.ema.decay is not None
    trained = restore_model(model, checkpoint, named, is_averaged)
    saved = SavedState.open(checkpoint)
    found = (saved.evaluated() if is_averaged else saved).model()
    state = without_extra_state(model.state_dict())
    return trained, {name: found[name].converted(tensor.dtype) for name, tensor in state.items()}


def class_of(model: nn.Module) -> Any:
    """Return the class of transformers that the model is an instance of. Raise ValueError if there is none."""
    for kind in type(model).__mro__:
        if kind.__module__.startswith("transformers.models."):
            return kind
    raise ValueError(
        f"export.format=hf: {type(model).__name__} is not a model of transformers; try export.format=safetensors"
    )


def write_directory(
    model: Any,
    weights: Mapping[str, Tensor | SavedTensor],
    origin: Path | None,
    tokenizer: Path | None,
    shard_gb: float,
    path: Path,
) -> tuple[dict[str, str], list[str]]:
    """Write the directory, and read it with from_pretrained to compare each weight.

    origin: The file or directory from which the model was configured, or None. tokenizer: The file or directory of the
    data's tokenizer; None means that of `origin`. Return the names of tied weights, each with the name under which the
    directory contains it, and the lines to print. Raise ValueError if transformers cannot read the directory, or reads
    other weights.
    """
    kind, tied = class_of(model), _tied(model)
    saved = {name: SavedTensor.of(each) if isinstance(each, Tensor) else each for name, each in weights.items()}
    path.mkdir()
    _write_weights({name: tensor for name, tensor in saved.items() if name not in tied}, shard_gb, path)
    config = copy.deepcopy(model.config)
    config.architectures = [kind.__name__]
    config.dtype = model.dtype
    config.save_pretrained(path)
    directory = origin if origin is not None and origin.is_dir() else None
    if model.can_generate() and (directory is None or not _copy(directory, [GENERATION], path)):
        model.generation_config.to_json_file(path / GENERATION)
    source = tokenizer or directory
    copied = _copy(source, TOKENIZER, path) if source is not None else []
    _check(kind, path, saved)
    return tied, [
        f"files    {', '.join(sorted(file.name for file in path.iterdir()))}",
        f"copied   {', '.join(copied)}, from {source}" if copied else "copied   no file of a tokenizer",
        *(f"tied     {name} is stored as {kept}" for name, kept in tied.items()),
        f"checked  {kind.__name__}.from_pretrained returns these weights",
    ]


def _tied(model: Any) -> dict[str, str]:
    """Return the names of tied weights that are not written, each with the name of the weight that is."""
    tied: dict[str, str] = {}
    for names in names_of(without_extra_state(model.state_dict(keep_vars=True)).items()).values():
        # Of these names, from_pretrained ties the weight again.
        kept = next((name for name in names if name not in model.all_tied_weights_keys), names[0])
        tied.update({name: kept for name in names if name != kept})
    return tied


def _write_weights(weights: Mapping[str, SavedTensor], shard_gb: float, path: Path) -> None:
    """Write the weights to one file, or to several files of at most `shard_gb` and their index.

    A single weight that is larger than `shard_gb` has a file of its own.
    """
    shards: list[dict[str, SavedTensor]] = [{}]
    total = size = 0
    for name, tensor in weights.items():
        nbytes = torch.Size(tensor.shape).numel() * tensor.dtype.itemsize
        if shards[-1] and size + nbytes > shard_gb * 1e9:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size, total = size + nbytes, total + nbytes
    if len(shards) == 1:
        return write_tensors(path / "model.safetensors", shards[0])
    located: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_tensors(path / file, shard)
        located |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": located}
    (path / f"model{INDEX}").write_text(json.dumps(index, indent=2) + "\n")


def _copy(source: Path, patterns: Iterable[str], path: Path) -> list[str]:
    """Copy a file as tokenizer.json, or the matching files of a directory. Return the names of the copies."""
    if source.is_file():
        found = {"tokenizer.json": source}
    else:
        matching = {file for pattern in patterns for file in source.glob(pattern) if file.is_file()}
        found = {str(file.relative_to(source)): file for file in sorted(matching)}
    for name, file in found.items():
        (path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, path / name)
    return [*found]


def _check(kind: Any, path: Path, weights: Mapping[str, SavedTensor]) -> None:
    """Raise ValueError unless from_pretrained returns exactly these weights. It maps the files into memory."""
    named = f"export.format=hf: {kind.__name__}.from_pretrained"
    try:
        read = kind.from_pretrained(path, dtype="auto", local_files_only=True).state_dict()
    except Exception as error:  # transformers raises many types of errors
        raise ValueError(
            f"{named} cannot read the directory ({first_line(error)}); try export.format=safetensors"
        ) from None
    for name, saved in weights.items():
        expected, found = saved.read(), read.get(name)
        if found is None or found.dtype != expected.dtype or not torch.equal(found.nan_to_num(), expected.nan_to_num()):
            raise ValueError(f"{named} does not return {name} as it was written; try export.format=safetensors")
