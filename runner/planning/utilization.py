"""The shortest time in which a GPU can compute a sample, from which the model FLOPs utilization (MFU) follows."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner.input.batch import MicroBatch
from runner.input.pytree import map_tensors
from runner.input.rng import isolated
from runner.objectives.objective import Objective, loss_groups, separate_passes
from runner.optimization.parameter_patterns import freeze
from runner.planning.costs import count_flops, peak_rate


class _CountSeconds(TorchDispatchMode):
    """Adds up the time that operators take at the peak rates of a data sheet."""

    def __init__(self, flops: Mapping[str, float], precision: str, tf32: bool | str):
        super().__init__()
        self._flops, self._precision, self._tf32 = flops, precision, tf32
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        peak = peak_rate(self._flops, self._precision, func, self._tf32)
        self.seconds += count_flops(func, *args, out=out, **kwargs) / peak
        return out


def shortest_seconds(
    make_model: Callable[[], nn.Module],
    frozen: list[str],
    objective: Objective,
    data: Any,
    flops: Mapping[str, float],
    precision: str,
    tf32: bool | str = "convolutions",
) -> float:
    """Return the time that the forward and backward of a sample take at the peak rates, summed over all losses.

    A copy of the model is built and called on the meta device, without memory and without values, and without
    recomputation. Any exception of a model that cannot be built or called there is raised.

    frozen: patterns of parameters that are not trained. data: a batch of one sample or two. flops: the peak rates of a
    data sheet. precision: of the run; its matrices are assumed to be computed in it. tf32: the fp32 operators that use
    TensorFloat-32, as in `peak_rate`.
    """
    data = map_tensors(lambda tensor: tensor.to("meta"), data)
    batch = MicroBatch(data, range(MicroBatch(data, ()).rows))
    counted = _CountSeconds(flops, precision, tf32)
    with isolated(), separate_passes(objective), torch.device("meta"), counted:
        model = make_model()
        freeze(frozen, model)
        for group in loss_groups(objective, model):
            objective.measure(model, group.name, batch).value.sum().backward(inputs=_trained(group.parameters))
    return counted.seconds / batch.num_samples


def _trained(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]
