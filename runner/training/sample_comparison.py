"""A check that the loss of several samples is the sum of the losses of each, in evaluation and in training."""

import copy
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from runner.errors import is_user_code
from runner.input.batch import MicroBatch
from runner.input.rng import seed_all
from runner.objectives.losses import Loss
from runner.objectives.supervised import Supervised
from runner.training.components import Components
from runner.training.draws.following import Draws
from runner.training.model.deferred_init import probe
from runner.training.model.forward_state import restoring_state


def compare_samples(components: Components, draws: Draws) -> list[str]:
    """Return a warning if the loss of two samples is not the sum of their separate losses.

    Such a loss depends on the number of ranks and micro-batches. A custom loss or objective is checked in evaluation
    and in training, and a custom model or one that draws random numbers in training. The check does not detect a loss
    that differs from a sum only for more than two samples, that draws numbers which cannot follow the samples, or that
    raises an exception.
    """
    module, objective, source = components.module, components.objective, components.samples.source
    function = objective.function if isinstance(objective, Supervised) else objective
    is_custom = type(function).__module__.partition(".")[0] not in ("torch", "runner")
    draws_numbers = draws.follows and bool(draws.of_samples)
    if (
        objective.gathers
        or len(source) < 2
        or source.collate_draws.has_drawn
        or not (is_custom or draws_numbers or _has_custom_code(module))
    ):
        return []
    group = "model" if not is_custom else "loss" if isinstance(objective, Supervised) else "objective"
    for trains in (False, True) if is_custom else (True,):
        try:
            different = _Comparison(components, draws, trains).find_difference()
        except Exception:  # the dry run has accepted one sample; training reports an error with two
            different = None
        finally:
            module.train()
        if different is not None:
            both, apart = map(_mean, different)
            return [
                f"{group}={components.choices[group]}: the loss of two samples{' in training' * trains} is {both:.4g}, "
                f"but the mean of their separate losses is {apart:.4g}, so it depends on the number of ranks and "
                "micro_batches: it compares samples, or draws numbers that do not follow them; to compare samples, "
                "declare gathers = True in an objective and use self.gather"
            ]
    return []


class _Comparison:
    """The losses of the first two samples, together and separately, with the same random numbers for each sample."""

    def __init__(self, components: Components, draws: Draws, trains: bool):
        self._module, self._objective, self._trains = components.module, components.objective, trains
        self._batches = [components.samples.batch(indices) for indices in ([0, 1], [0], [1])]
        self._draws, self._not_following = copy.copy(draws), list[str]()
        self._draws.warn = self._not_following.append  # type: ignore[method-assign, assignment]  # training logs it

    def find_difference(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the losses of both samples together and their sum, if they differ for a reason other than chance."""
        for key in range(3 if self._draws.follows else 1):  # a mixup may have drawn a fraction close to 0 or 1
            both, *separate = (self._measure(batch, key) for batch in self._batches)
            apart = torch.stack(separate).sum(0)
            if torch.allclose(both, apart, rtol=1e-3, atol=1e-6, equal_nan=True):
                continue
            is_random = not torch.equal(both, self._measure(self._batches[0], key if self._draws.follows else key + 1))
            return None if is_random or self._not_following else (both, apart)
        return None

    def _measure(self, micro_batch: MicroBatch, key: int) -> torch.Tensor:
        """Return sum and weight of each loss, (number of losses, 2, ...) in float64."""
        module, objective = self._module.train(self._trains), self._objective
        with restoring_state(module, objective), torch.set_grad_enabled(self._trains):
            seed_all(key)
            losses = probe(module, self._losses, micro_batch, key)
            pairs = [(loss.sum.detach(), torch.as_tensor(loss.weight, dtype=torch.float64)) for loss in losses]
        return torch.stack([torch.stack(pair) for pair in pairs])

    def _losses(self, model: nn.Module, micro_batch: MicroBatch, key: int) -> list[Loss]:
        if not self._trains:
            with self._draws.following(micro_batch, key=key), _FixedStatistics():
                return [*self._objective.evaluate(model, micro_batch).losses.values()]
        losses = []
        for number, name in enumerate(self._objective.losses):
            with self._draws.following(micro_batch, number, key), _FixedStatistics():
                losses.append(self._objective.measure(model, name, micro_batch))
        return losses


class _FixedStatistics(TorchFunctionMode):
    """Normalizes by fixed statistics in BatchNorm, whose statistics of a batch are synchronized over the ranks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        named = dict(zip(names, args, strict=False)) | (kwargs or {}) | {"training": False}
        if named.get("running_mean") is None:
            zeros = named["input"].new_zeros(named["input"].size(1))
            named |= {"running_mean": zeros, "running_var": zeros + 1}
        return func(**named)


def _has_custom_code(module: nn.Module) -> bool:
    """Return True if a class of the model is neither a library's nor one of the shipped models."""
    names = {type(part).__module__ for part in module.modules()}
    files = [getattr(sys.modules.get(name), "__file__", None) for name in names if not name.startswith("runner.")]
    return any(file is not None and is_user_code(file) for file in files)


def _mean(losses: torch.Tensor) -> float:
    """Return the sum of the means of all losses; `losses` is (number of losses, 2, ...)."""
    return float((losses[:, 0] / losses[:, 1]).sum())
