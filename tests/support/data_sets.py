"""Shared by the tests of the datasets: their classes, files in their formats, and a check of both ways to read."""

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from runner.shipped.data.cifar10 import CIFAR10
from runner.shipped.data.counting import Counting
from runner.shipped.data.digits import Digits
from runner.shipped.data.fashion_mnist import FashionMNIST
from runner.shipped.data.mnist import MNIST
from runner.shipped.data.random import RandomRegression
from runner.shipped.data.toy import ToyRegression

CONF = Path(__file__).parents[2] / "conf"
MADE = {  # datasets without files of the user: sample shape, number of outputs, training and validation samples
    "digits": (Digits, (1, 28, 28), 10, 1437, 360),
    "toy": (ToyRegression, (10,), 5, 1024, 256),
    "random": (RandomRegression, (20,), 1, 2048, 256),
    "counting": (Counting, (32,), 10, 2**20, 16384),
}
IDX_SETS = [(MNIST, torchvision.datasets.MNIST), (FashionMNIST, torchvision.datasets.FashionMNIST)]
SHAPES = {MNIST: (1, 28, 28), FashionMNIST: (1, 28, 28), CIFAR10: (3, 32, 32)}


def write_idx(root, name="MNIST", num_train=30, num_val=12, pack=False):
    """Write random images as MNIST-format files under root, or only as .gz archives if `pack`."""
    random = np.random.default_rng(0)
    home = root / name / "raw"
    home.mkdir(parents=True)
    for split, count in (("train", num_train), ("t10k", num_val)):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = random.integers(0, 10, count, dtype=np.uint8)
        for file, magic, sizes, array in (
            (f"{split}-images-idx3-ubyte", 2051, images.shape, images),
            (f"{split}-labels-idx1-ubyte", 2049, labels.shape, labels),
        ):
            content = struct.pack(f">{1 + len(sizes)}I", magic, *sizes) + array.tobytes()
            if pack:
                (home / f"{file}.gz").write_bytes(gzip.compress(content))
            else:
                (home / file).write_bytes(content)
    return home


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def assert_both_ways_agree(data):
    indices = torch.randperm(len(data), generator=torch.Generator().manual_seed(5))[:7].tolist()
    samples, targets = data.__getitems__(indices)
    for row, index in enumerate(indices):
        sample, target = data[index]
        assert torch.equal(sample, samples[row]) and sample.dtype == samples.dtype
        assert torch.equal(target, targets[row]) and target.dtype == targets.dtype
    no_samples, no_targets = data.__getitems__([])
    assert no_samples.shape == (0, *samples.shape[1:]) and no_samples.dtype == samples.dtype
    assert no_targets.shape == (0, *targets.shape[1:]) and no_targets.dtype == targets.dtype
    for index in (len(data), -1):
        with pytest.raises(IndexError):
            data[index]
        with pytest.raises(IndexError):
            data.__getitems__([0, index])
