"""Training samples drawn by their weights: how often, the same on any number of ranks, what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import RankError
from torch.utils.data import TensorDataset
from worlds import run

from runner.training.augmentation import Augmented
from runner.training.loader import Loader
from runner.training.part import Part
from runner.training.precision import Precision
from runner.training.sample_weights import read_weights
from runner.training.sampler import Sampler

CPU = torch.device("cpu")


def data(num_samples: int = 10, **attributes: Any) -> Any:
    made = TensorDataset(torch.arange(num_samples)[:, None].float(), torch.arange(num_samples))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def test_an_epoch_has_its_own_draw_which_is_cut_among_the_ranks() -> None:
    weights = torch.arange(23, dtype=torch.float64)
    samplers = [Sampler(23, 5, 2, rank, 3, seed=4, weights=weights) for rank in range(3)]
    one = Sampler(23, 5, 2, seed=4, weights=weights)
    for epoch in range(2):
        shares = [list(sampler.shares(epoch)) for sampler in samplers]
        whole = [index for share in one.shares(epoch) for index in share]
        assert [index for parts in zip(*shares, strict=True) for part in parts for index in part] == whole
        assert len(whole) == 23 and len(set(whole)) < 23 and 0 not in whole
    assert list(one.shares(0)) != list(one.shares(1)) and list(one.shares(1, 2)) == list(one.shares(1))[4:]


def test_weights_of_a_file_and_of_a_data_set(tmp_path: Path) -> None:
    path = str(tmp_path / "weights.npy")
    np.save(path, np.arange(10, dtype="f4"))
    rows = torch.tensor([2, 3, 7])
    expected = torch.arange(10, dtype=torch.float64)
    own = data(sample_weights=list(range(10)))
    for dataset, weights in (
        (own, expected),
        (Part(own, rows), expected[rows]),
        (Augmented(own, {}, 0, False), expected),
        (Augmented(Part(own, rows), {}, 0, False), expected[rows]),
    ):
        assert torch.equal(read_weights("data", dataset), weights)
        assert torch.equal(read_weights(path, dataset), weights)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(9), r" must be one number for each of the 10 training samples, not float64 of shape \[9\]"),
        (np.ones((10, 1)), r" must be one number for each of the 10 training samples, not float64 of shape \[10, 1\]"),
        (np.array(["a"] * 10), " must be one number for each of the 10 training samples, not <U1"),
        (np.zeros(10), " must be finite and at least 0, and one of them above 0"),
        (np.full(10, np.nan), " must be finite and at least 0"),
        (np.array([-1, *[1] * 9]), " must be finite and at least 0"),
    ],
)
def test_weights_that_cannot_be_drawn_by_are_refused(weights: Any, message: str, tmp_path: Path) -> None:
    path = str(tmp_path / "weights.npy")
    np.save(path, weights)
    with pytest.raises(ValueError, match=f"^loader.weights={path}{message}"):
        read_weights(path, data())
    with pytest.raises(ValueError, match=f"^loader.weights=data{message}"):
        read_weights("data", data(sample_weights=weights))


def test_what_is_no_source_of_weights_is_told(tmp_path: Path) -> None:
    (tmp_path / "bad.npy").write_bytes(b"\x93NUMPY")
    for source, message in (
        ("data", "the data set has no sample_weights; give it that attribute, or name a .npy file"),
        ("weights.txt", r"must be data \(the data set's sample_weights\) or a .npy file"),
        (f"{tmp_path}/none.npy", "cannot be read: No such file or directory"),
        (f"{tmp_path}/bad.npy", "cannot be read: "),
    ):
        with pytest.raises(ValueError, match=f"^loader.weights={source}.*{message}"):
            read_weights(source, data())
    with pytest.raises(ValueError, match=r"^loader.shuffle=false has no effect with loader.weights=data; leave one"):
        Loader(data(), Sampler(10, 2), Precision("fp32", CPU), CPU, shuffle=False, weights="data")


def test_a_run_with_weights_is_the_same_on_two_ranks_and_evaluates_each_sample_once(tmp_path: Path) -> None:
    path = str(tmp_path / "weights.npy")
    np.save(path, np.arange(1437) % 3)
    words = ("model=linear", "data.sample_shape=[1,8,8]", "batch_size=300", "precision=fp64")
    words = (*words, "logger=none", "epochs=2", f"loader.weights={path}")
    one = run(tmp_path / "one", 1, *words)
    two = run(tmp_path / "two", 2, *words, "parallel=ddp", "loader.num_workers=1", "micro_batches=2")
    assert two.result["metrics"] == pytest.approx(one.result["metrics"], rel=1e-9)
    plain = run(tmp_path / "plain", 1, *words[:-1])
    assert plain.result["metrics"]["train/loss"] != pytest.approx(one.result["metrics"]["train/loss"], rel=1e-6)
    accuracy = one.result["metrics"]["val/accuracy"] * 360
    assert accuracy == pytest.approx(round(accuracy))
    with pytest.raises(RankError, match=r"loader\.weights=data: the data set has no sample_weights"):
        run(tmp_path / "none", 1, *words[:-1], "loader.weights=data")
    assert not (tmp_path / "none" / "run").exists()
