"""Tries model, data and objective on one sample before anything is written: what does not fit is told, not trained."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from runner.config.diagnostics.own_line import failed_with
from runner.config.schema import Config
from runner.errors import InputError
from runner.training.batch import MicroBatch
from runner.training.deferred_init import probe
from runner.training.losses import ELEMENTWISE, are_log_probabilities
from runner.training.objective import Objective, Prediction
from runner.training.pytree import describe, split, tensors
from runner.training.reader import Reader, Share, reads_ahead
from runner.training.supervised import Supervised, call


def read_sample(config: Config, choices: Mapping[str, str], dataset: Any) -> tuple[Any, list[str]]:
    """The first sample as a batch of one, and what the user should know of it.

    Raises InputError where it cannot be read or collated.
    """
    reader = Reader(dataset, seed=config.seed)
    try:
        batch = reader.__getitems__(Share(0, [0]))
        if hasattr(dataset, "collate") and len(dataset) > 1:
            reader.__getitems__(Share(0, [0, 1]))  # one that drops samples shows with two
        if reads_ahead(dataset) and len(dataset) > 1:
            split(reader.__getitems__(Share(0, [0, 1])), [1, 1])
    except Exception as error:  # reading runs the user's code, which can fail in any way
        raise InputError(f"data: its first samples cannot be made a batch{failed_with(error)}") from None
    if not tensors(batch):
        raise InputError(f"data: a sample must hold tensors or numbers, but the first one is {describe(batch)}")
    notes = [
        f"data={choices['data']}: its collate draws random numbers, for all samples of a share at once; with other "
        "micro_batches or another number of ranks they are others; those drawn in __getitem__ are not"
    ]
    return batch, notes * reader.collate_draws


def fit(
    config: Config, choices: Mapping[str, str], module: nn.Module, objective: Objective, batch: Any, ragged: bool
) -> Prediction:
    """What the objective measures of a sample; a supervised one is settled on its loss.

    batch: of one sample, on the CPU. ragged: others may have other shapes. Raises InputError where it cannot.
    """
    if isinstance(objective, Supervised):
        _check_pair(config, batch)
    random_state = torch.get_rng_state()
    module.eval()
    try:
        with torch.no_grad():
            if isinstance(objective, Supervised):
                _settle(choices, module, objective, batch, ragged)
            prediction: Prediction = probe(module, objective.evaluate, MicroBatch(batch, [0]))
    except InputError:
        raise
    except Exception as error:  # the user's code, which can fail in any way
        what = "model, data and loss" if isinstance(objective, Supervised) else "model, data and objective"
        raise InputError(f"{what} do not fit: for a sample {describe(batch)} they fail{failed_with(error)}") from None
    finally:
        module.train()
        torch.set_rng_state(random_state)
    return prediction


def _check_pair(config: Config, batch: Any) -> None:
    wanted = "objective=supervised needs samples (inputs, targets), inputs a tensor, a tuple or a mapping of them"
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise InputError(
            f"{wanted}, but the data's are {describe(batch)}; change the data set, or give an objective of your own "
            "with loss(model, batch)"
        )
    inputs = batch[0]
    if not isinstance(inputs, (torch.Tensor, tuple, list, Mapping)):
        raise InputError(f"{wanted}, but the data's inputs are a {type(inputs).__name__}")
    if isinstance(inputs, torch.Tensor) and "sample_shape" in config.data:
        shape, found = list(config.data["sample_shape"]), list(inputs.shape[1:])
        if shape != found:
            raise InputError(f"data.sample_shape={shape} but the data's samples have {found}")


def _settle(choices: Mapping[str, str], module: nn.Module, objective: Supervised, batch: Any, ragged: bool) -> None:
    """Fit the loss to outputs and targets. Raises InputError where torch would take what it should not."""
    inputs, targets = batch
    reduction = getattr(objective.function, "reduction", "mean")
    if reduction == "sum":
        raise InputError(
            "loss.reduction=sum must be mean: the loss of a step is a mean over the whole batch, however it is cut; "
            "try loss.reduction=mean with another optimizer.lr"
        )
    outputs = probe(module, call, inputs)
    try:
        objective.settle(outputs, targets, ragged)
    except ValueError as error:
        text = str(error)
        raise InputError(f"loss.{text}" if "=" in text.split(":")[0] else f"loss=auto: {text}") from None
    function = objective.function
    if isinstance(function, nn.NLLLoss) and targets.dim() == 1 and not are_log_probabilities(outputs):
        raise InputError("loss=nll needs a model that ends in log_softmax; try loss=cross_entropy")
    if isinstance(function, ELEMENTWISE) and isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor):
        found = list(outputs.shape[1:])
        if outputs.shape not in (targets.shape, (*targets.shape, 1)):
            fix = "make the model give as many (num_outputs)" if targets.is_floating_point() else "try loss=auto"
            raise InputError(
                f"loss={choices['loss']} compares numbers of one shape, but the model gives {found} and the "
                f"data {list(targets.shape[1:])}; {fix}"
            )
    value = function(objective.arrange(outputs), targets)
    if not isinstance(value, torch.Tensor) or value.dim() != 0:
        if isinstance(value, torch.Tensor):
            raise InputError(
                f"loss={choices['loss']} must give one number per batch, not {list(value.shape)}; set its reduction to "
                "mean, or return the mean over the samples"
            )
        raise InputError(
            f"loss={choices['loss']} must give one number per batch, a tensor () that backward can begin with, not a "
            f"{type(value).__name__}; return the tensor, without item()"
        )
