"""Losses with their exact weights: local losses of a batch, however it is split, add up to torch's mean."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from runner.input.batch import MicroBatch
from runner.objectives.losses import BCE, NLL, Auto, CrossEntropy
from runner.objectives.supervised import Supervised, resolve_class_dim

CUTS = ([0, 12], [0, 5, 12], [0, 1, 2, 11, 12])  # where the 12 samples are split


def classes(*shape: int, ignored: int | None = None) -> torch.Tensor:
    drawn = torch.randint(3, shape, generator=torch.Generator().manual_seed(1))
    return drawn if ignored is None else drawn.masked_fill(torch.rand(shape) < 0.4, ignored)


def outputs(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def mean_by_shares(
    loss: Any, given: torch.Tensor, targets: torch.Tensor, cuts: list[int], ragged: bool = True
) -> float:
    """Return the sum of the local losses divided by the sum of their weights, as the modes compute it."""
    objective = Supervised(loss)
    objective.settle(given[:1], targets[:1], ragged)
    total = weight = 0.0
    for start, end in itertools.pairwise(cuts):
        share = MicroBatch((None, targets[start:end]), range(start, end))
        found = objective.local_loss(given[start:end], share)
        total, weight = total + found.sum, weight + float(found.weight)
    return float(total) / weight


@pytest.mark.parametrize(
    ("make", "shape", "targets"),
    [
        (CrossEntropy, (12, 3), classes(12)),
        (lambda: CrossEntropy(weight=[0, 2, 5], label_smoothing=0.2), (12, 3), classes(12)),
        (lambda: CrossEntropy(ignore_index=2), (12, 3), classes(12)),
        (lambda: CrossEntropy(ignore_index=2, weight=[1, 2, 5], label_smoothing=0.1), (12, 3, 7), classes(12, 7)),
        (CrossEntropy, (12, 3, 4, 5), classes(12, 4, 5, ignored=-100)),
        (nn.CrossEntropyLoss, (12, 3), classes(12, ignored=-100)),
        (CrossEntropy, (12, 3, 7), outputs(12, 3, 7).softmax(1)),
        (lambda: NLL(weight=[1, 2, 5], ignore_index=0), (12, 3), classes(12)),
        (lambda: BCE(pos_weight=[1, 2, 5]), (12, 3), classes(12, 3).clamp(max=1).double()),
        (nn.L1Loss, (12, 3, 4), outputs(12, 3, 4)),
        (lambda: nn.HuberLoss(delta=0.3), (12, 1), outputs(12, 1)),
        (lambda: nn.KLDivLoss(reduction="batchmean"), (12, 3), outputs(12, 3).softmax(1)),
        (nn.MultiMarginLoss, (12, 3), classes(12)),
    ],
)
def test_local_losses_add_up_to_the_mean_of_torch(
    make: Callable[[], nn.Module], shape: tuple[int, ...], targets: torch.Tensor
) -> None:
    given = outputs(*shape)
    expected = make().double()(given, targets).item()
    for cuts in CUTS:
        assert mean_by_shares(make().double(), given, targets, cuts) == pytest.approx(expected, rel=1e-12)


def test_a_micro_batch_of_ignored_targets_has_a_zero_loss_with_gradients() -> None:
    given = outputs(2, 3, 4).requires_grad_()
    objective = Supervised(CrossEntropy())
    objective.settle(given, classes(2, 4), ragged=False)
    found = objective.local_loss(given, MicroBatch((None, torch.full((2, 4), -100)), [0, 1]))
    assert (found.sum, found.weight) == (0, 0)
    found.divided_by(10).backward()
    assert given.grad is not None and not given.grad.any()


def test_weight_of_defines_the_weight_of_a_custom_loss() -> None:
    class Positives(nn.Module):
        def weight_of(self, targets: torch.Tensor) -> torch.Tensor:
            return (targets > 0).sum()

        def forward(self, given: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return (given - targets).abs()[targets > 0].mean()

    given, targets = outputs(12), outputs(12)
    targets[:5] = -1  # local samples without weight: a mean over nothing
    expected = Positives()(given, targets).item()
    for cuts in CUTS:
        assert mean_by_shares(Positives(), given, targets, cuts) == pytest.approx(expected, rel=1e-12)


def test_losses_weighted_by_samples_need_no_collective() -> None:
    for loss, targets, ragged, counts in (
        (CrossEntropy(), classes(2), False, True),
        (CrossEntropy(ignore_index=1), classes(2), False, False),
        (CrossEntropy(weight=[1, 2, 3]), classes(2), False, False),
        (nn.CrossEntropyLoss(), classes(2), False, False),  # it ignores -100
        (nn.MSELoss(), outputs(2, 3), False, True),
        (nn.MSELoss(), outputs(2, 3), True, False),  # samples of other batches may have other sizes
    ):
        objective = Supervised(loss)
        objective.settle(outputs(2, 3), targets, ragged)
        assert objective.weighted_by_samples == counts, loss


def test_an_unknown_class_is_an_error_if_no_class_is_ignored() -> None:
    objective = Supervised(Auto())
    objective.settle(outputs(1, 3), classes(1), ragged=False)
    with pytest.raises(IndexError, match="out of bounds"):
        objective.loss_of(outputs(2, 3), torch.tensor([1, -100]))


def test_outputs_of_one_column_fit_targets_without_that_dim() -> None:
    objective = Supervised(Auto())
    objective.settle(outputs(1, 1), outputs(1), ragged=False)
    given, targets = outputs(12, 1), outputs(12).cos()
    assert objective.loss_of(given, targets).sum / 12 == pytest.approx(((given[:, 0] - targets) ** 2).mean().item())


def test_the_class_dim_is_inferred_from_the_shapes_or_must_be_set() -> None:
    for given, targets, dim in (((2, 3), (2,), 1), ((2, 3, 7), (2, 7), 1), ((2, 4, 5, 3), (2, 4, 5), -1)):
        assert resolve_class_dim(outputs(*given), classes(*targets)) == dim
    with pytest.raises(ValueError, match=r"set loss.class_dim=1 or -1"):
        resolve_class_dim(outputs(2, 3, 3), classes(2, 3))
    objective = Supervised(CrossEntropy(class_dim=-1))
    objective.settle(outputs(2, 3, 3), classes(2, 3), ragged=False)
    expected = nn.functional.cross_entropy(outputs(2, 3, 3).movedim(-1, 1), classes(2, 3)).item()
    found = objective.loss_of(outputs(2, 3, 3), classes(2, 3))
    assert float(found.sum / found.weight) == pytest.approx(expected)


INTEGERS = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64, torch.bool),
]


@pytest.mark.parametrize(
    ("make", "shape", "targets"),
    [
        (Auto, (12, 3), classes(12)),
        (lambda: CrossEntropy(label_smoothing=0.1), (12, 5), classes(12)),
        (lambda: CrossEntropy(weight=[1, 2, 5], ignore_index=1), (12, 3), classes(12)),
        (lambda: CrossEntropy(weight=[1, 2, 5]), (12, 3, 4, 5), classes(12, 4, 5)),
        (lambda: NLL(weight=[1, 2, 5]), (12, 3), classes(12)),
        (nn.MultiMarginLoss, (12, 3), classes(12)),
        (lambda: BCE(pos_weight=[1, 2, 5]), (12, 3), classes(12, 3).clamp(max=1)),
        (BCE, (12, 1), classes(12).clamp(max=1)),
        (nn.MSELoss, (12, 3), classes(12, 3)),
        (nn.L1Loss, (12, 1), classes(12)),
    ],
)
def test_a_loss_of_torch_accepts_integers_of_every_type(
    make: Callable[[], Any], shape: tuple[int, ...], targets: torch.Tensor
) -> None:
    def loss_and_targets(targets: torch.Tensor) -> tuple[float, torch.Tensor]:
        loss = make() if isinstance(make(), Auto) else make().double()
        objective = Supervised(loss)
        objective.settle(outputs(*shape)[:1], targets[:1], ragged=False)
        found = objective.prediction(outputs(*shape), MicroBatch((None, targets), range(12)))
        return float(found.losses["loss"].sum / found.losses["loss"].weight), found.targets

    for dtype in INTEGERS:
        wanted = targets.clamp(max=1) if dtype == torch.bool else targets
        (loss, given), (expected, reference) = loss_and_targets(wanted.to(dtype)), loss_and_targets(wanted)
        assert loss == expected and torch.equal(given, reference), dtype


def test_classes_may_have_a_spare_dim() -> None:
    for shape, targets in (((12, 3), classes(12)), ((12, 3, 4, 5), classes(12, 4, 5))):
        objective = Supervised(CrossEntropy(weight=[1, 2, 5]).double())
        objective.settle(outputs(*shape)[:1], targets[:1, None], ragged=False)
        found = objective.loss_of(outputs(*shape), targets[:, None])
        expected = nn.functional.cross_entropy(outputs(*shape), targets, torch.tensor([1.0, 2, 5]).double())
        assert float(found.sum / found.weight) == pytest.approx(expected.item(), rel=1e-6)


def test_a_custom_loss_gets_the_targets_of_the_dataset() -> None:
    class Custom(nn.Module):
        def forward(self, given: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            assert targets.dtype == torch.uint8
            return given.mean()

    objective = Supervised(Custom())
    objective.settle(outputs(2, 3), classes(2).byte(), ragged=False)
    objective.loss_of(outputs(2, 3), classes(2).byte())


def test_invalid_options_are_refused() -> None:
    for kind, options, message in (
        (CrossEntropy, {"label_smoothing": 2}, "label_smoothing=2 must be from 0 to 1"),
        (CrossEntropy, {"weight": []}, r"weight=\[\] must be numbers of at least 0, one per class"),
        (NLL, {"weight": [1, -1]}, r"weight=\[1, -1\] must be"),
        (BCE, {"pos_weight": [0]}, r"pos_weight=\[0\] must be numbers above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            kind(**options)


class Gaussian(nn.GaussianNLLLoss):
    """Outputs are means and variances."""

    def forward(self, given: Any, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(given[..., 0], targets, given[..., 1].exp())


def test_gaussian_nll_of_samples_of_one_shape_is_weighted_by_samples() -> None:
    given, targets = outputs(12, 4, 2), outputs(12, 4)
    expected = Gaussian()(given, targets).item()
    for cuts in CUTS:
        assert mean_by_shares(Gaussian(), given, targets, cuts, ragged=False) == pytest.approx(expected, rel=1e-12)


# Older versions of torch lack the second one.
UNLISTED = [Gaussian(), *([nn.LinearCrossEntropyLoss(3, 5)] if hasattr(nn, "LinearCrossEntropyLoss") else [])]


@pytest.mark.parametrize("loss", UNLISTED)
def test_losses_of_torch_with_an_unknown_weight_are_refused(loss: nn.Module) -> None:
    with pytest.raises(ValueError, match="the weight of this loss of torch is unknown for these targets; derive a"):
        Supervised(loss).settle(outputs(1, 4, 2), outputs(1, 4), ragged=True)
