"""parallel=tp: meshes, dropout between shards, checkpoints that other modes continue, and refusals."""

from collections.abc import Callable
from pathlib import Path

import pytest
from parity import COMMON, assert_equal
from runner.shipped.models.toy import Toy
from runner.shipped.models.transformer import Transformer
from torch import nn
from worlds import Run, run

from runner.parallel.tp import TP

MLP = ("model=mlp", "model.hidden=[16,12]", "data.sample_shape=[1,8,8]", "batch_size=350", *COMMON)


def test_dropout_between_shards_is_that_of_one_process(one_process: Callable[..., Run], tmp_path: Path) -> None:
    """Otherwise, ranks with shards of one layer would drop the same units of each shard."""
    overrides = (*MLP, "model.dropout=0.5")
    assert_equal(run(tmp_path, 2, *overrides, "parallel=tp"), one_process(*overrides))


@pytest.mark.thorough
def test_bf16_is_close_to_one_process(one_process: Callable[..., Run], tmp_path: Path) -> None:
    overrides = (*MLP, "precision=bf16", "max_steps=4")
    two = run(tmp_path, 2, *overrides, "parallel=tp")
    assert two.losses == pytest.approx(one_process(*overrides).losses, rel=0.02)


def test_invalid_options_and_unsuitable_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^parallel.tensor=3 must divide the world of 4 ranks; try 2 or 4$"):
        TP(tensor=3).axes(4)
    with pytest.raises(ValueError, match=r"^parallel.rest=fsdp has no effect, because parallel.tensor=2 uses all"):
        TP(rest="fsdp").axes(2)
    with pytest.raises(ValueError, match=r"^parallel.tensor=0 must divide the world of 4 ranks; try 1 or 2$"):
        TP(tensor=0).axes(4)

    def refusal(tensor: int, module: nn.Module) -> str:
        mode = TP(tensor=tensor).at(4)
        return "".join(mode.check(module, "none"))

    assert "must divide the 10 outputs of hidden; try parallel.tensor=2" in refusal(4, Toy((10,), 5))
    assert not refusal(2, Toy((10,), 5))
    transformer = Transformer((1, 8, 8), 10, dim=16, heads=2)
    assert "must divide the 2 heads of blocks.0.attention.query; try parallel.tensor=2" in refusal(4, transformer)
    assert "needs a model with tensor_plan()" in refusal(2, nn.Linear(4, 4))
