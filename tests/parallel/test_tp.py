"""parallel=tp: meshes, dropout between slices, checkpoints that other modes go on with, and what is refused."""

from pathlib import Path

import pytest
from parity import COMMON, EXPERIMENTS, assert_equal
from ranks import RankError
from torch import nn
from worlds import Run, configure, run

from models.toy import Toy
from models.transformer import Transformer
from runner.parallel.tp import TP

CONVNET = (*EXPERIMENTS["convnet"], *COMMON)
MLP = ("model=mlp", "model.hidden=[16,12]", "data.sample_shape=[1,8,8]", "batch_size=350", *COMMON)
STEADY = ("micro_batches=3", "clip_grad_norm=0.1")
TRANSFORMER = ("model=transformer", "model.dim=16", "model.depth=1", "model.heads=4", *CONVNET[2:])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("none"), 1, *CONVNET, *STEADY)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("parallel.rest=average",), marks=pytest.mark.thorough),
        ("parallel.rest=fsdp",),
        pytest.param(("parallel.tensor=4",), marks=pytest.mark.thorough),
    ],
)
def test_meshes_change_no_number(options: tuple[str, ...], reference: Run, tmp_path: Path) -> None:
    """With whole and sliced parameters, several micro-batches, and a norm over all of them that clips every step."""
    assert_equal(run(tmp_path, 4, *CONVNET, *STEADY, "parallel=tp", *options), reference)


@pytest.mark.thorough
@pytest.mark.parametrize("rest", ["average", "fsdp"])
def test_adamw_and_a_transformer(rest: str, tmp_path: Path) -> None:
    words = (*TRANSFORMER, "optimizer=adamw", "optimizer.lr=0.001", "clip_grad_norm=0.5", "max_steps=10")
    one = run(tmp_path / "1", 1, *words)
    assert_equal(run(tmp_path / "4", 4, *words, "parallel=tp", f"parallel.rest={rest}"), one)


def test_dropout_between_slices_is_that_of_one_process(tmp_path: Path) -> None:
    """Ranks that hold slices of one layer would else leave out the same units of each slice."""
    words = (*MLP, "model.dropout=0.5")
    assert_equal(run(tmp_path / "2", 2, *words, "parallel=tp"), run(tmp_path / "1", 1, *words))


@pytest.mark.thorough
def test_checkpoint_goes_from_mode_to_mode(reference: Run, tmp_path: Path) -> None:
    """Whole and sliced parameters are two groups of the optimizer here, and one elsewhere."""
    first = run(tmp_path, 4, *CONVNET, *STEADY, "max_steps=3", "parallel=tp")
    run(tmp_path / "1", 2, f"resume='{first.path}'", "max_steps=5", "parallel=fsdp")
    run(tmp_path / "2", 2, f"resume='{first.path}'", "max_steps=8", "parallel=tp")
    assert_equal(run(tmp_path / "3", 1, f"resume='{first.path}'", "max_steps=10", "parallel=none"), reference)


@pytest.mark.thorough
def test_bf16_stays_near_one_process(tmp_path: Path) -> None:
    words = (*MLP, "precision=bf16", "max_steps=4")
    one, two = run(tmp_path / "1", 1, *words), run(tmp_path / "2", 2, *words, "parallel=tp")
    assert two.losses == pytest.approx(one.losses, rel=0.02)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^parallel.tensor=3 must divide the world of 4 ranks; try 2 or 4$"):
        TP(tensor=3).axes(4)
    with pytest.raises(ValueError, match=r"^parallel.rest=fsdp has no effect where parallel.tensor=2 takes all ranks$"):
        TP(rest="fsdp").axes(2)
    with pytest.raises(ValueError, match=r"^parallel.tensor=0 must be at least 1; try 2$"):
        TP(tensor=0)

    def refused(tensor: int, module: nn.Module, *words: str) -> str:
        mode = TP(tensor=tensor)
        mode.axes(4)
        return "".join(mode.check(configure(*words)[0], module))

    assert "must divide the 10 outputs of hidden; try parallel.tensor=2" in refused(4, Toy((10,), 5))
    assert not refused(2, Toy((10,), 5))
    transformer = Transformer((1, 8, 8), 10, dim=16, heads=2)
    assert "must divide the 2 heads of blocks.0.attention.query; try parallel.tensor=2" in refused(4, transformer)
    assert "needs a model with tensor_plan()" in refused(2, nn.Linear(4, 4))
    assert "precision=fp16 does not go" in refused(2, Toy((10,), 5), "precision=fp16")
    with pytest.raises(RankError, match=r"InputError: parallel.tensor=4 must divide the 10 outputs of hidden"):
        run(tmp_path, 4, *EXPERIMENTS["toy"], "parallel=tp", "parallel.tensor=4")
    assert not list(tmp_path.glob("run/*"))
