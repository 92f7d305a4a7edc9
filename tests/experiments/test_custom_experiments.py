"""Custom experiments, each in a directory next to this file: two ranks produce the numbers of one process."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mode_cases import tier
from worlds import Run, run

HERE = Path(__file__).parent
SHAPES = ("data.sample_shape=[1,8,8]", "loss.ignore_index=0")
# Each experiment's directory, and overrides in addition to its preset.
EXPERIMENTS = {
    "sequences": ("sequences",),
    "autoencoder": ("autoencoder",),
    "autoencoder of learned variance": ("autoencoder", "objective=gaussian", "metrics=none"),
    "autoencoder in turns": ("autoencoder", "objective=in_turns", "optimizer=adam", "optimizer.lr=0.01"),
    "segmentation": ("segmentation",),
    "segmentation of shapes": ("segmentation", "data=shapes", "data.num_train=41", "data.num_val=11", *SHAPES),
    "adversarial": ("adversarial",),
    "labels": ("labels", f"data.files.train={HERE}/labels/weather.csv"),
    "finetuning": ("finetuning", "batch_size=6"),
    "uncertainty": ("uncertainty", "batch_size=12"),
    "uncertainty of some": ("uncertainty", "batch_size=12", "loss=learned_scale_of_some"),
}
# Steps of ten samples and a last one of a single sample, so that a rank has none, in training and validation.
COMMON = ("precision=fp64", "epochs=2", "batch_size=10", "logger=none", "checkpoint.every_epochs=9", "backend=gloo")
MODES = ("none", "ddp", "fsdp")
MORE = {
    "adversarial": ("allreduce", "zero"),
    "autoencoder in turns": ("allreduce", "zero"),
    "uncertainty": ("pipeline",),
    "uncertainty of some": ("pipeline",),
}
# Variants of other experiments, which the default tier leaves out, and what CI runs besides ddp.
VARIANTS = ("autoencoder of learned variance", "segmentation of shapes", "finetuning", "uncertainty of some")
SHARDED = [
    *((name, "fsdp", 3) for name in ("autoencoder in turns", "adversarial", "segmentation", "sequences")),
    ("uncertainty", "pipeline", 3),
]
CELLS = [
    (name, mode, micro_batches)
    for name in EXPERIMENTS
    for mode in (*MODES[1:], *MORE.get(name, ()))
    for micro_batches in (1, 3)
]


def args(name: str, *options: str) -> tuple[str, ...]:
    folder, *typed = EXPERIMENTS[name]
    return (f"--config-dir={HERE / folder}", f"experiment={folder}", *COMMON, *typed, *options)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    @functools.cache
    def of(name: str, *options: str) -> Run:
        return run(tmp_path_factory.mktemp("one-process"), 1, *args(name, *options))

    return of


@pytest.mark.parametrize(
    ("name", "mode", "micro_batches"),
    [
        pytest.param(
            *cell,
            id="-".join(map(str, cell)),
            marks=tier(cell[1:] == ("ddp", 1) and cell[0] not in VARIANTS, cell[1:] == ("ddp", 1) or cell in SHARDED),
        )
        for cell in CELLS
    ],
)
def test_two_ranks_give_the_numbers_of_one_process(
    name: str, mode: str, micro_batches: int, one_process: Callable[..., Run], tmp_path: Path
) -> None:
    options = (f"micro_batches={micro_batches}",)
    assert_same(run(tmp_path, 2, *args(name, *options, f"parallel={mode}")), one_process(name, *options))


@pytest.mark.parametrize(
    ("name", "parameter"),
    [("autoencoder of learned variance", "objective.log_variance"), ("uncertainty", "loss.log_variance")],
)
def test_parameters_of_a_loss_and_of_an_objective_are_trained(
    name: str, parameter: str, one_process: Callable[..., Run]
) -> None:
    assert one_process(name, "micro_batches=1").weights[parameter].abs().min() > 1e-3  # from zero


@pytest.mark.parametrize(
    ("mode", "world_size"),
    [("none", 1), *(pytest.param(mode, 2, marks=tier(False, mode == "fsdp")) for mode in ("ddp", "fsdp", "zero"))],
)
def test_a_gan_resumed_within_an_epoch_ends_with_the_same_weights(mode: str, world_size: int, tmp_path: Path) -> None:
    def play(*options: str) -> Run:
        return run(tmp_path, world_size, *args("adversarial", f"parallel={mode}", *options))

    whole, stopped = play(), play("max_steps=7")
    before = stopped.result["weights_sha256"]
    assert stopped.state["turns"].keys() == {"discriminator", "generator"}
    resumed = run(tmp_path, world_size, f"resume={stopped.path}", "max_steps=10", f"outputs={tmp_path}")
    assert resumed.path == stopped.path and resumed.result["step"] == whole.result["step"] == 10
    assert resumed.result["weights_sha256"] == whole.result["weights_sha256"] != before


def test_each_optimizer_of_a_gan_has_the_learning_rate_of_its_group(one_process: Callable[..., Run]) -> None:
    turns = one_process("adversarial", "micro_batches=1").state["turns"]
    rates = {
        name: {group["lr"] for group in turn["optimizer"]["param_groups"] if group["params"]}
        for name, turn in turns.items()
    }
    assert rates == {"discriminator": {0.002}, "generator": {0.001}}


def assert_same(one: Run, reference: Run) -> None:
    assert one.losses.keys() == reference.losses.keys() and len(reference.losses) >= 4
    for line, expected in zip(one.lines, reference.lines, strict=True):
        measured = [key for key in expected if not key.startswith("perf/")]
        assert [key for key in line if not key.startswith("perf/")] == measured
        for key in measured:
            if key.startswith(("train/", "val/")):
                assert line[key] == pytest.approx(expected[key], rel=1e-9, abs=1e-12), (key, expected["step"])
    assert one.result["metrics"] == pytest.approx(reference.result["metrics"], rel=1e-9, abs=1e-12)
    assert one.weights.keys() == reference.weights.keys()
    for name, tensor in reference.weights.items():
        torch.testing.assert_close(one.weights[name], tensor, rtol=1e-9, atol=1e-11, msg=name)
