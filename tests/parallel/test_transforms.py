"""Transformed samples, drawn by weights, are the same in every mode, at every world size, in micro-batches or not."""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from parity import COMMON, assert_equal
from ways import tier
from worlds import MODES, Run, run

# Of 1,437 digits, two epochs in ten steps; the last batch of each is uneven.
WORDS = (
    *("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=310"),
    *("transforms=[flip_crop,colors]", "transforms.crop.padding=1", *COMMON),
)
# What gives other numbers by its definition, on several ranks, is compared with one process in test_parity.py.
ONE_PROCESS, NOT_ALONE = ("none", "dp", "local_sgd"), ("ps",)
CELLS = [
    (mode, world_size, micro_batches)
    for mode in MODES
    for world_size in ((1,) if mode in ONE_PROCESS else (2, 4) if mode in NOT_ALONE else (1, 2, 4))
    for micro_batches in (1, 3)
]
LARGEST = [(mode, 1 if mode in ONE_PROCESS else 4, 3) for mode in MODES]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    path = tmp_path_factory.mktemp("weights") / "weights.npy"
    np.save(path, 1 + np.arange(1437) % 5)
    return (*WORDS, f"loader.weights={path}")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, words: tuple[str, ...]) -> Callable[[], Run]:
    return functools.cache(lambda: run(tmp_path_factory.mktemp("one"), 1, *words))


@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(
    ("mode", "world_size", "micro_batches"),
    [pytest.param(*cell, marks=tier(cell == ("ddp", 2, 3), cell in LARGEST)) for cell in CELLS],
)
def test_mode_equals_one_process(
    mode: str,
    world_size: int,
    micro_batches: int,
    words: tuple[str, ...],
    reference: Callable[[], Run],
    tmp_path: Path,
) -> None:
    workers = "loader.num_workers=1" if world_size == 2 else "loader.num_workers=0"
    spread = run(tmp_path, world_size, *words, f"parallel={mode}", f"micro_batches={micro_batches}", workers)
    assert_equal(spread, reference())
