"""activation_checkpointing: fewer activations are stored for backward, and no number changes, in every mode."""

from pathlib import Path

import custom_models
import pytest
import torch
from mode_cases import CASES, ONCE, Case, tier
from parity import COMMON, assert_equal
from ranks import RankError
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from worlds import run

from runner.errors import InputError
from runner.parallel.pipeline import SPLITTING
from runner.training.model.activation_checkpointing import blocks_to_checkpoint, checkpoint_activations

# With dropout, whose masks must be drawn again, and BatchNorm, whose statistics must move once.
CHAIN = ("model=linear", "model._target_=custom_models.Chain", "+model.dropout=0.1", "+model.batch_norm=true")
OVERRIDES = (*CHAIN, "data=toy", "data.num_train=350", "batch_size=90", *COMMON)
BY_DEFAULT = ("none", "ddp", "fsdp", "tp", "pipeline", "ps")
SUPPORTED = [case for case in CASES if "parallel.forward=remote" not in case.options] + [
    Case("pipeline", 2, (f"parallel.schedule={schedule}",)) for schedule in SPLITTING if schedule != "ZBV"
]


SPLIT_BACKWARD = Case("pipeline", 2, ("parallel.schedule=ZBV",))


@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=str(case),
            marks=tier(case in ONCE and case.mode in BY_DEFAULT, case in ONCE or case == SPLIT_BACKWARD),
        )
        for case in SUPPORTED
    ],
)
def test_no_number_changes(case: Case, tmp_path: Path) -> None:
    overrides = (*OVERRIDES, *case.overrides, "micro_batches=2")
    extent = "2" if case.world_size == 4 else "full"
    made = run(tmp_path / "again", case.world_size, *overrides, f"activation_checkpointing={extent}")
    assert_equal(made, run(tmp_path / "kept", case.world_size, *overrides), tolerance=1e-12)


@pytest.mark.parametrize("mode", ["fsdp", pytest.param("ddp", marks=pytest.mark.thorough)])
def test_ranks_without_a_sample(mode: str, tmp_path: Path) -> None:
    """36 samples in batches of 16: the third step has two for each micro-batch of three ranks."""
    overrides = (
        *CHAIN,
        "data=toy",
        "data.num_train=36",
        "batch_size=16",
        "micro_batches=2",
        *COMMON[:3],
        "max_steps=6",
    )
    made = [
        run(tmp_path / extent, 3, *overrides, f"parallel={mode}", f"activation_checkpointing={extent}")
        for extent in ("none", "full")
    ]
    assert made[1].losses == pytest.approx(made[0].losses, rel=1e-12)


def test_less_is_kept_for_backward() -> None:
    kept: dict[str | int, int] = {}
    for extent in ("none", 2, "full"):
        torch.manual_seed(0)
        model = custom_models.Chain([10], 5)
        names = list(model.state_dict())
        checkpoint_activations(model, extent)
        assert list(model.state_dict()) == names
        assert isinstance(model.blocks[0], custom_models.Block) and type(model.blocks[0]).__name__ == "Block"
        kept[extent] = _bytes_kept(model, torch.randn(512, 10))
    assert kept["full"] < 0.25 * kept["none"]
    assert kept["full"] < kept[2] < kept["none"]


def test_blocks_are_modules_of_modules_that_forward_calls() -> None:
    model = custom_models.Tied([10], 5)
    assert blocks_to_checkpoint(model, "full") == list(model.blocks)
    assert blocks_to_checkpoint(model, 3) == [model.blocks[2]]
    assert blocks_to_checkpoint(model, "none") == []
    plain = nn.ModuleDict({"body": nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "head": nn.Linear(2, 2)})
    assert blocks_to_checkpoint(plain, "full") == [plain["body"]]


class Counting(custom_models.Block):
    """A block whose forward changes a buffer."""

    def __init__(self, width: int):
        super().__init__(width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(features)


def test_unsuitable_models_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^activation_checkpointing=5: the model has only 4 blocks"):
        blocks_to_checkpoint(custom_models.Chain([10], 5), 5)
    with pytest.raises(InputError, match=r"^activation_checkpointing=full: the model has only 0 blocks"):
        blocks_to_checkpoint(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), "full")
    model = nn.Sequential(Counting(8), nn.Linear(8, 1))
    checkpoint_activations(model, "full")
    model(torch.randn(4, 8)).sum().backward()
    assert model[0].calls == 1  # a buffer changes once
    for overrides, message in (
        (("activation_checkpointing=0",), "activation_checkpointing=0 must be none, full or n of at least 1"),
        (("activation_checkpointing=all",), "activation_checkpointing=all must be none, full or n"),
        (("activation_checkpointing=full", "compile=true"), "activation_checkpointing=full: compile=true decides"),
    ):
        with pytest.raises((InputError, RankError), match=message):
            run(tmp_path, 1, *OVERRIDES, *overrides)
    extent = "activation_checkpointing=full"
    for overrides, message in (
        (("parallel=ps", "parallel.forward=remote"), "under parallel.forward=remote the weights"),
        (("parallel=tp", "model._target_=custom_models.CutApart"), ".* activations from blocks.0.up to head,"),
    ):
        with pytest.raises(RankError, match=f"InputError: {extent}: {message}"):
            run(tmp_path, 2, OVERRIDES[0], OVERRIDES[1], *OVERRIDES[4:], *overrides, extent)
    assert not list(tmp_path.glob("run/*"))


def _bytes_kept(model: nn.Module, inputs: torch.Tensor) -> int:
    """Return the size of the tensors kept for backward, without the parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(inputs)
    outputs.sum().backward()
    return sum(seen.values())
