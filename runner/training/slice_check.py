"""A dry run of a model whose ranks compute different positions of the same samples."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from runner.distributed.sync_batch_norm import has_batch_norm
from runner.errors import InputError, as_input_error, failed_with
from runner.input.batch import MicroBatch
from runner.input.pytree import describe
from runner.objectives.objective import Prediction
from runner.objectives.supervised import Supervised, call_model
from runner.tensor_values import has_values
from runner.training.components import Components
from runner.training.draws.following import Draws
from runner.training.draws.functions import IN_ORDER
from runner.training.model.deferred_init import probe_with_random_weights
from runner.training.model.positions import of_positions, possible_pairs, run_slices, split_positions
from runner.training.model.submodules import offered


def check_slices(components: Components, objective: Supervised, micro_batch: MicroBatch, whole: Prediction) -> None:
    """Raise InputError unless outputs and loss of all positions are those of slices of the positions.

    whole: of all positions.
    """
    ranks, module = components.parallel.resolved_axes.sequence, components.module
    mode, model = f"parallel.sequence={ranks}", f"model={components.choices['model']}"
    if not offered(module, "stages"):
        raise InputError(f"{mode} needs a model that offers its stages(); try model=gpt")
    if has_batch_norm(module):
        raise InputError(f"{mode}: BatchNorm of {model} normalizes over positions of several ranks; try parallel=fsdp")
    outputs, targets = whole.outputs, micro_batch.targets
    shapes = [each.shape[:2] if isinstance(each, torch.Tensor) else None for each in (outputs, targets)]
    if shapes[0] is None or shapes[0] != shapes[1] or len(shapes[0]) < 2:
        raise InputError(
            f"{mode} splits the positions of a sample, so outputs and targets must have one value or row per position, "
            f"not {describe(outputs)} and {describe(targets)}; try parallel.shard"
        )
    total = shapes[0][1]
    with as_input_error():
        slices = split_positions(total, ranks)
    _check_model(components, micro_batch.inputs, [slices[0], slices[-1]], total)
    if any(_is_other_loss(objective, *pair, micro_batch, slices) for pair in possible_pairs(outputs, targets)):
        raise InputError(
            f"{mode} needs a loss that is a mean over the positions, but loss={components.choices['loss']} of all "
            "positions is not that of their parts; define weight_of(targets), which returns the number of positions"
        )


def _check_model(components: Components, inputs: Any, slices: Sequence[range], total: int) -> None:
    """Raise InputError unless the model's stages compute slices of what its forward computes, with random weights."""
    what = f"parallel.sequence={components.parallel.resolved_axes.sequence}: model={components.choices['model']}"

    def run(model: nn.Module) -> list[torch.Tensor]:
        of_slices = run_slices([*model.stages()], inputs, slices, total)  # type: ignore[operator]
        return [call_model(model, inputs), *of_slices]

    try:
        expected, *found = probe_with_random_weights(components.module, run)
    except Exception as error:  # custom code can raise anything
        raise InputError(f"{what} fails for a part of the positions{failed_with(error)}") from None
    for positions, part in zip(slices, found, strict=True):
        if differ(part, expected[:, positions.start : positions.stop], 1e-4):
            raise InputError(
                f"{what} computes other values for a part of the positions, which may only interact by "
                "F.scaled_dot_product_attention; nn.MultiheadAttention and some models of transformers do not call it"
            )


def _is_other_loss(
    objective: Supervised,
    outputs: torch.Tensor,
    targets: torch.Tensor,
    micro_batch: MicroBatch,
    slices: Sequence[range],
) -> bool:
    """Return True if the sum or the weight of the loss of all positions is not that of the slices together."""
    micro_batch = replace(micro_batch, data=(micro_batch.inputs, targets))
    parts = [objective.local_loss(outputs[:, p.start : p.stop], of_positions(micro_batch, p)) for p in slices]
    loss = objective.local_loss(outputs, micro_batch)
    pairs = ((sum(part.sum for part in parts), loss.sum), (sum(part.weight for part in parts), loss.weight))
    return any(differ(torch.as_tensor(of_parts), torch.as_tensor(of_all), 1e-4) for of_parts, of_all in pairs)


def differ(found: Any, expected: Any, tolerance: float = 1e-5) -> bool:
    """Return True if two outputs have other shapes, or values that differ by more than the rounding of float32.

    tolerance: relative to the largest value; larger if other operators compute the values. NaN is equal to NaN. The
    fake tensors of a plan have no values.
    """
    if describe(found) != describe(expected):
        return True
    largest = (found - expected).abs().max()
    return has_values(largest) and bool(largest > tolerance * expected.abs().max())


def check_draws(components: Components, draws: Draws, problems: list[str], total: int) -> None:
    """Raise InputError if the random numbers of a part of the positions cannot be those of all `total` positions.

    A rank can draw its positions of a tensor (N, total, features). problems: why draws do not follow the samples.
    """
    unlike = [f"{name} draws {[*shape]} numbers for all samples" for name, shape in draws.common if total in shape]
    for name, shape in draws.of_samples:
        if name in IN_ORDER:
            unlike.append(f"{name} draws the numbers of a sample in order")
        elif len(shape) != 3 or shape[1] != total:
            unlike.append(f"{name} draws {[*shape]} numbers of a sample, which are not rows of its {total} positions")
    if problems or unlike:
        raise InputError(
            f"parallel.sequence={components.parallel.resolved_axes.sequence}: the ranks cannot draw the random numbers "
            f"of model={components.choices['model']}: {[*problems, *unlike][0]}; try parallel.shard"
        )
