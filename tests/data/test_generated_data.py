"""The values of the generated datasets and of scikit-learn's digits."""

import pytest
import torch
from runner.shipped.data.counting import Counting
from runner.shipped.data.digits import Digits
from runner.shipped.data.hashing import hash_numbers
from runner.shipped.data.random import RandomRegression
from runner.shipped.data.toy import ToyRegression


def test_digits_are_scikit_learns_digits_in_two_splits():
    from sklearn.datasets import load_digits

    source = load_digits()
    train, val = (Digits(train=train, sample_shape=(1, 8, 8), num_outputs=10) for train in (True, False))
    found = torch.cat([train.samples, val.samples]).mul(16).flatten(1)
    labels = torch.cat([train.targets, val.targets])
    expected = {(*pixels, label) for pixels, label in zip(source.data.tolist(), source.target.tolist(), strict=True)}
    rows = [(*pixels, label) for pixels, label in zip(found.tolist(), labels.tolist(), strict=True)]
    assert len(rows) == 1797 and set(rows) == expected  # every digit once, none in both splits
    assert torch.bincount(val.targets, minlength=10).min() > 20


def test_digits_are_scaled_images_in_0_to_1():
    small = Digits(train=False, sample_shape=[1, 8, 8], num_outputs=10)
    large = Digits(train=False, sample_shape=[1, 28, 28], num_outputs=10)
    assert torch.equal(small.targets, large.targets)
    assert large.samples.min() == 0 and 0.99 < large.samples.max() <= 1
    scaled = torch.nn.functional.interpolate(small.samples, size=(28, 28), mode="bilinear")
    torch.testing.assert_close(large.samples, scaled)


def test_toy_is_a_linear_map_and_noise():
    train, val = (ToyRegression(train, (2, 5), 5, num_train=4000, noise=0.1) for train in (True, False))
    inputs = train.samples.flatten(1)
    weight = torch.linalg.lstsq(inputs, train.targets).solution
    # A model fitted on one split predicts the other up to the noise.
    error = (val.samples.flatten(1) @ weight - val.targets).square().mean().sqrt().item()
    assert error == pytest.approx(0.1, rel=0.1)
    assert inputs.std().item() == pytest.approx(1, rel=0.05) and abs(inputs.mean().item()) < 0.05
    assert weight.square().sum(0).mean().sqrt().item() == pytest.approx(1, rel=0.3)
    with pytest.raises(ValueError, match=r"^noise=-1 must be at least 0 and finite; try 0.1$"):
        ToyRegression(True, (10,), 5, noise=-1)


@pytest.mark.parametrize("kind", [ToyRegression, RandomRegression])
def test_splits_and_seeds_differ_and_neither_split_changes_with_the_size_of_the_other(kind):
    train, val, other = kind(True, (4,), 2), kind(False, (4,), 2), kind(True, (4,), 2, seed=1)
    assert not (train.samples[:, None] == val.samples).all(-1).any()
    assert not (train.samples == other.samples).any(1).any()
    assert torch.equal(kind(False, (4,), 2, num_train=10).samples, val.samples)
    assert torch.equal(kind(True, (4,), 2, num_val=10).targets, train.targets)


@pytest.mark.parametrize("first", [0, 2**32, 9 * 10**9])
def test_counting_is_uniform_and_learnable(first):
    data = Counting(True, (32,), 10, num_train=10**10)
    samples, targets = data.__getitems__(range(first, first + 20_000))
    assert samples.min() >= -1 and samples.max() < 1
    assert samples.mean(0).abs().max() < 0.02
    assert samples.var(0).sub(1 / 3).abs().max() < 0.02
    correlation = torch.corrcoef(samples.T) - torch.eye(32)
    assert correlation.abs().max() < 0.04  # features are independent
    assert (samples[1:] * samples[:-1]).mean(0).abs().max() < 0.02  # and so are neighboring samples
    assert torch.bincount(targets, minlength=10).sub(2000).abs().max() < 200
    assert torch.equal(samples @ torch.eye(32, 10), samples[:, :10])
    assert torch.equal((samples @ torch.eye(32, 10)).argmax(1), targets)  # the prediction of a linear model


def test_counting_has_separate_validation_samples():
    train, val = (Counting(train, (4,), 3, num_train=100, num_val=30) for train in (True, False))
    samples = torch.cat([train.__getitems__(range(100))[0], val.__getitems__(range(30))[0]])
    assert len(samples.unique(dim=0)) == 130
    longer = Counting(True, (4,), 3, num_train=130)
    assert torch.equal(longer.__getitems__(range(130))[0], samples)  # validation samples follow the training samples
    other = Counting(True, (4,), 3, num_train=100, seed=1)
    assert not (other.__getitems__(range(100))[0] == samples[:100]).any(1).any()


def test_counting_hash_is_computed_in_32_bits():
    exact = []
    for number in (1, 12345, 2**31 + 7, 2**32 - 1):  # Python's integers do not overflow
        value = (number ^ (number >> 16)) * 0x21F0AAAD % 2**32
        value = (value ^ (value >> 15)) * 0x735A2D97 % 2**32
        exact.append(value ^ (value >> 15))
    assert hash_numbers(torch.tensor([1, 12345, 2**31 + 7, 2**32 - 1])).tolist() == exact


def test_counting_supports_more_than_2_to_the_32_samples():
    data = Counting(True, (4,), 3, num_train=10**10, num_val=10)
    rows = [row + high * 2**32 for high in (0, 1, 2) for row in range(100)]
    assert len(data.__getitems__(rows)[0].unique(dim=0)) == 300


def test_counting_refuses_invalid_sizes():
    with pytest.raises(ValueError, match=r"^num_outputs=10 must be at most the 8 features of a sample; try 8$"):
        Counting(True, (2, 4), 10)
    with pytest.raises(ValueError, match=r"^num_train=\d+ must leave at most 2\^62 .* try 4611686018427387894$"):
        Counting(True, (32,), 10, num_train=2**62, num_val=10)
