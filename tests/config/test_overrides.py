"""Tests of the messages for overrides that do not compose, over a small configuration tree."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from custom_files import write_files
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig

from runner.config import compose as composition
from runner.config.diagnostics.overrides import explain, refuse_overrides
from runner.errors import InputError


@dataclass
class Checkpoints:
    every: int = 1
    keep: int | None = None


@dataclass
class Top:
    model: Any = MISSING
    optimizer: Any = MISSING
    launcher: Any = MISSING
    epochs: int = 1
    clip: float | None = None
    seeds: list[int] = field(default_factory=list)
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    run: str | None = None
    other: Any = None
    dangling: Any = "${nothing.such}"


FILES = {
    "config.yaml": """
        defaults:
          - schema_of_test_diagnose
          - model: convnet
          - optimizer: sgd
          - launcher: env
          - _self_
          - experiment: null
        epochs: 3
    """,
    "model/convnet.yaml": "channels: [16, 32]\n",
    "model/toy.yaml": "hidden: 10\n",
    "model/vision/big.yaml": "# @package model\nwidth: 3\n",
    "optimizer/sgd.yaml": "lr: 1e-1\n",
    "launcher/env.yaml": "{}\n",
    "launcher/spawn.yaml": "nproc_per_node: 2\n",
    "extra/one.yaml": "# @package other\nx: 1\n",
    "extra/two.yaml": "# @package other\nx: 2\n",
    "extra/none.yaml": "{}\n",
    "experiment/none.yaml": "{}\n",
}


@pytest.fixture
def loader(tmp_path: Path) -> Iterator[ConfigLoader]:
    write_files(tmp_path, FILES)
    ConfigStore.instance().store(name="schema_of_test_diagnose", node=Top)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()
    GlobalHydra.instance().clear()


def compose(loader: ConfigLoader, overrides: Sequence[str]) -> DictConfig:
    return loader.load_configuration("config", list(overrides), RunMode.RUN)


def explained(loader: ConfigLoader, *overrides: str) -> list[str]:
    with pytest.raises(Exception) as caught:  # Hydra raises ValueError too
        compose(loader, overrides)
    messages = explain(caught.value, overrides, loader)
    assert all("\n" not in message for message in messages)
    return messages


def test_unknown_options_suggest_the_nearest(loader: ConfigLoader):
    wrong = {
        "model=convnt": ": no such model; did you mean convnet? (convnet, toy)",
        "model=zzz": ": no such model; choose among: convnet, toy",
        "model=null": ": no such model; choose among: convnet, toy",
        "model=[toy,toi]": ": no such model; did you mean toy? (convnet, toy)",
        "model=spawn": ": no such model; did you mean launcher=spawn?",
        "experiment=null": ": a group cannot be null; type ~experiment",
        "+extra=null": ": no such extra; did you mean none? (none, one, two)",
        "modle@inner=toy": ": no such key; did you mean model?",
    }
    assert explained(loader, *wrong) == [line + text for line, text in wrong.items()]


def test_wrong_ways_to_choose_an_existing_option(loader: ConfigLoader):
    for line in ("+model=toy", "++model=toy", "~model=toy", "extra=one"):
        (message,) = explained(loader, line, "launcher=spawn")
        assert message.startswith(f"{line}: ")


def test_valid_overrides_are_not_reported(loader: ConfigLoader):
    for lines in (
        ["model=vision/big", "+extra=one", "~experiment", "~launcher"],
        ["model=toy.yaml", "model={hidden:1}"],
        ["++epochs=4", "+model.new=1", "++model.newer=1", "~optimizer.lr", "+seeds=[1]", "clip=0.5"],
    ):
        compose(loader, lines)
        assert explained(loader, *lines, "epoch=3") == ["epoch=3: no such key; did you mean epochs?"]


def test_wrong_keys_suggest_the_nearest(loader: ConfigLoader):
    wrong = {
        "optimizer.lrr=0.1": ": no such key; did you mean optimizer.lr?",
        "lr=0.1": ": no such key; did you mean optimizer.lr?",
        "model.lr=0.1": ": no such key; did you mean optimizer.lr?",
        "optimizer/lr=0.1": ": no such key; did you mean optimizer.lr?",
        "optimizer.lr.x=0.1": ": no such key; did you mean optimizer.lr?",
        "optimizer.zzz=0.1": ": no such key; optimizer has lr; for another option of its class "
        "type +optimizer.zzz=VALUE",
        "optimizer={lrr:1}": ": no such key optimizer.lrr; did you mean optimizer.lr?",
        "modle=toy": ": no such key; did you mean model?",
        "zzzzzzzz=1": ": no such key",
        "hydra.run.dri=x": ": no such key; did you mean hydra.run.dir?",
        "dangling.x=3": ": no such key; did you mean dangling?",
        "~epoch": ": no such key; did you mean epochs?",
    }
    assert explained(loader, *wrong) == [line + text for line, text in wrong.items()]
    for line in ("+epochs=3", "+epochs.x=3", "~optimizer.lr=3", "seeds.7=1"):  # Hydra's own reasons
        (message,) = explained(loader, line)
        assert message.startswith(f"{line}: ")


def test_syntax_errors(loader: ConfigLoader):
    wrong = {
        "epochs": ": no value; type epochs=VALUE",
        "spawn": ": no value; did you mean launcher=spawn?",
        "=3": ": an override must be KEY=VALUE",
        "a b=3": ": an override must be KEY=VALUE",
        "seeds=[1,2": ": a bracket is not closed, or a value in it with special characters is not quoted",
        'run=a"=b\\': ': the value must be quoted; type \'run="a\\"=b\\\\"\'',
    }
    assert explained(loader, *wrong) == [line + text for line, text in wrong.items()]
    assert compose(loader, ['run="a\\"=b\\\\"']).run == 'a"=b\\'


def test_overrides_of_the_search_path_add_options(loader: ConfigLoader, tmp_path: Path):
    (tmp_path / "mine/model").mkdir(parents=True)
    (tmp_path / "mine/model/own.yaml").write_text("depth: 3\n")
    typed = f"hydra.searchpath=[{tmp_path}/mine]"
    assert explained(loader, typed, "model=own", "model.depht=1") == [
        "model.depht=1: no such key; did you mean model.depth?"
    ]
    assert explained(loader, "hydra.searchpath=mine") == ["hydra.searchpath must be a list of strings. Got: mine"]


def test_directories_of_hydra_cannot_be_set():
    wrong = ["++hydra.sweep.subdir=x", "~hydra.output_subdir", "hydra.run={dir:x}", "hydra={run:{dir:x}}"]
    rule = ": outputs and name decide the directory; type outputs=DIR or name=NAME"
    right = ["hydra.verbose=true", "hydra.job.name=x", "hydra.job={name:x}", "run=hydra.run.dir", "outputs=x"]
    assert refuse_overrides([*right, *wrong]) == [line + rule for line in wrong]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("epochz=3", "no such key; did you mean epochs?"),
        ("optimizer.lrr=0.1", "no such key; did you mean optimizer.lr?"),
        ("checkpoint.kep=3", "no such key; did you mean checkpoint.keep?"),
    ],
)
def test_a_key_that_does_not_exist_is_refused_after_one_composition(
    wrong: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed = list[str | None]()
    load = ConfigLoaderImpl.load_configuration
    monkeypatch.setattr(
        ConfigLoaderImpl,
        "load_configuration",
        lambda self, config_name, *args, **options: (
            composed.append(config_name),
            load(self, config_name, *args, **options),
        )[1],
    )
    with composition.prepared_hydra([]), pytest.raises(InputError) as raised:
        composition.compose(["experiment=digits", wrong, "batch_size=3"])
    assert raised.value.messages == [f"{wrong}: {message}"]
    assert composed == ["config"]
