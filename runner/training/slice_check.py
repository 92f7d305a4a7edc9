"""A dry run of a model whose ranks compute different positions of the same samples."""

from typing import Any

import torch
from torch import nn

from runner.distributed.sync_batch_norm import has_batch_norm
from runner.errors import InputError, as_input_error, failed_with
from runner.input.batch import MicroBatch
from runner.input.pytree import describe
from runner.objectives.objective import Prediction
from runner.objectives.supervised import Supervised
from runner.tensor_values import has_values
from runner.training.components import Components
from runner.training.draws.following import Draws
from runner.training.model.deferred_init import probe
from runner.training.model.positions import of_positions, run_slices, split_positions
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
    try:
        ends = probe(module, _run, micro_batch.inputs, [slices[0], slices[-1]], total)
    except Exception as error:  # custom code can raise anything
        raise InputError(f"{mode}: {model} fails for a part of the positions{failed_with(error)}") from None
    for positions, found in zip((slices[0], slices[-1]), ends, strict=True):
        expected = outputs[:, positions.start : positions.stop]
        if differ(found, expected, 1e-4):
            raise InputError(
                f"{mode}: the stages() of {model} return other values for a part of the positions; positions may only "
                "interact by F.scaled_dot_product_attention"
            )
    parts = [objective.local_loss(outputs[:, p.start : p.stop], of_positions(micro_batch, p)) for p in slices]
    loss = whole.losses["loss"]
    pairs = ((sum(part.sum for part in parts), loss.sum), (sum(part.weight for part in parts), loss.weight))
    if any(differ(torch.as_tensor(of_parts), torch.as_tensor(of_all), 1e-3) for of_parts, of_all in pairs):
        raise InputError(
            f"{mode} needs a loss that is a mean over the positions, but loss={components.choices['loss']} of all "
            "positions is not that of their parts; define weight_of(targets), which returns the number of positions"
        )


def _run(model: nn.Module, inputs: Any, slices: list[range], total: int) -> list[torch.Tensor]:
    return run_slices([*model.stages()], inputs, slices, total)  # type: ignore[operator]


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
        if len(shape) != 3 or shape[1] != total:
            unlike.append(f"{name} draws {[*shape]} numbers of a sample, which are not rows of its {total} positions")
    if problems or unlike:
        raise InputError(
            f"parallel.sequence={components.parallel.resolved_axes.sequence}: the ranks cannot draw the random numbers "
            f"of model={components.choices['model']}: {[*problems, *unlike][0]}; try parallel.shard"
        )
