"""Tests that a custom class without the members of its contract is refused before anything is written."""

from collections.abc import Callable
from dataclasses import replace
from inspect import get_annotations
from pathlib import Path
from typing import Any

import pytest

from runner.config.diagnostics.type_hints import show
from runner.config.instantiate import create, make_group
from runner.config.schema import Config, apply_debug
from runner.config.validate import TASK_FACTS, check_fit
from runner.errors import InputError
from runner.jobs.task import Task

HALF = """
from runner.jobs.task import JobTask

class Derived(JobTask):
    pass

class Empty:
    pass

class Facts:
    reads_run = reads_checkpoint = needs_experiment = trains = picks_split = False
    section = None
"""


@pytest.mark.parametrize(
    ("group", "target", "message"),
    [
        ("task", "Empty", "the class lacks reads_run, reads_checkpoint, needs_experiment, trains, picks_split"),
        ("task", "Facts", "the class lacks min_world_size, needs_outputs, check, run, which runner.jobs.task.JobTask"),
        ("task", "Derived", "the class lacks run; define it"),
        ("launcher", "Empty", "join_timeout_s, launch, which runner.launchers.contract.Launcher declares"),
    ],
)
def test_missing_contract_members_are_refused(
    group: str, target: str, message: str, tmp_path: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"half_{group}_{target.lower()}"  # sys.modules keeps what an earlier test has imported
    (tmp_path / "mine" / group).mkdir(parents=True)
    (tmp_path / "mine" / f"{module}.py").write_text(HALF)
    (tmp_path / "mine" / group / "half.yaml").write_text(f"_target_: {module}.{target}\n")
    assert here("--config-dir", "mine", "model=toy", "data=toy", f"{group}=half") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{group}._target_={module}.{target}: ")
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "outputs").exists()


def test_checked_task_attributes_are_those_of_the_contract() -> None:
    assert set(TASK_FACTS) == set(get_annotations(Task))


def test_custom_loader_without_the_builtin_options_is_accepted() -> None:
    config = Config(loader={"_target_": "mine.Loader", "size": 3}, debug=True)
    assert check_fit(config, "cpu") == check_fit(config, None) == []
    assert apply_debug(config).loader == config.loader


def test_options_of_gpus_are_refused_where_they_have_no_effect() -> None:
    loader = {"num_workers": 2, "pin_memory": True}
    config = Config(loader=loader, keep_samples="device", tf32=True, cudnn_benchmark=True)
    workers = "loader.num_workers=2: keep_samples=device selects the samples on the device, where workers cannot; "
    workers += "try loader.num_workers=0"
    assert check_fit(config, "cpu") == [
        "tf32=true has no effect without a GPU; try tf32=convolutions",
        "cudnn_benchmark=true has no effect without a GPU; leave it out",
        "loader.pin_memory=true has no effect without a GPU; try loader.pin_memory=null",
        workers,
    ]
    copied = "loader.pin_memory=true has no effect with keep_samples=device, because no batch is copied; "
    copied += "try loader.pin_memory=null"
    double = "tf32=true has no effect with precision=fp64; try tf32=convolutions"
    assert check_fit(replace(config, precision="fp64"), "cuda") == [double, workers, copied]


def test_options_that_a_cuda_graph_cannot_repeat_are_refused() -> None:
    options: dict[str, Any] = {"precision": "fp16", "compile": True, "train_metrics": True, "debug": True}
    for key, value in {**options, "activation_checkpointing": "full", "replay_every_steps": 3}.items():
        (message,) = check_fit(Config(loader={}, cuda_graph=True, **{key: value}), "cuda")
        assert message == f"{key}={show(value)} does not work with cuda_graph=true; leave one of them out"
    assert not check_fit(Config(loader={}, cuda_graph=True, precision="bf16", clip_grad_norm=1.0), "cuda")
    assert check_fit(Config(loader={}, cuda_graph=True), "cpu") == ["cuda_graph=true needs a GPU; try cuda_graph=false"]


class Pair:
    def __init__(self, first: Any, second: Any = None):
        if first == "wrong":
            raise ValueError("first=wrong must be right")
        self.first, self.second = first, second


PAIR = f"{__name__}.Pair"


def test_nodes_in_mappings_and_lists_are_created_inside_out() -> None:
    pair = create(
        {"_target_": PAIR, "first": [{"_target_": PAIR, "first": 1}], "second": {"x": {"_target_": PAIR, "first": 2}}}
    )
    assert (pair.first[0].first, pair.second["x"].first) == (1, 2)
    node = {"_target_": PAIR, "_args_": [{"_target_": PAIR, "first": 1}], "_partial_": True}
    assert create(node)(second=3).first.first == 1
    inner = {"_target_": PAIR, "first": 1}
    kept = create({"_target_": PAIR, "first": inner, "_recursive_": False}).first
    assert kept == inner
    assert kept is not inner


def test_an_error_of_a_nested_node_names_its_key() -> None:
    node = {"_target_": PAIR, "first": {"_target_": PAIR, "first": "wrong"}}
    with pytest.raises(InputError, match=r"^model.first.first=wrong must be right$"):
        make_group({"model": "pair"}, "model", node)
    with pytest.raises(InputError, match=r"^model.first=wrong must be right$"):
        make_group({"model": "pair"}, "model", {"_target_": PAIR, "first": "wrong"})
