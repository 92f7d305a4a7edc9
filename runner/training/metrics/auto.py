"""The metrics that fit the data."""

from collections.abc import Mapping
from typing import Any

import torch

from runner.training.metric import Metric
from runner.training.metrics.accuracy import Accuracy
from runner.training.metrics.class_dim import find_class_dim


class Auto:
    """Stands for the metrics that fit outputs and targets; runner.training.build_metrics puts those in its place."""

    possible: Mapping[str, bool] = {"accuracy": Accuracy.higher_is_better}  # what it may choose, and its best end

    def choose(self, outputs: Any, targets: Any, **of_loss: Any) -> dict[str, Metric]:
        """Accuracy for integer classes, one per sample or per position; else nothing.

        of_loss: Accuracy's options, as the loss has them.
        """
        if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
            return {}
        kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        if targets.dtype not in kinds or find_class_dim(outputs, targets) is None:
            return {}
        return {"accuracy": Accuracy(**of_loss)}
