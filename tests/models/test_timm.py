"""model=timm: models that others wrote train in every mode as in a plain loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mode_cases import Case
from parity import COMMON, assert_equal, losses_of_a_plain_loop
from runner.shipped.data.random import RandomRegression
from worlds import run

timm: Any = pytest.importorskip("timm", reason="needs the extra timm")

SHAPE = [3, 32, 32]
IMAGE = ("data=random", "data.sample_shape=[3,32,32]")
IMAGES = (
    *(*IMAGE, "data.num_outputs=4", "data.num_train=45", "data.num_val=8"),
    *("batch_size=45", *COMMON, "optimizer.lr=0.001", "max_steps=3", "model=timm"),
)
MODELS = ("test_vit", "test_resnet", "test_efficientnet")
MODES = (Case("none", 1), Case("ddp", 2), Case("allreduce", 4), Case("zero", 2), Case("fsdp", 2), Case("fsdp", 4))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "case", [case if case.mode == "ddp" else pytest.param(case, marks=pytest.mark.thorough) for case in MODES], ids=str
)
def test_a_model_of_timm_equals_a_plain_loop(name: str, case: Case, tmp_path: Path) -> None:
    made = run(tmp_path, case.world_size, *IMAGES, f"model.name={name}", *case.overrides)
    torch.manual_seed(0)
    options = {"img_size": 32} if name == "test_vit" else {}
    model = timm.create_model(name, num_classes=4, in_chans=3, **options).double()
    losses = losses_of_a_plain_loop(model, RandomRegression(True, SHAPE, 4, num_train=45), lr=0.001, num_steps=3)
    assert [made.losses[step] for step in (1, 2, 3)] == pytest.approx(losses, rel=1e-9)
    torch.testing.assert_close(dict(made.weights), model.state_dict(), rtol=0, atol=1e-9)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Grad strides")  # of 1 x 1 convolutions, under ddp
@pytest.mark.parametrize("name", timm.list_models("test_*"))
def test_the_small_models_of_timm_agree_in_all_modes(name: str, tmp_path: Path) -> None:
    words = (*IMAGES, "data.num_train=12", "batch_size=12", f"model.name={name}")
    words = tuple(word for word in words if word not in ("data.num_train=45", "batch_size=45"))
    one = run(tmp_path / "one", 1, *words)
    for case in (Case("ddp", 2), Case("zero", 2), Case("fsdp", 2)):
        assert_equal(run(tmp_path / str(case), case.world_size, *words, *case.overrides), one)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*IMAGE, "model.name=resnt18"), "name=resnt18 is not a model of timm; did you mean resnet18"),
        ((*IMAGE, "model.name=test_vit", "model.options={widht:3}"), "timm refuses test_vit with these options: "),
        ((*IMAGE, "model.name=test_vit.wrong"), "timm refuses test_vit.wrong with these options: "),
        (("data=toy",), "timm needs image samples"),
    ],
)
def test_wrong_options_are_refused(
    words: tuple[str, ...], message: str, here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert here("model=timm", *words) == 2
    errors = capfd.readouterr().err
    assert message in errors and len(errors.splitlines()) <= 3 and not [*tmp_path.iterdir()], errors
