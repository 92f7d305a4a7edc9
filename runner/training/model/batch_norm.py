"""Over which samples a model's BatchNorm normalizes in training, and when this depends on the configuration."""

from typing import Literal

from torch import nn

from runner.distributed.sync_batch_norm import has_batch_norm, synchronize_batch_norm, trains_batch_norm
from runner.errors import InputError, as_input_error
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
