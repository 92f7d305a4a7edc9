"""The model of a run directory in one process computes the run's metrics, whatever mode has trained it."""

from pathlib import Path

import pytest
import torch
import yaml
from runner.shipped.data.digits import Digits
from worlds import Run, run

from runner.errors import InputError
from runner.jobs.trained_model import load_trained

DATA = ("logger=none", "batch_size=300", "optimizer.lr=0.01", "data.sample_shape=[1,16,16]")
TIED = ("model=linear", "model._target_=custom_models.Tied")
SPLIT = ("model=split", "model.devices=[cpu,cpu]", "parallel=ddp")


def loss(model: torch.nn.Module, dtype: torch.dtype) -> float:
    data = Digits(False, [1, 16, 16], 10)
    with torch.no_grad():
        outputs = model(torch.stack([sample for sample, _ in data]).to(dtype))
    return torch.nn.functional.cross_entropy(outputs, torch.tensor([int(target) for _, target in data])).item()


@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        pytest.param(2, ("parallel=fsdp", "model=convnet", "ema.decay=0.9"), marks=pytest.mark.thorough),
        (2, ("parallel=pipeline", *TIED)),
        pytest.param(2, SPLIT, marks=pytest.mark.thorough),
    ],
    ids=["fsdp", "pipeline", "split"],
)
def test_the_loaded_model_gives_the_metrics_of_the_evaluation(
    world_size: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    precision, dtype = ("fp32", torch.float32) if "parallel=fsdp" in words else ("fp64", torch.float64)
    done = run(tmp_path, world_size, *DATA, *words, f"precision={precision}", "epochs=3", "monitor=val/loss")
    before = torch.get_rng_state()
    last = load_trained(done.path)
    assert torch.equal(torch.get_rng_state(), before) and not last.training
    assert {parameter.dtype for parameter in last.parameters()} == {dtype}
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert loss(last, dtype) == pytest.approx(done.result["metrics"]["val/loss"], rel=tolerance)
    best = load_trained(done.path, "best")
    assert loss(best, dtype) == pytest.approx(done.result["best"]["value"], rel=tolerance)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    done: Run = run(tmp_path, 1, *DATA, "model=mlp", "model.hidden=[8]", "max_steps=2")
    recorded = yaml.safe_load((done.path / "config.yaml").read_text())
    for change, message in (
        ({"hidden": [9]}, "which has other shapes: layers.0.weight [8, 256] there and [9, 256] here"),
        ({"hidden": [8, 8]}, "which lacks layers.2.weight, layers.2.bias"),
        ({"hidden": [8], "depth": 3}, "depth"),
    ):
        (done.path / "config.yaml").write_text(yaml.safe_dump(recorded | {"model": recorded["model"] | change}))
        with pytest.raises(InputError) as refused:
            load_trained(done.path)
        assert message in str(refused.value) and len(refused.value.messages) == 1
    with pytest.raises(InputError, match="is no run directory"):
        load_trained(tmp_path / "none")
    (done.path / "config.yaml").write_text(yaml.safe_dump(recorded))
    with pytest.raises(InputError, match="has no checkpoint step_9, only step_2"):
        load_trained(done.path, "step_9")
