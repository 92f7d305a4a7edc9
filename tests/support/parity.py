"""Small experiments of ten steps, and the comparison of a run with the one of a single process."""

from collections.abc import Iterable

import pytest
from worlds import Run

# SGD with momentum, the default; 10 steps, two epochs or more: the last batch of each is uneven, and so are its shares.
EXPERIMENTS = {
    "toy": ("model=toy", "data=toy", "data.num_train=350", "batch_size=90"),
    "mlp": ("model=mlp", "model.hidden=[16]", "model.batch_norm=true", "data.sample_shape=[1,8,8]", "batch_size=350"),
    "convnet": ("model=convnet", "model.channels=[4,8]", "data.sample_shape=[1,8,8]", "batch_size=350"),
    "transformer": (
        "model=transformer",
        "model.dim=16",
        "model.depth=2",
        "model.patch_size=4",
        "data.sample_shape=[1,8,8]",
        "batch_size=350",
    ),
}
COMMON = ("precision=fp64", "optimizer.lr=0.01", "epochs=9", "max_steps=10", "logger=none")


def distance(one: Run, other: Run, names: Iterable[str]) -> float:
    return max((one.weights[name].double() - other.weights[name].double()).abs().max().item() for name in names)


def assert_equal(one: Run, reference: Run, tolerance: float = 1e-9) -> None:
    assert one.losses.keys() == reference.losses.keys() == set(range(1, 11))
    for step, loss in reference.losses.items():
        assert one.losses[step] == pytest.approx(loss, rel=tolerance)
    assert one.weights.keys() == reference.weights.keys()
    for name in reference.weights:
        assert distance(one, reference, [name]) <= tolerance, name
    assert one.result["metrics"] == pytest.approx(reference.result["metrics"], rel=tolerance)
