"""Training samples drawn by weights: the same on any number of ranks; unsuitable weights are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from runner.input.loader import Loader
from runner.input.sample_weights import read_sample_weights
from runner.input.sampler import Sampler
from runner.input.source import Source

CPU = torch.device("cpu")


def data(num_samples: int = 10, **attributes: Any) -> Source:
    made = TensorDataset(torch.arange(num_samples)[:, None].float(), torch.arange(num_samples))
    for name, value in attributes.items():
        setattr(made, name, value)
    return Source.of(made)


def test_each_epoch_draws_anew_and_splits_the_draws_among_ranks() -> None:
    weights = torch.arange(23, dtype=torch.float64)
    samplers = [Sampler(23, 5, 2, rank, 3, seed=4, weights=weights) for rank in range(3)]
    one = Sampler(23, 5, 2, seed=4, weights=weights)
    for epoch in range(2):
        local = [list(sampler.local_batches(epoch)) for sampler in samplers]
        whole = [index for batch in one.local_batches(epoch) for index in batch]
        assert [index for parts in zip(*local, strict=True) for part in parts for index in part] == whole
        assert len(whole) == 23 and len(set(whole)) < 23 and 0 not in whole
    assert (
        list(one.local_batches(0)) != list(one.local_batches(1))
        and list(one.local_batches(1, 2)) == list(one.local_batches(1))[4:]
    )


def test_weights_of_a_file_and_of_a_dataset(tmp_path: Path) -> None:
    path = str(tmp_path / "weights.npy")
    np.save(path, np.arange(10, dtype="f4"))
    rows = torch.tensor([2, 3, 7])
    expected = torch.arange(10, dtype=torch.float64)
    own = data(sample_weights=list(range(10)))
    for source, weights in (
        (own, expected),
        (replace(own, rows=rows), expected[rows]),
    ):
        assert torch.equal(read_sample_weights("data", source), weights)
        assert torch.equal(read_sample_weights(path, source), weights)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(9), r" must contain one number for each of the 10 training samples, not float64 of shape \[9\]"),
        (np.array(["a"] * 10), " must contain one number for each of the 10 training samples, not <U1"),
        (np.zeros(10), " must be finite and at least 0, and one weight must be above 0"),
        (np.array([-1, *[1] * 9]), " must be finite and at least 0"),
    ],
)
def test_unsuitable_weights_are_refused(weights: Any, message: str, tmp_path: Path) -> None:
    path = str(tmp_path / "weights.npy")
    np.save(path, weights)
    with pytest.raises(ValueError, match=f"^loader.weights={path}{message}"):
        read_sample_weights(path, data())
    with pytest.raises(ValueError, match=f"^loader.weights=data{message}"):
        read_sample_weights("data", data(sample_weights=weights))


def test_a_loader_draws_by_weights() -> None:
    loader = Loader(data(sample_weights=[0] * 9 + [1]), Sampler(10, 5), torch.float32, CPU, weights="data")
    assert [list(batch.indices) for step in loader.steps(0) for batch in step.micro_batches] == [[9] * 5] * 2


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.npy").write_bytes(b"\x93NUMPY")
    for source, message in (
        ("data", "the dataset has no sample_weights; add that attribute, or name a .npy file"),
        ("weights.txt", r"must be data \(the dataset's sample_weights\) or a .npy file"),
        (f"{tmp_path}/none.npy", "cannot be read: .*No such file"),
        (f"{tmp_path}/bad.npy", "cannot be read: "),
    ):
        with pytest.raises(ValueError, match=f"^loader.weights={source}.*{message}"):
            read_sample_weights(source, data())
    with pytest.raises(ValueError, match=r"^loader.shuffle=false has no effect with loader.weights=data; leave one"):
        Loader(data(), Sampler(10, 2), torch.float32, CPU, shuffle=False, weights="data")
