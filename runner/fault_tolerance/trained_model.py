"""The trained model of a run, whole and in this process, whatever world and mode have trained it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from runner.config.diagnostics.import_target import locate
from runner.config.diagnostics.signature import check_options, provided
from runner.config.instantiate import make_group
from runner.config.own_folders import add_to_path
from runner.config.recorded import read_choices, read_for_model
from runner.config.schema import Config
from runner.errors import InputError
from runner.fault_tolerance.checkpoint import choose
from runner.runs.run_directory import CHECKPOINTS
from runner.runs.train_state import LAST, TrainState, read_train_state
from runner.training.precision import Precision
from runner.training.saved_state import MODEL, SavedState, check_fits


@dataclass(frozen=True)
class Trained:
    """A model on the CPU, in evaluation mode, and the checkpoint that its weights are of."""

    model: nn.Module
    checkpoint: Path
    progress: TrainState


def load_trained(run: Path, checkpoint: str = LAST, trust: bool = False) -> nn.Module:
    """The model of a run directory with the weights that the run evaluated, on the CPU, in evaluation mode.

    checkpoint: last, best or step_N. Its class and options are those that the run recorded, and the run's own folders
    (--config-dir) are put on sys.path. It has the dtype of the run's parameters: float64 for precision=fp64, else
    float32. Raises InputError where there is no such run or checkpoint, or the model does not fit it any more, and
    where the directory is another user's, names Python of theirs, and is not to be trusted.
    """
    config, folders = read_for_model(run, trust)
    add_to_path(folders)
    if messages := check_options("model", config.model, provided("model", config.model)):
        raise InputError(*(f"{run}: {message}" for message in messages))
    try:
        return restore_model(config, read_choices(run), run, checkpoint).model
    except ValueError as error:
        raise InputError(*str(error).splitlines()) from None


def restore_model(config: Config, choices: Mapping[str, str], run: Path, checkpoint: str = LAST) -> Trained:
    """As load_trained, of the model that the configuration names. The folders of the run must be on sys.path.

    Raises ValueError where the checkpoint is not there or damaged, or is not of this model.
    """
    path = choose(run / CHECKPOINTS, checkpoint)
    model = make_model(config, choices)
    saved = SavedState.open(path)
    if config.ema.decay is not None:  # as task=evaluate
        saved = saved.evaluated()
    weights = {MODEL + name: tensor for name, tensor in model.state_dict().items()}
    shapes = {name.removeprefix(MODEL): tuple(tensor.shape) for name, tensor in weights.items()}
    # What a loss or an objective trains is among the weights of a run, and is no part of its model.
    ignored = ("loss.", "objective.")
    typed = f"model={choices.get('model', config.model['_target_'])}"
    check_fits(saved, shapes, typed, MODEL, shapes.keys(), ignored)
    saved.read(weights)
    return Trained(model.eval(), path, read_train_state(path))


def make_model(config: Config, choices: Mapping[str, str]) -> nn.Module:
    """The model by itself, with initial weights, in the dtype of the run's parameters. On the CPU.

    What the constructor draws, such as a buffer that is not saved, is as in the run; torch's own random state stays.
    """
    node = dict(config.model)
    if hasattr(locate(node["_target_"]), "place") and node.get("devices") is not None:
        node["devices"] = None  # those of the machine that it was trained on
    random_state = torch.get_rng_state()
    torch.default_generator.manual_seed(config.seed)
    try:
        model: nn.Module = make_group(choices, "model", node)
    finally:
        torch.set_rng_state(random_state)
    cpu = torch.device("cpu")
    return model.to(device=cpu, dtype=Precision(config.precision, cpu).parameter_dtype)
