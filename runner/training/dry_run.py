"""A dry run of model, data and objective with one sample or two, before anything is written."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from runner.config.schema import Config
from runner.errors import InputError, as_input_error, failed_with
from runner.input.batch import MicroBatch, cast_floating
from runner.input.pytree import describe, map_tensors, split, tensors
from runner.input.rng import isolated
from runner.input.source import Source
from runner.objectives.losses import ELEMENTWISE, are_log_probabilities
from runner.objectives.objective import Objective, Prediction, loss_groups
from runner.objectives.supervised import Supervised, call_model
from runner.optimization.parameter_patterns import counted
from runner.training.model.deferred_init import probe
from runner.training.model.forward_state import restoring_state


def read_float32(config: Config, source: Source, indices: Sequence[int]) -> Any:
    """Return the samples as a batch, with floating-point data in float32, the precision of a new model."""
    return map_tensors(lambda tensor: cast_floating(tensor, torch.float32), source.read(indices, seed=config.seed))


def read_sample(
    config: Config, choices: Mapping[str, str], source: Source, indices: Sequence[int]
) -> tuple[Any, list[str]]:
    """Return the result of `read_float32`, and warnings. Raise InputError if samples cannot be read or collated."""
    try:
        batch = read_float32(config, source, indices)
        if len(source) > 1 and (hasattr(source, "collate") or source.reads_ahead):
            pair = source.read([0, 1], seed=config.seed)  # detects a collate that drops samples
            if source.reads_ahead:
                split(pair, [1, 1])
    except Exception as error:  # custom code can raise anything
        raise InputError(f"data: its first samples cannot be collated into a batch{failed_with(error)}") from None
    if not tensors(batch):
        raise InputError(f"data: a sample must contain tensors or numbers, but the first one is {describe(batch)}")
    if not source.collate_draws.has_drawn:
        return batch, []
    return batch, [
        f"data={choices['data']}: its collate draws random numbers, once for all samples of a local micro-batch; they "
        "depend on micro_batches and the number of ranks, unlike those drawn in __getitem__"
    ]


@dataclass(frozen=True)
class DryRun:
    """The objective's prediction for a sample or two, and side effects of the forward."""

    prediction: Prediction
    written: list[str]  # names of the trained parameters that the forward changes in place
    differentiates: bool  # the forward computes gradients, for example those of a gradient penalty


def dry_run(
    config: Config,
    choices: Mapping[str, str],
    module: nn.Module,
    objective: Objective,
    micro_batch: MicroBatch,
    ragged: bool,
) -> DryRun:
    """Evaluate the objective for a sample or two on the CPU. A supervised objective first chooses its loss.

    `ragged` means that other samples may have other shapes. Raises InputError if the components do not fit each other.
    """
    batch = micro_batch.data
    if isinstance(objective, Supervised):
        _check_pair(config, batch)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    module.eval()
    try:
        with torch.no_grad(), isolated():
            if isinstance(objective, Supervised):
                _settle(choices, module, objective, batch, ragged)
            result: DryRun = probe(module, _observe, trained, objective, micro_batch)
    except InputError:
        raise
    except Exception as error:  # custom code can raise anything
        what = "model, data and loss" if isinstance(objective, Supervised) else "model, data and objective"
        hint = "; a dry run has no process group: to gather rows of all ranks, use Objective.gather"
        advice = hint if "process group" in str(error) else ""
        raise InputError(
            f"{what} do not fit: for a sample {describe(batch)} they fail{failed_with(error)}{advice}"
        ) from None
    finally:
        module.train()
        objective.take_logged(torch.device("cpu"))
    return result


def _observe(model: nn.Module, trained: set[str], objective: Objective, micro_batch: MicroBatch) -> DryRun:
    parameters = {name: tensor for name, tensor in model.named_parameters() if name in trained}
    before = {name: tensor._version for name, tensor in parameters.items()}  # in-place operators increase it
    with _SeeingGradients() as mode:
        prediction = objective.evaluate(model, micro_batch)
    written = [name for name, tensor in parameters.items() if tensor._version != before[name]]
    return DryRun(prediction, written, mode.has_seen)


class _SeeingGradients(TorchFunctionMode):
    has_seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_seen |= func in (torch.autograd.grad, torch.Tensor.backward)
        return func(*args, **(kwargs or {}))


def compare_samples(
    config: Config, choices: Mapping[str, str], module: nn.Module, objective: Objective, source: Source
) -> list[str]:
    """Return a warning if the custom loss of two samples is not the sum of their separate losses.

    Such a loss depends on the number of ranks and micro-batches. The check does not detect a loss that draws random
    numbers, that differs from a sum only in training mode or for more than two samples, or that raises an exception.
    """
    function = objective.function if isinstance(objective, Supervised) else objective
    is_custom = type(function).__module__.partition(".")[0] not in ("torch", "runner")
    if objective.gathers or not is_custom or len(source) < 2:
        return []

    def measure(*indices: int) -> torch.Tensor:
        batch = read_float32(config, source, indices)
        losses = [*objective.evaluate(module, MicroBatch(batch, indices)).losses.values()]
        weights = [torch.as_tensor(loss.weight, dtype=torch.float64) for loss in losses]
        return torch.stack([torch.stack([loss.sum, weight]) for loss, weight in zip(losses, weights, strict=True)])

    try:
        with restoring_state(module, objective), torch.no_grad():
            module.eval()
            both, again = measure(0, 1), measure(0, 1)
            apart = measure(0) + measure(1)
    except Exception:  # the dry run has accepted one sample; training reports an error with two
        return []
    if not torch.equal(both, again) or torch.allclose(both, apart, rtol=1e-3, atol=1e-6, equal_nan=True):
        return []
    component = "loss" if isinstance(objective, Supervised) else "objective"
    return [
        f"{component}={choices[component]}: the loss of two samples is {_mean(both):.4g}, but the mean of their "
        f"separate losses is {_mean(apart):.4g}, so it depends on the number of ranks and micro_batches; if it "
        "compares samples, declare gathers = True in an objective and use self.gather"
    ]


def check_all_used(
    config: Config,
    choices: Mapping[str, str],
    module: nn.Module,
    objective: Objective,
    source: Source,
    local_size: int,
    on_device: Callable[[Any], Any],
) -> None:
    """Raise InputError if a loss does not depend on all parameters that it trains, in training mode.

    A model may choose parameters by the samples. So if two samples do not use all of them, those of a local micro-batch
    are tried. Exceptions are ignored, because training reports them.
    """
    unused: list[str] = []
    for count in (2, max(2, local_size)):
        indices = range(min(count, len(source)))
        try:
            with restoring_state(module, objective):
                micro_batch = MicroBatch(on_device(source.read(indices, seed=config.seed)), indices)
                unused = _find_unused(module, objective, micro_batch)
        except Exception:
            return
        finally:
            module.zero_grad()
        if not unused:
            return
    raise InputError(
        f"parallel={choices['parallel']} needs the gradients of all trained parameters, but the loss does not depend "
        f"on {counted(unused)}; try parallel.find_unused_parameters=true"
    )


def _find_unused(module: nn.Module, objective: Objective, micro_batch: MicroBatch) -> list[str]:
    unused: list[str] = []
    for group in loss_groups(objective, module):
        objective.measure(module, group.name, micro_batch).value.sum().backward()
        without = {parameter for parameter in group.parameters if parameter.requires_grad and parameter.grad is None}
        unused += [name for name, parameter in module.named_parameters() if parameter in without]
        module.zero_grad()
    return unused


def _mean(losses: torch.Tensor) -> float:
    """Return the sum of the means of all losses; `losses` is (number of losses, 2, ...)."""
    return float((losses[:, 0] / losses[:, 1]).sum())


def _check_pair(config: Config, batch: Any) -> None:
    """Raise InputError unless the batch is (inputs, targets) with inputs of the configured shape."""
    is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    if not is_pair or not isinstance(batch[0], (torch.Tensor, tuple, list, Mapping)):
        raise InputError(
            "objective=supervised needs samples (inputs, targets); inputs are a tensor, a tuple or a mapping, but "
            f"the data's are {describe(batch)}; change the dataset, or write a custom objective with loss(model, batch)"
        )
    inputs = batch[0]
    if isinstance(inputs, torch.Tensor) and "sample_shape" in config.data:
        shape, found = list(config.data["sample_shape"]), list(inputs.shape[1:])
        if shape != found:
            raise InputError(f"data.sample_shape={shape} but the data's samples have {found}")


def _settle(choices: Mapping[str, str], module: nn.Module, objective: Supervised, batch: Any, ragged: bool) -> None:
    """Settle the objective with one sample. Raise InputError also for wrong combinations that torch accepts."""
    inputs, targets = batch
    reduction = getattr(objective.function, "reduction", "mean")
    if reduction == "sum":
        raise InputError(
            "loss.reduction=sum must be mean: the loss of a step is a mean over the whole batch, however it is split; "
            "try loss.reduction=mean with another optimizer.lr"
        )
    outputs = probe(module, call_model, inputs)
    with as_input_error():
        objective.settle(outputs, targets, ragged)
    function = objective.function
    if isinstance(function, nn.NLLLoss) and targets.dim() == 1 and not are_log_probabilities(outputs):
        raise InputError("loss=nll needs a model that ends in log_softmax; try loss=cross_entropy")
    are_tensors = isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)
    if isinstance(function, ELEMENTWISE) and are_tensors and outputs.shape not in (targets.shape, (*targets.shape, 1)):
        fix = "change the model's num_outputs" if targets.is_floating_point() else "try loss=auto"
        raise InputError(
            f"loss={choices['loss']} compares numbers of one shape, but the model returns "
            f"{list(outputs.shape[1:])} and the data {list(targets.shape[1:])}; {fix}"
        )
    value = function(*objective.arrange(outputs, targets))
    if not isinstance(value, torch.Tensor) or value.dim() != 0:
        raise InputError(
            f"loss={choices['loss']} must return a scalar tensor, the mean over the samples, not {describe(value)}; "
            "set its reduction to mean, and return the tensor without calling item()"
        )
