"""Presets with a target for each place, made small: the same numbers in the modes that a user would take for them."""

from functools import cache
from pathlib import Path

import pytest
import worlds
from parity import distance

COMMON = ("max_steps=6", "precision=fp64", "log_every=1", "logger=none", "scheduler.warmup_steps=0")
CHAR_GPT = (
    "experiment=char_gpt",
    *COMMON,
    *("model.dim=16", "model.depth=2", "data.sample_shape=[16]", "batch_size=21"),  # shares are uneven
)
SEGMENTATION = (
    "experiment=segmentation",
    *COMMON,
    *("model.width=2", "data.sample_shape=[1,8,8]", "data.num_train=40", "data.num_val=9", "batch_size=7"),
)
thorough = pytest.mark.thorough


@pytest.fixture(scope="module")
def run_alone(tmp_path_factory: pytest.TempPathFactory):
    return cache(lambda words: worlds.run(tmp_path_factory.mktemp("alone"), 1, *words))


@pytest.mark.parametrize(
    ("words", "world_size", "mode"),
    [
        pytest.param(CHAR_GPT, 4, "pipeline", id="char_gpt-pipeline"),
        pytest.param(CHAR_GPT, 4, "tp", id="char_gpt-tp", marks=thorough),
        pytest.param(CHAR_GPT, 4, "fsdp", id="char_gpt-fsdp", marks=thorough),
        pytest.param(CHAR_GPT, 4, "zero", id="char_gpt-zero", marks=thorough),
        pytest.param(SEGMENTATION, 2, "ddp", id="segmentation-ddp"),
        pytest.param(SEGMENTATION, 2, "fsdp", id="segmentation-fsdp", marks=thorough),
    ],
)
def test_the_numbers_are_those_of_one_process(words, world_size, mode, run_alone, tmp_path: Path) -> None:
    alone, spread = run_alone(words), worlds.run(tmp_path, world_size, *words, f"parallel={mode}")
    assert spread.losses.keys() == set(range(1, 7))
    assert spread.losses == pytest.approx(alone.losses, rel=1e-9)
    assert spread.losses[6] < spread.losses[1]
    assert spread.result["metrics"] == pytest.approx(alone.result["metrics"], rel=1e-9)
    assert spread.weights.keys() == alone.weights.keys()
    assert distance(spread, alone, alone.weights) <= 1e-9
    if words is CHAR_GPT:
        assert (spread.weights["embed.weight"] == spread.weights["head.weight"]).all()
