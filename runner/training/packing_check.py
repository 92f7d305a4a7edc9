"""A dry run of a model whose samples consist of several packed records, which position_ids separate."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from runner.errors import InputError
from runner.input.batch import MicroBatch
from runner.objectives.supervised import call_model
from runner.training.components import Components
from runner.training.model.deferred_init import probe_with_random_weights
from runner.training.slice_check import differ

LENGTH = 8  # tokens of a record in the dry run, at most


def check_packing(components: Components, micro_batch: MicroBatch) -> None:
    """Raise InputError if the outputs of a record depend on the record before it, with random weights.

    Models that ignore position_ids, or use them as positions only, train on wrong values without an error. Only data
    with the attribute `packing` and with input_ids and position_ids, (N, T), are checked.
    """
    inputs = micro_batch.inputs
    if not getattr(components.samples.source, "packing", False) or not isinstance(inputs, Mapping):
        return
    tokens, length = inputs["input_ids"][:1], min(LENGTH, max(1, inputs["input_ids"].size(1) // 2))
    positions = torch.arange(length).expand(1, -1)  # (1, L)
    record = tokens[:, :length]
    # Another first record: with equal ones, attention to both would return the same values.
    packed = torch.cat([(record + 1) % (tokens.max() + 1), record], 1)  # (1, 2 L)

    def run(model: nn.Module) -> tuple[Any, Any]:
        alone = call_model(model, {**inputs, "input_ids": record, "position_ids": positions})
        both = {**inputs, "input_ids": packed, "position_ids": positions.repeat(1, 2)}
        return alone, call_model(model, both)

    alone, together = probe_with_random_weights(components.module, run)
    if isinstance(together, torch.Tensor) and differ(together[:, length:], alone, 1e-4):
        raise InputError(
            f"data.packing=true: model={components.choices['model']} computes other outputs for a record that follows "
            "another one in the sample, because it does not separate records by position_ids; set data.packing=false"
        )
