"""Metrics of torchmetrics with states of each kind. Importing them takes 2 s, so only their tests do it."""

from typing import Any

import torch
import torchmetrics


class OfNumbers(torchmetrics.MeanSquaredError):
    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        super().update(preds[:, 0].double(), target.double())


class Extremes(torchmetrics.Metric):
    higher_is_better = None

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", torch.tensor(-torch.inf), dist_reduce_fx="max")
        self.add_state("smallest", torch.tensor(torch.inf), dist_reduce_fx="min")

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.largest = torch.maximum(self.largest, preds.max())
        self.smallest = torch.minimum(self.smallest, preds.min())

    def compute(self) -> torch.Tensor:
        return torch.stack([self.largest, self.smallest])


class Detections(torchmetrics.Metric):
    """Keeps tensors of a different shape for each sample, and does not reduce them, as MeanAveragePrecision does."""

    higher_is_better = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("boxes", [], dist_reduce_fx=None)
        self.add_state("labels", [], dist_reduce_fx=None)

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        for scores, label in zip(preds, target, strict=True):
            self.boxes.append(scores[: int(label)].expand(2, -1))
            self.labels.append(label)

    def compute(self) -> dict[str, torch.Tensor]:
        assert all(boxes.shape == (2, label) for boxes, label in zip(self.boxes, self.labels, strict=True))
        assert all(label.dtype == torch.int64 and label.dim() == 0 for label in self.labels)
        weighted = [number * boxes.sum() for number, boxes in enumerate(self.boxes)]  # depends on the order
        return {"sum": torch.stack(weighted).sum(), "classes": torch.stack(self.labels).unique()}


class Correlation(torchmetrics.PearsonCorrCoef):
    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        super().update(preds[:, 0].double(), target.double())


def torchmetrics_by_name(num_classes: int) -> dict[str, Any]:
    """Return metrics of outputs (N, num_classes) and targets (N)."""
    kind: dict[str, Any] = {"task": "multiclass", "num_classes": num_classes}
    return {
        "macro": torchmetrics.F1Score(average="macro", **kind),
        "auroc": torchmetrics.AUROC(**kind),
        "per_class": torchmetrics.Recall(average="none", **kind),
        "confusion": torchmetrics.CohenKappa(**kind),
        "mse": OfNumbers(),
        "extremes": Extremes(),
        "detections": Detections(),
        "correlation": Correlation(),
    }
