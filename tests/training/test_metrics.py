"""The formulas of the metrics, compared with scikit-learn's and torchmetrics's, and what each of them refuses."""

import math
from typing import Any

import pytest
import sklearn.metrics
import torch
import torchmetrics
import yaml
from torch import nn

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.errors import InputError
from runner.objectives.losses import BCE, CrossEntropy
from runner.objectives.supervised import Supervised
from runner.paths import CONF
from runner.training.components import make_metrics
from runner.training.metrics.class_counts import F1, IoU
from runner.training.metrics.classification import Accuracy, Perplexity, TopK
from runner.training.metrics.classification import Auto as AutoMetrics
from runner.training.metrics.metric_sums import MetricSums
from runner.training.metrics.regression import MAE, R2
from runner.training.metrics.torchmetrics_adapter import TorchMetric

ALONE = World(RankInfo(), None, Backend())


def measure(metric: Any, outputs: torch.Tensor, targets: torch.Tensor, batch_size: int = 7) -> dict[str, float]:
    """Return the metrics of these samples, evaluated in batches of which the last one is shorter."""
    sums = MetricSums({"it": metric}, outputs[:1], targets[:1])
    for start in range(0, len(outputs), batch_size):
        sums.add(outputs[start : start + batch_size], targets[start : start + batch_size], [start])
    return sums.compute(sums.flat(), ALONE)


def value(metric: Any, outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return measure(metric, outputs, targets)["it"]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(*shape: int, below: int = 5, seed: int = 1) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


LAYOUTS = {
    "one per sample": (drawn(50, 5), classes(50)),
    "per token, classes last": (drawn(20, 6, 5), classes(20, 6)),
    "per token, classes second": (drawn(20, 5, 6), classes(20, 6)),
    "per pixel": (drawn(9, 5, 4, 3), classes(9, 4, 3)),
}


def flat(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (positions, 5) and classes (positions)."""
    return outputs.movedim(list(outputs.shape).index(5, 1), -1).reshape(-1, 5), targets.flatten()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ignore_index", [None, 2])
def test_the_class_dim_is_that_of_the_loss(name: str, ignore_index: int | None) -> None:
    outputs, targets = LAYOUTS[name]
    scores, wanted = flat(outputs, targets)
    kept = wanted != ignore_index if ignore_index is not None else torch.ones_like(wanted, dtype=torch.bool)
    scores, wanted = scores[kept], wanted[kept]
    assert value(Accuracy(ignore_index), outputs, targets) == (scores.argmax(-1) == wanted).double().mean().item()
    top_2 = sklearn.metrics.top_k_accuracy_score(wanted, scores, k=2, labels=range(5))
    assert value(TopK(2, ignore_index), outputs, targets) == pytest.approx(top_2, abs=1e-15)
    perplexity = nn.functional.cross_entropy(scores.double(), wanted).exp().item()
    assert value(Perplexity(ignore_index), outputs.double(), targets) == pytest.approx(perplexity, rel=1e-14)


def test_the_class_dim_of_the_first_batch_is_kept() -> None:
    """Sequences of any length, of which one happens to be as long as there are classes."""
    sums = MetricSums({"it": Accuracy()}, drawn(1, 7, 5), classes(1, 7))
    outputs, targets = drawn(10, 5, 5), classes(10, 5)
    sums.add(outputs, targets, [0])
    expected = (outputs.argmax(-1) == targets).double().mean().item()
    assert sums.compute(sums.flat(), ALONE) == {"it": expected}


def test_perplexity_of_log_probabilities_equals_that_of_logits() -> None:
    logits, targets = drawn(30, 5).double(), classes(30)
    expected = value(Perplexity(), logits, targets)
    assert value(Perplexity(), logits.log_softmax(-1), targets) == pytest.approx(expected, rel=1e-14)
    assert value(Perplexity(), torch.zeros(30, 5), targets) == pytest.approx(5.0)


def test_mae_and_r2_compare_elements() -> None:
    outputs, targets = drawn(40, 3).double(), drawn(40, 3, seed=1).double() + 100
    assert value(MAE(), outputs, targets) == pytest.approx(sklearn.metrics.mean_absolute_error(targets, outputs))
    assert value(R2(), outputs, targets) == pytest.approx(sklearn.metrics.r2_score(targets, outputs), rel=1e-9)
    for metric in (MAE(), R2()):
        assert value(metric, outputs[:, :1], targets[:, 0]) == value(metric, outputs[:, 0], targets[:, 0])
    for constant in (0.1, 0.0):
        assert math.isnan(value(R2(), outputs, torch.full((40, 3), constant).double()))


def test_metrics_accept_integers_of_every_type() -> None:
    outputs, targets = drawn(60, 20), classes(60, below=20)
    outputs[::2] = nn.functional.one_hot(targets[::2], 20).float()
    metrics = {
        "accuracy": Accuracy(3),
        "top_k": TopK(2),
        "f1": F1(),
        "iou": IoU(),
        "perplexity": Perplexity(-(2**62)),
        "mae": MAE(),
        "of_labels": F1(ignore_index=-256),
        "torchmetrics": torchmetrics.classification.MulticlassCohenKappa(20),
    }
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64):
        for name, metric in metrics.items():
            given, wanted = outputs, targets
            if name == "mae":
                given = outputs[:, 0]
            if name == "of_labels":
                given, wanted = outputs[:, :2], targets[:, None].repeat(1, 2) % 2
            metric = TorchMetric(name, metric) if name == "torchmetrics" else metric
            assert measure(metric, given, wanted.to(dtype)) == measure(metric, given, wanted), (name, dtype)
    assert value(Accuracy(), drawn(60, 2), classes(60, below=2).bool()) == value(
        Accuracy(), drawn(60, 2), classes(60, below=2)
    )


def test_the_default_metrics_follow_the_loss() -> None:
    outputs, targets = drawn(12, 1), classes(12)
    for loss in (nn.MSELoss(), BCE(), nn.GaussianNLLLoss()):
        objective = Supervised(loss)
        objective.settle(outputs[:1], targets[:1], ragged=False)
        assert AutoMetrics().choose(outputs, objective.fit_targets(outputs, targets)) == {}, loss
    assert AutoMetrics().choose(drawn(12, 5), targets.to(torch.uint16)).keys() == {"accuracy"}


@pytest.mark.parametrize("average", ["macro", "micro"])
def test_f1_of_classes(average: Any) -> None:
    outputs, targets = LAYOUTS["per pixel"]
    scores, wanted = flat(outputs, targets)
    scores = torch.cat([scores, torch.full((len(scores), 1), -9.0)], dim=1)  # a class that never occurs
    expected = sklearn.metrics.f1_score(wanted, scores.argmax(-1), average=average)
    assert value(F1(average), outputs, targets) == pytest.approx(expected, rel=1e-14)
    assert value(F1(average), scores, wanted) == pytest.approx(expected, rel=1e-14)


def test_f1_of_labels_and_of_each_class() -> None:
    outputs, targets = drawn(60, 4), classes(60, 4, below=2)
    for average in ("macro", "micro"):
        expected = sklearn.metrics.f1_score(targets, outputs > 0, average=average)
        assert value(F1(average), outputs, targets.float()) == pytest.approx(expected, rel=1e-14)
    of_one = sklearn.metrics.f1_score(targets[:, 0], outputs[:, 0].sigmoid() > 0.7)
    for predicted in (outputs[:, :1].sigmoid(), outputs[:, 0].sigmoid()):
        assert value(F1(threshold=0.7), predicted, targets[:, 0]) == pytest.approx(of_one, rel=1e-14)
    each = measure(F1(per_class=True), outputs, targets)
    assert list(each) == ["it/macro", *(f"it/class_{number}" for number in range(4))]
    assert each["it/class_1"] == pytest.approx(sklearn.metrics.f1_score(targets[:, 1], outputs[:, 1] > 0))
    assert value(F1(), torch.full((3, 2), -1.0), torch.zeros(3, 2)) == 0.0


def test_iou_of_regions() -> None:
    outputs, targets = LAYOUTS["per pixel"]
    scores, wanted = flat(outputs, targets)
    found = measure(IoU(per_class=True), outputs, targets)
    expected = sklearn.metrics.jaccard_score(wanted, scores.argmax(-1), average=None)
    assert [found[f"it/class_{number}"] for number in range(5)] == pytest.approx(list(expected), rel=1e-14)
    assert found["it/mean"] == pytest.approx(expected.mean(), rel=1e-14)
    kept = wanted != 3
    without = sklearn.metrics.jaccard_score(wanted[kept], scores.argmax(-1)[kept], average="macro")
    assert value(IoU(ignore_index=3), outputs, targets) == pytest.approx(without, rel=1e-14)


@pytest.mark.parametrize(
    ("metric", "outputs", "targets", "message"),
    [
        (
            Accuracy(),
            drawn(1, 5),
            drawn(1),
            "metrics.it: update fails for one sample with: ValueError: it needs",
        ),
        (Accuracy(), drawn(1, 5), classes(1, 3), "not [1, 5] for torch.int64 [1, 3]"),
        (Accuracy(), {"a": drawn(1, 5)}, classes(1), "not ({a: tensor [1, 5]}, tensor [1]); write a custom metric"),
        (TopK(6), drawn(1, 5), classes(1), "selected index k out of range"),
        (MAE(), drawn(1, 5), classes(1), "it compares numbers of one shape, not [1, 5] with torch.int64 [1]"),
        (F1(), drawn(1, 5, 2), classes(1, 4), "it needs scores (N, C), (N, C, ...) or (N, ..., C)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(metric: Any, outputs: Any, targets: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError) as raised:
        MetricSums({"it": metric}, outputs, targets)
    assert message in str(raised.value) and len(raised.value.messages) == 1


def made(metrics: dict[str, Any], loss: nn.Module, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    sums = make_metrics(metrics, loss, outputs[:1], targets[:1])
    sums.add(outputs, targets, [0])
    return sums.compute(sums.flat(), ALONE)


@pytest.mark.parametrize("name", ["accuracy", "top_k", "perplexity", "f1", "iou", "auto"])
def test_auto_options_are_those_of_the_loss(name: str) -> None:
    """The ignored class, and the dimension of the classes if the shapes are ambiguous."""
    node = yaml.safe_load((CONF / "metrics" / f"{name}.yaml").read_text())
    if name == "top_k":
        node["top_k"]["k"] = 2
    outputs, targets = drawn(20, 5, 5).double(), classes(20, 5)
    last = made(node, CrossEntropy(class_dim=-1), outputs, targets)
    assert last == pytest.approx(made(node, CrossEntropy(), outputs.movedim(-1, 1), targets), rel=1e-14)
    assert last != pytest.approx(made(node, CrossEntropy(), outputs, targets))
    padded = targets.masked_fill(torch.arange(5) > 2, -100)
    assert made(node, CrossEntropy(), outputs, padded) == pytest.approx(
        made(node, CrossEntropy(), outputs[:, :, :3], targets[:, :3]), rel=1e-14
    )
    typed = padded.masked_fill(padded == -100, 4)
    without = made(node, CrossEntropy(ignore_index=4), outputs, typed)
    if name != "auto":
        (options,) = node.values()
        typed_null = {name: options | {"ignore_index": 4, "class_dim": 1}}
        assert made(typed_null, CrossEntropy(), outputs, typed) == without
    assert without != made(node, nn.MSELoss(), outputs, typed)
