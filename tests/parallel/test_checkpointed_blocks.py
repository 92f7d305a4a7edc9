"""activation_checkpointing: fewer activations are stored for backward, and no number changes, in every mode."""

from pathlib import Path

import custom_models
import pytest
import torch
from mode_cases import ONCE, Case, tier
from parity import COMMON, assert_equal
from ranks import RankError
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from worlds import run

from runner.errors import InputError
from runner.training.model.activation_checkpointing import blocks_to_checkpoint, checkpoint_activations

# With dropout, whose masks must be drawn again, and BatchNorm, whose statistics must move once.
CHAIN = ("model=linear", "model._target_=custom_models.Chain", "+model.dropout=0.1", "+model.batch_norm=true")
OVERRIDES = (*CHAIN, "data=toy", "data.num_train=350", "batch_size=90", *COMMON, "max_steps=3")
CUT_APART = "model._target_=custom_models.CutApart"
SPLIT_BACKWARD = Case("pipeline", 2, ("parallel.schedule=ZBV",))
DIFFERENT = (Case("none", 1), Case("fsdp", 2), Case("tp", 2), SPLIT_BACKWARD)  # those of CI besides ddp


@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=tier(case.mode == "ddp", case in DIFFERENT))
        for case in [*ONCE, SPLIT_BACKWARD]
    ],
)
def test_no_number_changes(case: Case, tmp_path: Path) -> None:
    overrides = (*OVERRIDES, *case.overrides, "micro_batches=2")
    made = run(tmp_path / "again", case.world_size, *overrides, "activation_checkpointing=full")
    assert_equal(made, run(tmp_path / "kept", case.world_size, *overrides), tolerance=1e-12)


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
    plain = (*CHAIN[:2], "data=toy", *COMMON)
    full = "activation_checkpointing=full"
    for overrides, message in (
        (("activation_checkpointing=0",), "activation_checkpointing=0 must be none, full or n of at least 1"),
        (("activation_checkpointing=all",), "activation_checkpointing=all must be none, full or n"),
        ((full, "compile=true"), f"{full}: compile=true decides"),
        ((full, "parallel=ps", "parallel.forward=remote"), "remote: activation_checkpointing may use other weights"),
        ((full, "parallel=tp", CUT_APART), f"{full}: .* activations from blocks.0.up to head,"),
    ):
        with pytest.raises((InputError, RankError), match=message):
            run(tmp_path, 2 if len(overrides) == 3 else 1, *plain, *overrides)


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
