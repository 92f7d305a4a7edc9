"""Tests of conf/: every file composes, matches its constructor, and creates its object."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from torch import nn

from runner.config.diagnostics.import_target import locate
from runner.config.diagnostics.signature import check_options, provided
from runner.config.instantiate import create
from runner.config.schema import GROUPS, NAMED_GROUPS, as_config
from runner.config.texts import typed_options
from runner.config.validate import DESCRIBED, check_input
from runner.optimization.optimizers import OptimizerFactory
from runner.paths import CONF

ANY_SAMPLES = ("linear", "mlp", "toy")
OF_TOKENS = ("gpt",)  # samples are sequences of them; the other models are for images
OF_PIXELS = ("unet",)  # each token has outputs, not the whole sample
# Values without a default.
NEEDED = {
    ("model", "hf"): ("model.config=config.json",),
    ("launcher", "ssh"): ("launcher.hosts=[node1]",),
    ("launcher", "kubernetes"): ("launcher.image=IMAGE",),
    ("task", "shards"): ("task.output=shards",),
}
EMBEDDED = ("counting", "digits", "random", "shapes", "text", "toy")  # the other datasets read files


def options(group: str) -> list[str]:
    found = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    assert found
    return found


CHOICES = [(group, option) for group in GROUPS for option in options(group)]


@pytest.fixture(scope="module", autouse=True)
def composing() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


@functools.cache
def composed(*overrides: str) -> DictConfig:
    return compose("config", list(overrides))


def resolved(cfg: DictConfig) -> dict[str, Any]:
    container: Any = OmegaConf.to_container(cfg, resolve=True)
    return container


def node_of(group: str, option: str) -> dict[str, Any]:
    node: dict[str, Any] = typed_options(
        resolved(composed(f"{group}={option}", *NEEDED.get((group, option), ())))[group], DESCRIBED.get(group)
    )
    return node


def test_every_directory_is_a_group() -> None:
    assert {path.name for path in CONF.iterdir() if path.is_dir()} == {
        *GROUPS,
        *NAMED_GROUPS,
        "experiment",
        "device",
        "hydra",
    }


@pytest.mark.parametrize(("group", "option"), CHOICES)
def test_options_match_their_constructors(group: str, option: str) -> None:
    node = node_of(group, option)
    assert check_options(group, node, provided(group, node), DESCRIBED.get(group, ())) == []


@pytest.mark.parametrize("name", options("experiment"))
def test_presets_are_valid(name: str) -> None:
    assert check_input(as_config(resolved(composed(f"experiment={name}"))), {}) == []


@pytest.mark.parametrize("option", options("hydra/sweeper"))
def test_sweepers_exist(option: str) -> None:
    cfg = compose("config", [f"hydra/sweeper={option}"], return_hydra_config=True)
    assert callable(locate(cfg.hydra.sweeper._target_))


@pytest.mark.parametrize(
    ("group", "option"),
    [each for each in CHOICES if each[0] not in ("model", "data", "objective", "optimizer", "loader")],
)
def test_options_create_their_objects(group: str, option: str) -> None:
    assert create(node_of(group, option)) is not None


@pytest.mark.parametrize("option", options("optimizer"))
def test_optimizers_step(option: str) -> None:
    layer = nn.Linear(3, 1)
    before = layer.weight.detach().clone()
    optimizer = OptimizerFactory(node_of("optimizer", option), {"optimizer": option}, layer)(layer.parameters())
    layer.weight.sum().backward()
    optimizer.step()
    assert (layer.weight < before).all()


@pytest.mark.parametrize("option", options("data"))
def test_datasets_match_their_description(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = node_of("data", option)

    def options_of(split: str) -> dict[str, Any]:
        return {"train": split == "train"} if provided("data", node) == ("train",) else {"split": split}

    make = create({**node, "_partial_": True})
    if option not in EMBEDDED:
        given = {"download": False} if "download" in node else {}
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ValueError, match=r"root|datasets/"):
            make(**options_of("train"), **given)
        return
    for split in ("train", "val"):
        sample, target = make(**options_of(split))[0]
        assert list(sample.shape) == node["sample_shape"]
        if torch.is_floating_point(target):
            assert target.shape == (node["num_outputs"],)
        else:
            assert (target >= 0).all() and (target < node["num_outputs"]).all()


@pytest.mark.parametrize("data", [data for data in options("data") if data != "shards"])  # its sizes are found
@pytest.mark.parametrize(
    "model", [model for model in options("model") if model != "hf"]
)  # its file says what it accepts
def test_models_accept_the_samples_of_datasets(model: str, data: str) -> None:
    described = resolved(composed(f"data={data}"))["data"]
    node = resolved(OmegaConf.create({"model": composed(f"model={model}").model, "data": described}))["model"]
    shape, num_outputs = tuple(described["sample_shape"]), described["num_outputs"]
    if model in OF_TOKENS:
        fits, refusal, expected = len(shape) == 1, "sequences of tokens", (2, *shape, num_outputs)
    elif model in OF_PIXELS:
        fits, refusal, expected = len(shape) == 3, "needs image samples", (2, num_outputs, *shape[1:])
    else:
        fits, refusal, expected = len(shape) == 3 or model in ANY_SAMPLES, "needs image samples", (2, num_outputs)
    with torch.device("meta"):  # shapes alone
        if not fits:
            with pytest.raises(ValueError, match=refusal):
                create(node)
            return
        samples = torch.zeros(2, *shape, dtype=torch.int64 if model in OF_TOKENS else torch.float32)
        outputs = create(node).eval()(samples)
    assert outputs.shape == expected
