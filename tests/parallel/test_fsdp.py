"""parallel=fsdp: meshes, options, empty shares, and checkpoints that other modes go on with."""

from pathlib import Path

import pytest
from parity import COMMON, EXPERIMENTS, assert_equal
from ranks import RankError, run_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule
from worlds import Run, configure, run

from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.parallel.fsdp import FSDP, _units
from runner.training.build import build

CONVNET = (*EXPERIMENTS["convnet"], *COMMON)
TOY = (*EXPERIMENTS["toy"], *COMMON)
STEADY = ("micro_batches=3", "clip_grad_norm=0.1")
TRANSFORMER = ("model=transformer", "model.dim=16", "model.depth=2", "model.heads=2", *CONVNET[2:])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("none"), 1, *CONVNET, *STEADY)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("parallel.replicate=2",), marks=pytest.mark.thorough),
        ("parallel.reshard_after_forward=false", "parallel.meta_init=false"),
    ],
    ids=lambda options: options[0],
)
def test_meshes_and_options_change_no_number(options: tuple[str, ...], reference: Run, tmp_path: Path) -> None:
    """With several micro-batches, and a norm over all shards that clips every step."""
    assert_equal(run(tmp_path, 4, *CONVNET, *STEADY, "parallel=fsdp", *options), reference)


@pytest.mark.thorough
def test_adamw_and_a_transformer(tmp_path: Path) -> None:
    words = (*TRANSFORMER, "optimizer=adamw", "optimizer.lr=0.001")
    assert_equal(run(tmp_path / "2", 2, *words, "parallel=fsdp"), run(tmp_path / "1", 1, *words))


def test_ranks_without_a_sample(tmp_path: Path) -> None:
    """33 samples in batches of 16: the third step has one sample for four ranks and two micro-batches."""
    words = (*TOY[:2], "data.num_train=33", "batch_size=16", "micro_batches=2", *COMMON[:3], "max_steps=6")
    one = run(tmp_path / "1", 1, *words, "logger=none")
    four = run(tmp_path / "4", 4, *words, "logger=none", "parallel=fsdp", "parallel.replicate=2")
    assert four.losses == pytest.approx(one.losses, rel=1e-9)


def test_checkpoint_goes_from_mode_to_mode(reference: Run, tmp_path: Path) -> None:
    """Trained on four ranks, and from the middle of an epoch by ddp on two, then fsdp on one; evaluated on one."""
    first = run(tmp_path, 4, *CONVNET, *STEADY, "max_steps=4", "parallel=fsdp")
    run(tmp_path / "1", 2, f"resume='{first.path}'", "max_steps=7", "parallel=ddp")
    last = run(tmp_path / "2", 1, f"resume='{first.path}'", "max_steps=10", "parallel=fsdp")
    assert_equal(last, reference)
    evaluated = run(tmp_path, 1, "task=evaluate", f"run='{first.path}'", "parallel=none", f"outputs={tmp_path}/e")
    assert evaluated.result["metrics"] == pytest.approx(
        {name: value for name, value in reference.result["metrics"].items() if name.startswith("val")}, rel=1e-9
    )


@pytest.mark.parametrize("mixed", [pytest.param("false", marks=pytest.mark.thorough), "true"])
def test_bf16_stays_near_one_process(mixed: str, tmp_path: Path) -> None:
    words = (*CONVNET, "precision=bf16", "max_steps=4")
    one = run(tmp_path / "1", 1, *words)
    two = run(tmp_path / "2", 2, *words, "parallel=fsdp", f"parallel.mixed_precision={mixed}")
    assert two.losses == pytest.approx(one.losses, rel=0.02)


def test_no_rank_builds_the_whole_model() -> None:
    config, request = configure(*CONVNET, "parallel=fsdp")

    def build_alone(rank: int, world_size: int) -> None:
        experiment = build(
            config, request.choices, World(RankInfo(0, 0, 1, 1, found="test"), None, as_backend(config.backend))
        )
        assert all(parameter.is_meta for parameter in experiment.recipe.module.parameters())
        assert experiment.num_parameters == 1266

    run_ranks(build_alone, 1)


def test_units_are_modules_that_forward_calls() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.out.weight = self.embed.weight  # shared: neither can be gathered without the other
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())])
            self.relu = nn.ReLU()

    model = Model()
    assert list(_units(model)) == [[model.blocks[0], model.blocks[1]]]
    assert not isinstance(model.embed, FSDPModule)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^parallel.replicate=3 must divide the world of 4 ranks; try 2 or 4$"):
        FSDP(replicate=3).axes(4)
    with pytest.raises(ValueError, match=r"^parallel.replicate=2 must divide the world of 1 rank; try 1$"):
        FSDP(replicate=2).axes(1)
    with pytest.raises(ValueError, match=r"^parallel.replicate=0 must be at least 1$"):
        FSDP(replicate=0)
    with pytest.raises(RankError, match=r"InputError: parallel.mixed_precision=true computes in bfloat16"):
        run(tmp_path, 2, *TOY, "parallel=fsdp", "parallel.mixed_precision=true")
    assert not list(tmp_path.glob("run/*"))
