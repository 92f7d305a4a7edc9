"""A dry run of model, data and objective with one sample or two, before anything is written."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from runner.distributed.sync_batch_norm import CountValues
from runner.errors import InputError, as_input_error, failed_with, is_out_of_memory
from runner.input.batch import MicroBatch
from runner.input.pytree import describe, tensors
from runner.input.rng import isolated, seed_all
from runner.objectives.losses import CLASSES, ELEMENTWISE, Auto, are_log_probabilities
from runner.objectives.objective import Objective, Prediction, loss_groups
from runner.objectives.supervised import Supervised, call_model
from runner.optimization.parameter_patterns import counted
from runner.training.components import Components
from runner.training.draws.extremes import Extremes
from runner.training.draws.following import Draws
from runner.training.float_classes import hint_at_classes
from runner.training.model.deferred_init import probe, probe_with_random_weights
from runner.training.model.forward_state import restoring_state
from runner.training.model.submodules import offered, stages_or_blocks
from runner.training.packing_check import check_packing
from runner.training.slice_check import check_slices, differ

_NARROW = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64)
# In messages of torch.
_OF_DTYPES = re.compile(r"dtype|scalar type|bool|not implemented for|Input type|Byte|Char|Short")


@dataclass(frozen=True)
class DryRun:
    """The objective's prediction for a sample or two, and side effects of the forward."""

    prediction: Prediction
    written: list[str]  # names of the trained parameters that the forward changes in place
    differentiates: bool  # the forward computes gradients, for example those of a gradient penalty
    needs_two: bool = False  # in evaluation, BatchNorm uses the statistics of the batch, of one value per sample
    class_hint: str = ""  # what to do if the targets, for which loss=auto has chosen a regression, are classes


def dry_run(components: Components) -> DryRun:
    """Evaluate the objective for a sample or two on the CPU. A supervised objective first chooses its loss.

    Raises InputError if the components do not fit each other.
    """
    module, objective, micro_batch = components.module, components.objective, components.sample()
    hint = ""
    if isinstance(objective, Supervised):
        _check_pair(micro_batch.data, components.samples.input_shape)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    module.eval()
    try:
        with torch.no_grad(), isolated():
            if isinstance(objective, Supervised):
                hint = _settle(components, objective, micro_batch)
            seed_all(0)
            result: DryRun = probe(module, _observe, trained, objective, micro_batch)
            if isinstance(objective, Supervised):
                check_packing(components, micro_batch)
            parallel = components.parallel
            pipelines = parallel.splits_parameters and parallel.supported_objectives == "supervised"
            if pipelines and offered(module, "stages"):
                _check_stages(components, micro_batch.inputs)
            if isinstance(objective, Supervised) and parallel.resolved_axes.sequence > 1:
                check_slices(components, objective, micro_batch, result.prediction)
    except InputError:
        raise
    except Exception as error:  # custom code can raise anything
        raise _do_not_fit(components, micro_batch.data, error) from None
    finally:
        module.train()
    return replace(result, class_hint=hint)


def _check_stages(components: Components, inputs: Any) -> None:
    """Raise InputError unless the composition of the model's stages is its forward, with random weights."""
    choices = components.choices
    refused = f"parallel={choices['parallel']}: the composition of the stages() of model={choices['model']}"

    def run(model: nn.Module) -> tuple[Any, Any]:
        seed_all(0)
        expected = call_model(model, inputs)
        seed_all(0)  # because a model may draw in evaluation mode
        composed = inputs
        for stage in stages_or_blocks(model):
            composed = call_model(stage, composed)
        return expected, composed

    try:
        expected, composed = probe_with_random_weights(components.module, run)
    except Exception as error:  # custom code can raise anything
        raise InputError(f"{refused} fails for {describe(inputs)}{failed_with(error)}; try parallel=fsdp") from None
    pairs = zip(tensors(composed), tensors(expected), strict=True)
    if describe(composed) == describe(expected) and not any(differ(*pair) for pair in pairs):
        return
    raise InputError(f"{refused} is not its forward: it returns other values; change stages(), or try parallel=fsdp")


def _observe(model: nn.Module, trained: set[str], objective: Objective, micro_batch: MicroBatch) -> DryRun:
    parameters = {name: tensor for name, tensor in model.named_parameters() if name in trained}
    before = {name: tensor._version for name, tensor in parameters.items()}  # in-place operators increase it
    with _SeeingGradients() as mode, CountValues() as values:
        prediction = objective.evaluate(model, micro_batch)
    written = [name for name, tensor in parameters.items() if tensor._version != before[name]]
    return DryRun(prediction, written, mode.has_seen, values.fewest == micro_batch.num_samples)


def check_training(components: Components) -> bool:
    """Compute the losses of the first sample in training mode. Raise InputError if that fails.

    Return True if BatchNorm gets one value per channel from each sample, and therefore needs two of them. Two copies of
    the sample are tried for this reason, and otherwise one, because a dataset without `collate` may have samples that
    only fit into batches of one.
    """
    module, objective = components.module, components.objective
    errors, data = list[InputError](), None
    for count in (2, 1):
        try:
            micro_batch = components.samples.batch([0] * count)
            data = micro_batch.data
            with restoring_state(module, objective), CountValues() as values:
                module.train()  # which may leave layers in evaluation mode, unlike the constructor
                probe(module, _train, components.choices, objective, micro_batch)
            return bool(values.fewest == count)
        except InputError as error:
            errors.append(error)
        except Exception as error:  # custom code can raise anything
            if is_out_of_memory(error):
                return False  # training reports it, and `micro_batches=auto` continues
            errors.append(_do_not_fit(components, data, error, "in training "))
    raise errors[0] from None


def _train(model: nn.Module, choices: Mapping[str, str], objective: Objective, micro_batch: MicroBatch) -> None:
    if not isinstance(objective, Supervised):
        for name in objective.losses:
            objective.measure(model, name, micro_batch)
        return
    outputs = call_model(model, micro_batch.inputs)
    try:
        _check_loss(choices, objective, outputs, micro_batch.targets)
    except InputError:
        raise
    except Exception as error:  # custom code can raise anything
        raise InputError(
            f"loss={choices['loss']} fails for the outputs of model={choices['model']} in training, "
            f"{describe(outputs)},{failed_with(error)}; write a custom objective whose loss(model, batch) selects "
            "what it compares"
        ) from None


def _do_not_fit(components: Components, batch: Any, error: Exception, when: str = "") -> InputError:
    """Return the error of components that fail for a sample."""
    objective = components.objective
    what = "model, data and loss" if isinstance(objective, Supervised) else "model, data and objective"
    advice, text = "", str(error)
    if "process group" in text:
        advice = "; a dry run has no process group: to gather rows of all ranks, use Objective.gather"
    elif _OF_DTYPES.search(text) and (narrow := [t for t in tensors(batch) if t.dtype in _NARROW]):
        found = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in narrow}))
        advice = f"; the data contain {found}: let the dataset convert indices by long(), and other numbers by float()"
    elif _OF_DTYPES.search(text) and isinstance(objective, Supervised) and torch.int64 in _dtypes(batch[0]):
        has_option = getattr(components.samples.source, "divisor", ...) is None  # of data=arrays
        convert = "set data.divisor=1, or 255 for bytes" if has_option else "let the dataset convert them by float()"
        advice = f"; the inputs are integers: {convert}"
    return InputError(f"{what} do not fit: {when}for a sample {describe(batch)} they fail{failed_with(error)}{advice}")


def _dtypes(data: Any) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors(data)}


class _SeeingGradients(TorchFunctionMode):
    has_seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_seen |= func in (torch.autograd.grad, torch.Tensor.backward)
        return func(*args, **(kwargs or {}))


def check_all_used(components: Components, draws: Draws, local_size: int, to_device: Callable[[Any], Any]) -> None:
    """Raise InputError if a loss does not depend on all parameters that it trains, in training mode.

    A model may choose parameters by the samples. So if two samples do not use all of them, those of a local micro-batch
    are tried. A model with draws that all samples share may also choose parameters by them, as in layer dropout: then
    the smallest and the largest numbers are tried. Exceptions are ignored, because training reports them.
    """
    module, objective, samples = components.module, components.objective, components.samples

    def find(count: int, mode: AbstractContextManager[Any]) -> list[str]:
        indices = range(min(count, len(samples.source)))
        try:
            with restoring_state(module, objective), mode:
                micro_batch = MicroBatch(to_device(samples.read(indices)), indices)
                return _find_unused(module, objective, micro_batch)
        except Exception:
            return []
        finally:
            module.zero_grad()

    when = ""
    unused = find(2, nullcontext()) and find(max(2, local_size), nullcontext())
    if not unused and draws.common:
        when = " with some random numbers"
        unused = find(2, Extremes(False, draws.device)) or find(2, Extremes(True, draws.device))
    if unused:
        raise InputError(
            f"parallel={components.choices['parallel']} needs the gradients of all trained parameters, but{when} the "
            f"loss does not depend on {counted(unused)}; try parallel.find_unused_parameters=true"
        )


def _find_unused(module: nn.Module, objective: Objective, micro_batch: MicroBatch) -> list[str]:
    unused: list[str] = []
    for group in loss_groups(objective, module):
        objective.measure(module, group.name, micro_batch).value.sum().backward()
        without = {parameter for parameter in group.parameters if parameter.requires_grad and parameter.grad is None}
        unused += [name for name, parameter in module.named_parameters() if parameter in without]
        module.zero_grad()
    return unused


def _check_pair(batch: Any, input_shape: Sequence[int] | None) -> None:
    """Raise InputError unless the batch is (inputs, targets) with inputs of the configured shape."""
    is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    if not is_pair or not isinstance(batch[0], (torch.Tensor, tuple, list, Mapping)):
        raise InputError(
            "objective=supervised needs samples (inputs, targets); inputs are a tensor, a tuple or a mapping, but "
            f"the data's are {describe(batch)}; change the dataset, or write a custom objective with loss(model, batch)"
        )
    inputs = batch[0]
    if isinstance(inputs, torch.Tensor) and input_shape is not None:
        shape, found = list(input_shape), list(inputs.shape[1:])
        if shape != found:
            raise InputError(f"data.sample_shape={shape} but the data's samples have {found}")


def _settle(components: Components, objective: Supervised, micro_batch: MicroBatch) -> str:
    """Settle the objective with one sample, and return the hint at classes, if there is one.

    Raise InputError also for wrong combinations that torch accepts.
    """
    reduction, is_auto = getattr(objective.function, "reduction", "mean"), isinstance(objective.function, Auto)
    if reduction == "sum":
        raise InputError(
            "loss.reduction=sum must be mean: the loss of a step is a mean over the whole batch, however it is split; "
            "try loss.reduction=mean with another optimizer.lr"
        )
    outputs, targets = probe(components.module, call_model, micro_batch.inputs), micro_batch.targets
    with as_input_error():
        objective.settle(outputs, targets, ragged=components.is_ragged)
    function = objective.function
    if isinstance(function, nn.NLLLoss) and targets.dim() == 1 and not are_log_probabilities(outputs):
        raise InputError("loss=nll needs a model that ends in log_softmax; try loss=cross_entropy")
    chose_mse = is_auto and isinstance(function, nn.MSELoss)
    hint = hint_at_classes(components.samples.source, outputs, targets) if chose_mse else ""
    _check_loss(components.choices, objective, outputs, targets, hint)
    return hint


def _check_loss(
    choices: Mapping[str, str], objective: Supervised, outputs: Any, targets: Any, class_hint: str = ""
) -> None:
    """Raise InputError unless outputs and targets fit the loss, and it returns a scalar tensor."""
    function = objective.function
    if isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor):
        is_pairwise, shapes = outputs.shape in (targets.shape, (*targets.shape, 1)), f"{list(targets.shape[1:])}"
        if isinstance(function, CLASSES) and is_pairwise and not targets.is_floating_point():
            raise InputError(
                f"loss={choices['loss']}: integer targets are classes, but for targets {shapes} the model returns "
                f"{list(outputs.shape[1:])}, one number for each; try loss=bce if they are 0 or 1, or loss=mse"
            )
        if isinstance(function, ELEMENTWISE) and not is_pairwise:
            fix = "change the model's num_outputs" if targets.is_floating_point() else "try loss=auto"
            fix += f"; if the targets are classes, {class_hint}" if class_hint else ""
            raise InputError(
                f"loss={choices['loss']} compares numbers of one shape, but the model returns "
                f"{list(outputs.shape[1:])} and the data {shapes}; {fix}"
            )
    value = function(*objective.arrange(outputs, targets))
    if not isinstance(value, torch.Tensor) or value.dim() != 0:
        raise InputError(
            f"loss={choices['loss']} must return a scalar tensor, the mean over the samples, not {describe(value)}; "
            "set its reduction to mean, and return the tensor without calling item()"
        )
