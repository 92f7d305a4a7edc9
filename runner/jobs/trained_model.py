"""The full trained model of a run in this process, for any world and mode of the training."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from runner.checkpoints.base_weights import complete
from runner.checkpoints.extra_state import load_extra_state, with_extra_state
from runner.checkpoints.layout import LAST, TrainState, choose_checkpoint, read_train_state
from runner.checkpoints.saved_state import SavedState, read_weights, without_extra_state
from runner.config.changes import read_choices, read_config
from runner.config.custom_dirs import add_to_path
from runner.config.diagnostics.import_target import locate
from runner.config.diagnostics.signature import check_options, provided
from runner.config.recorded_code import RECORDED, importing_code_of
from runner.config.resume import read_arguments
from runner.config.schema import Config
from runner.errors import InputError, as_input_error
from runner.optimization.precision import Precision, convert
from runner.records.run_directory import CHECKPOINTS
from runner.training.model.adapters import Adapters, make_adapters, make_model


@dataclass(frozen=True)
class Trained:
    """A model on the CPU, in evaluation mode, and the checkpoint of its weights."""

    model: nn.Module
    checkpoint: Path
    progress: TrainState


def load_trained(
    run: Path, checkpoint: str = LAST, trust: bool = False, code: str = RECORDED, init_from: str | None = None
) -> nn.Module:
    """Return the model of a run with the weights that the run evaluated, on the CPU, in evaluation mode.

    The class and options of the model are those that the run recorded, and its custom directories (--config-dir) are
    added to sys.path. The dtype is that of the run's parameters: float64 for precision=fp64, else float32. Raises
    InputError if the run or the checkpoint does not exist, if the checkpoint does not fit the model, or if the
    directory belongs to another user and is not trusted. `checkpoint` and `code` are as in `runner.api.runs.Run.model`,
    and `init_from` is as in `runner.api.runs.open_run`.
    """
    config, named = read_config(run), f"run={run}"
    if init_from is not None:
        before = config.init_from.path
        config.model = {key: init_from if value == before else value for key, value in config.model.items()}
        config.init_from.path = init_from
    _, config_dirs = read_arguments(run, named, trust)
    if code != RECORDED and (missing := [directory for directory in config_dirs if not Path(directory).is_dir()]):
        raise InputError(f"{named}: its --config-dir={missing[0]} no longer exists; restore it")
    add_to_path(config_dirs)
    with importing_code_of(run if code == RECORDED else None):
        if messages := check_options("model", config.model, provided("model", config.model)):
            raise InputError(*(f"{run}: {message}" for message in messages))
        with as_input_error():
            path, choices = choose_checkpoint(run / CHECKPOINTS, checkpoint), read_choices(run)
            adapters = make_adapters(config.adapters, choices)
            model = make_trained(config, choices, adapters)
            named_model = f"model={choices.get('model', config.model['_target_'])}"
            is_averaged = config.ema.decay is not None
            restored = restore_model(model, path, named_model, is_averaged, config.init_from.path)
            return adapters.merge(restored.model)


def restore_model(
    model: nn.Module, checkpoint: Path, named: str, is_averaged: bool, base: str | None = None
) -> Trained:
    """Load the weights of a checkpoint into the model, those that the run evaluated.

    named: The model in messages. is_averaged: The run averages the weights. base: A copy of the frozen weights,
    as in `complete`. Raises ValueError if the checkpoint is damaged or does not fit the model.
    """
    saved = complete(SavedState.open(checkpoint), base)
    if is_averaged:  # as task=evaluate
        saved = saved.evaluated()
    # The trained parameters of a loss or an objective are saved with the weights, but are not part of the model.
    ignored = ("loss.", "objective.")
    read_weights(saved, without_extra_state(model.state_dict()), subject=named, ignored=ignored)
    load_extra_state(saved, with_extra_state(model), named, ignored)
    return Trained(model.eval(), checkpoint, read_train_state(checkpoint))


def make_trained(config: Config, choices: Mapping[str, str], adapters: Adapters) -> nn.Module:
    """Return the model with initial weights on the CPU, in the dtype of the run's parameters.

    Random values of the constructor, such as a buffer that is not saved, equal the run's; torch's random state is kept.
    """
    node = dict(config.model)
    if hasattr(locate(node["_target_"]), "place") and node.get("devices") is not None:
        node["devices"] = None  # they belong to the machine that trained the model
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        model = make_model(choices, node, adapters)
    cpu = torch.device("cpu")
    convert(model.to(device=cpu), Precision(config.precision, cpu).parameter_dtype)
    return model
