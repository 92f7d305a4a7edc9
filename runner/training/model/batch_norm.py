"""Over which samples a model's BatchNorm normalizes in training, and when this depends on the configuration."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from torch import nn

from runner.distributed.sync_batch_norm import has_batch_norm, synchronize_batch_norm, trains_batch_norm
from runner.errors import InputError, as_input_error, quantity
from runner.input.sampler import Sampler
from runner.training.mode import Axes


def synchronize_as_configured(setting: Literal["auto"] | bool, module: nn.Module, axes: Axes) -> None:
    """Let BatchNorm normalize over the samples of all ranks, unless `setting` is False or only one rank reads data.

    setting: the value of `sync_batchnorm`. Raises InputError if the option has no effect, and for a layer that cannot
    be synchronized.
    """
    if setting is True and not trains_batch_norm(module):
        raise InputError(
            "sync_batchnorm=true has no effect on a model without BatchNorm, or if the statistics of all BatchNorm "
            "layers are frozen; try sync_batchnorm=auto"
        )
    if setting is not False and axes.data_ranks > 1 and has_batch_norm(module):
        with as_input_error(f"sync_batchnorm={setting}: "):
            synchronize_batch_norm(module)


def describe_batch_norm(micro_batches: int, module: nn.Module, axes: Axes) -> list[str]:
    """Return a warning if a step has micro-batches, because BatchNorm then does not use all samples of the step."""
    if micro_batches * axes.micro_batches == 1 or not trains_batch_norm(module):
        return []
    setting = f"parallel.micro_batches={axes.micro_batches}"
    setting = f"micro_batches={micro_batches}" if axes.micro_batches == 1 else setting
    return [f"{setting}: BatchNorm normalizes each micro-batch separately, so that the results depend on this number"]


def check_batch_sizes(
    sampler: Sampler,
    per_rank: bool,
    count_steps: Callable[[int], int],
    fixes: Mapping[str, tuple[Sampler, bool]],
    batches: str = "step of an epoch",
) -> None:
    """Raise InputError if BatchNorm would get a single sample, although it needs two.

    Args:
        per_rank: BatchNorm uses only the samples of its rank.
        count_steps: Returns the number of steps of the run, given that of an epoch.
        fixes: Overrides that may be advised, each with the sampler and `per_rank` that it leads to.
        batches: What the sampler's steps are, for the message.
    """
    step = _find_single(sampler, per_rank, count_steps)
    if step is None:
        return
    size, parts, ranks = sampler.step_size(step), sampler.num_micro_batches(step), sampler.data_ranks
    where = f"{'the last' if size < sampler.batch_size else 'a'} {batches}"
    split = f" in {parts} micro-batches" * (parts > 1) + f" on {ranks} ranks" * (per_rank and ranks > 1)
    advised = [
        fix
        for fix, (changed, locally) in fixes.items()
        if changed.steps_per_epoch and _find_single(changed, locally, count_steps) is None
    ]
    for larger in range(sampler.batch_size + 1, min(sampler.num_samples, 4 * sampler.batch_size + 64) + 1):
        if _find_single(replace(sampler, batch_size=larger), per_rank, count_steps) is None:
            advised.append(f"batch_size={larger}")
            break
    has, needs = quantity(size, "sample") + split, "two in each" if split else "two"
    fix = f"; try {' or '.join(advised)}" if advised else ""
    raise InputError(f"batch_size={sampler.batch_size}: {where} has {has}, but BatchNorm needs {needs}{fix}")


def _find_single(sampler: Sampler, per_rank: bool, count_steps: Callable[[int], int]) -> int | None:
    """Return a step of an epoch in which BatchNorm gets a single sample, or None. All steps but the last are equal."""
    num_steps = min(sampler.steps_per_epoch, count_steps(sampler.steps_per_epoch))
    return next((step for step in (0, num_steps - 1) if sampler.fewest(step, per_rank) == 1), None)
