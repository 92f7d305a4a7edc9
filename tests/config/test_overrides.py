"""What is said of overrides that do not compose, over a small tree of configuration of the tests' own."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf
from own_folders import write_files

from runner.config.diagnostics.overrides import explain, given_twice, refuse_overrides, unknown_keys
from runner.errors import three_lines


class Precision(Enum):
    fp32 = 1
    bf16 = 2


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
    precision: Precision = Precision.fp32
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
    "optimizer/sgd.yaml": f"_target_: {__name__}.SGD\nlr: 1e-1\n",
    "launcher/env.yaml": "{}\n",
    "launcher/spawn.yaml": "nproc_per_node: 2\n",
    "extra/one.yaml": "# @package other\nx: 1\n",
    "extra/two.yaml": "# @package other\nx: 2\n",
    "extra/none.yaml": "{}\n",
    "empty/readme.txt": "",
    "experiment/misspelt.yaml": "# @package _global_\nepoch: 3\n",
    "experiment/mistyped.yaml": "# @package _global_\nepochs: soon\n",
    "experiment/broken.yaml": "# @package _global_\nepochs: [1\n",
}


class SGD:
    def __init__(self, lr: float, nesterov: bool = False) -> None: ...


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


def test_every_wrong_override_is_told_in_the_order_typed(loader: ConfigLoader):
    wrong = {
        "optimizer.lrr=0.1": ": no such key; did you mean optimizer.lr?",
        "model=convnt": ": no such model; did you mean convnet? (convnet, toy)",
        "epoch=3": ": no such key; did you mean epochs?",
        "epochs=abc": " must be an integer (int); for example 3",
        "run=a=b": ": a value with = in it must be quoted; type 'run=\"a=b\"'",
    }
    right = ["clip=0.5", "+other.new=1"]
    assert explained(loader, *wrong, *right) == [line + text for line, text in wrong.items()]


def test_options_that_are_not_there(loader: ConfigLoader):
    choose = "; choose among: convnet, toy"
    wrong = {
        "model=zzz": f": no such model{choose}",
        "model=": f": no such model{choose}",
        "model=null": f": no such model{choose}",
        "model=3": f": no such model{choose}",
        "model=[toy,toi]": ": no such model; did you mean toy? (convnet, toy)",
        "model=vision/bigg": f": no such model{choose}",
        "+extra=null": ": no such extra; did you mean none? (none, one, two)",
        "++model=toy": ": a group takes no ++; type model=toy",
        "empty=x": ": no such empty",
        "modle@inner=toy": ": no such group modle; did you mean model?",
    }
    assert explained(loader, *wrong) == [line + text for line, text in wrong.items()]


def test_options_that_cannot_be_chosen_in_this_way(loader: ConfigLoader):
    for line, text in {
        "+model=toy": ": model is among the defaults already; type model=toy",
        "~model=toy": ": model is convnet; type ~model",
        "model@inner=toy": ": model has no place inner; type model=toy",
        "extra=one": ": extra is not among the defaults; type +extra=one",
        "~extra": ": no extra is chosen; take this out",
    }.items():
        assert explained(loader, line) == [line + text]


def test_sound_choices_are_not_blamed(loader: ConfigLoader):
    for lines in (
        ["model=vision/big", "+extra=one", "~experiment", "~launcher"],
        ["model=toy.yaml", "model={hidden:1}"],
    ):
        compose(loader, lines)
        assert explained(loader, *lines, "epoch=3") == ["epoch=3: no such key; did you mean epochs?"]


def test_a_choice_may_come_before_the_group_it_is_about(loader: ConfigLoader, tmp_path: Path):
    (tmp_path / "extra/one.yaml").write_text("# @package other\ndefaults:\n  - inner: a\n")
    (tmp_path / "extra/inner").mkdir()
    (tmp_path / "extra/inner/a.yaml").write_text("y: 1\n")
    (tmp_path / "extra/inner/b.yaml").write_text("z: 1\n")
    assert explained(loader, "extra/inner@other.inner=b", "+extra=one", "other.inner.z=3", "other.inner.y=3") == [
        "other.inner.y=3: no such key; other.inner has z"
    ]


def test_the_two_launchers(loader: ConfigLoader):
    takes = ", ".join(loader.get_group_options("hydra/launcher"))  # Hydra's own plugins of it may be installed
    assert explained(loader, "hydra/launcher=spawn") == [
        "hydra/launcher=spawn: spawn starts the processes of one run: type launcher=spawn; "
        f"hydra/launcher takes {takes}"
    ]
    assert explained(loader, "launcher=basic") == [
        "launcher=basic: basic decides where the jobs of a sweep run: type hydra/launcher=basic; "
        "launcher takes env, spawn"
    ]
    assert explained(loader, "launcher=spwn") == ["launcher=spwn: no such launcher; did you mean spawn? (env, spawn)"]


def test_keys(loader: ConfigLoader):
    wrong = {
        "lr=0.1": ": no such key; did you mean optimizer.lr?",
        "model.lr=0.1": ": no such key; did you mean optimizer.lr?",
        "optimizer/lr=0.1": ": no such key; did you mean optimizer.lr?",
        "optimizer.lr.x=0.1": ": optimizer.lr holds a value, not keys; type optimizer.lr=0.1",
        "optimizer.zzz=0.1": ": no such key; optimizer has lr",
        "optimizer={lrr:1}": ": no such key optimizer.lrr; did you mean optimizer.lr?",
        "optimizr.zzz=0.1": ": no such key; did you mean optimizer?",
        "modle=toy": ": no such key; did you mean model?",
        "zzzzzzzz=1": ": no such key",
        "hydra.run.dri=x": ": no such key; did you mean hydra.run.dir?",
        "optimizer.nesterov=true": f": the file of optimizer has no nesterov, but {__name__}.SGD takes it; "
        "type +optimizer.nesterov=true",
        "optimizer.nestrov=true": ": no such key; did you mean +optimizer.nesterov?",
        "+epochs=3": ": epochs exists already; type epochs=3",
        "+epochs.x=3": ": epochs holds a value, not keys; type epochs=3",
        "dangling.x=3": ": no such key; did you mean dangling?",
        "~epoch": ": no such key; did you mean epochs?",
        "~optimizer.lr=3": ": optimizer.lr is 0.1; type ~optimizer.lr",
    }
    assert explained(loader, *wrong) == [line + text for line, text in wrong.items()]


def test_hydras_own_plus_and_tilde_are_not_blamed(loader: ConfigLoader):
    right = ["++epochs=4", "+model.new=1", "++model.newer=1", "~optimizer.lr", "+seeds=[1]", "optimizer={lr:2}"]
    assert explained(loader, "epoch=3", *right) == ["epoch=3: no such key; did you mean epochs?"]


def test_types_of_the_top_level(loader: ConfigLoader):
    wrong = {
        "epochs=": " must be an integer (int); for example 3",
        "epochs=1.5": " must be an integer (int); for example 3",
        "epochs=null": " must be an integer (int); for example 3",
        "clip=x": " must be a number (float) or null; for example 0.1",
        "seeds=3": " must be a list of integers (list[int]); for example [1,1]",
        "seeds=[x]": " must be a list of integers (list[int]); for example [1,1]",
        "precision=bf61": " must be one of fp32, bf16; did you mean bf16?",
        "checkpoint=3": ": has keys of its own; type checkpoint.every=VALUE (checkpoint.every, checkpoint.keep)",
        "checkpoint.keep=all": " must be an integer (int) or null; for example 1",
        "seeds.7=1": ": list index out of range",
    }
    assert explained(loader, *wrong) == [line + text for line, text in wrong.items()]


def test_grammar(loader: ConfigLoader):
    wrong = {
        "epochs": ": no value; type epochs=VALUE",
        "model": ": no value; type model=OPTION (convnet, toy)",
        "spawn": ": no value; did you mean launcher=spawn?",
        "=3": " must be KEY=VALUE",
        "a b=3": " must be KEY=VALUE",
        "seeds=[1,2": ": a bracket is not closed",
        "layers=[{match:^head,lr:0.1},{match: a|b$}]": ": a value with such characters must be quoted; type "
        """'layers=[{match:"^head",lr:0.1},{match: a|b$}]'""",
        "run=f(x": ": a value with such characters must be quoted; type 'run=\"f(x\"'",
        'run=a"=b\\': ': a value with = in it must be quoted; type \'run="a\\"=b\\\\"\'',
    }
    assert explained(loader, *wrong) == [line + text for line, text in wrong.items()]


def test_the_quoting_that_is_proposed_composes(loader: ConfigLoader):
    assert compose(loader, ['run="a=b"']).run == "a=b"
    assert compose(loader, ['run="a\\"=b\\\\"']).run == 'a"=b\\'


def test_a_sweep_where_none_can_be(loader: ConfigLoader):
    assert explained(loader, "epochs=1,2", "model=toy,convnet", "clip=range(1,3)") == [
        "epochs=1,2: a sweep needs -m; for one list type epochs=[1,2]",
        "model=toy,convnet: a sweep needs -m",
        "clip=range(1,3): a sweep needs -m",
    ]
    assert explained(loader, "hydra/launcher=basic,other") == [
        "hydra/launcher=basic,other: a sweep cannot go over Hydra's own keys; type one value"
    ]


def test_a_wrong_file(loader: ConfigLoader, tmp_path: Path):
    assert explained(loader, "experiment=misspelt") == [
        "experiment=misspelt: experiment/misspelt.yaml sets epoch, and there is no such key; did you mean epochs?"
    ]
    (mistyped,) = explained(loader, "experiment=mistyped")
    assert mistyped.startswith("experiment=mistyped: In 'experiment/mistyped': ValidationError raised")
    assert mistyped.endswith("Value 'soon' of type 'str' could not be converted to Integer")
    (broken,) = explained(loader, "experiment=broken")
    assert broken.startswith("experiment=broken: ") and f"{tmp_path}/experiment/broken.yaml" in broken


def test_where_nothing_typed_is_wrong_hydras_own_words_come_in_one_line(loader: ConfigLoader, tmp_path: Path):
    (tmp_path / "config.yaml").write_text("defaults:\n  - _self_\n  - model: nothing_such\n")
    assert explained(loader) == [
        "In 'config': Could not find 'model/nothing_such' Available options in 'model': convnet"
    ]
    assert explained(loader, "epochs=3") == explained(loader)


def test_the_words_about_a_reference_name_the_override(loader: ConfigLoader):
    cfg = compose(loader, ["epochs=${nothing}"])
    with pytest.raises(Exception) as caught:
        OmegaConf.to_container(OmegaConf.masked_copy(cfg, ["epochs"]), resolve=True)
    assert explain(caught.value, ["clip=1", "epochs=${nothing}"], loader) == [
        "epochs=${nothing}: Interpolation key 'nothing' not found"
    ]


def test_folders_that_are_typed_join_in(loader: ConfigLoader, tmp_path: Path):
    (tmp_path / "mine/model").mkdir(parents=True)
    (tmp_path / "mine/model/own.yaml").write_text("depth: 3\n")
    typed = f"hydra.searchpath=[{tmp_path}/mine]"
    assert explained(loader, typed, "model=own", "model.depht=1") == [
        "model.depht=1: no such key; did you mean model.depth?"
    ]
    assert explained(loader, "hydra.searchpath=mine", "model=own") == [
        "hydra.searchpath=mine must be a list of text (List[str]); for example [name,name]",
        "model=own: no such model; choose among: convnet, toy",
    ]
    assert explained(loader, "hydra.searchpath=[3]", "epoch=1") == ["epoch=1: no such key; did you mean epochs?"]
    assert explained(loader, "hydra.searchpath=[3]") == ["hydra.searchpath must be a list of strings. Got: [3]"]
    assert explained(loader, typed, "model=onw") == ["model=onw: no such model; did you mean own? (convnet, own, toy)"]


def test_unknown_keys(loader: ConfigLoader):
    allowed = list(Top.__dataclass_fields__)
    overrides = ["+epoch=1", "++lr=0.1", "+checkpoint.kep=2", "+zzzz.deep=1", "+model.free=1", "~epochs"]
    assert unknown_keys(compose(loader, overrides), allowed, overrides) == [
        "+epoch=1: no such key; did you mean epochs?",
        "++lr=0.1: no such key; did you mean optimizer.lr?",
        "+zzzz.deep=1: no such key",
        "+checkpoint.kep=2: no such key; did you mean checkpoint.keep?",
        "~epochs: every run needs epochs; leave this out",
    ]
    assert unknown_keys(compose(loader, ["epochs=4"]), allowed, ["epochs=4"]) == []
    assert unknown_keys(compose(loader, ["~model"]), allowed, ["~model"]) == [
        "~model: every run needs model; leave this out"
    ]
    assert unknown_keys(compose(loader, []), [name for name in allowed if name != "run"], []) == [
        "run (in a configuration file): no such key"
    ]


def test_the_directory_is_not_hydras():
    wrong = [
        "hydra.run.dir=x",
        "+hydra.sweep.dir=x",
        "++hydra.sweep.subdir=x",
        "hydra.job.chdir=true",
        "~hydra.output_subdir",
        "hydra.run={dir:x}",
        "hydra={run:{dir:x}}",
    ]
    rule = ": outputs and name decide the directory; type outputs=DIR or name=NAME"
    right = ["hydra.verbose=true", "hydra.job.name=x", "hydra.job={name:x}", "run=hydra.run.dir", "outputs=x"]
    assert refuse_overrides([*right, *wrong]) == [line + rule for line in wrong]
    (message,) = refuse_overrides(["hydra.launcher=spawn"])
    assert "type launcher=spawn for" in message and "hydra/launcher=spawn for" in message


def test_given_twice():
    overrides = ["model=toy", "epochs=1", "+model=convnet", "epochs=1", "model.hidden=3"]
    assert given_twice(overrides) == [
        "+model=convnet: model is given twice (model=toy); keep one",
        "epochs=1: epochs is given twice (epochs=1); keep one",
    ]


def test_three_lines():
    assert three_lines(["a", "b", "c"]) == ["a", "b", "c"]
    assert three_lines(["a", "b", "c", "d"]) == ["a", "b", "... and 2 more"]
    assert three_lines([]) == []


def test_torch_is_not_imported():
    import subprocess

    modules = "runner.config.diagnostics.signature, runner.config.diagnostics.overrides, runner.config.help"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
