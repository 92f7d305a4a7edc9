"""The options that a mode refuses: one statement for the message, --help and the docs."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from refusal_table import refusal_table
from worlds import configure

from runner.config.help.topics import render_help
from runner.errors import InputError
from runner.launchers.launch import check_ahead
from runner.paths import CONF, ROOT
from runner.training.components import make_parallel
from runner.training.mode import Parallel, resolve


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            ("parallel=local_sgd", "sync_batchnorm=true", "ema.decay=0.9"),
            [
                "ema.decay=0.9: under parallel=local_sgd the ranks do not communicate in each step; try ema.decay=null",
                "sync_batchnorm=true: under parallel=local_sgd the ranks do not communicate in each step; try "
                "sync_batchnorm=auto, which averages the running statistics",
            ],
        ),
        (
            ("parallel=ps", "precision=fp16"),
            ["precision=fp16: parallel=ps has no loss scale that ranks share; try bf16"],
        ),
        (
            ("parallel=ps", "parallel.updates=async", "clip_grad_norm=1.0"),
            ["clip_grad_norm=1.0: parallel.updates=async has no whole gradient; try sync"],
        ),
        (
            ("parallel=ps", "parallel.updates=async", "parallel.forward=remote", "replay_every_steps=2"),
            ["replay_every_steps=2 needs updates=sync and forward=local"],
        ),
        (("parallel=tp", "precision=fp16"), ["precision=fp16 does not work with parallel=tp; try precision=bf16"]),
        (
            ("parallel=pipeline", "precision=fp16", "compile=true"),
            [
                "precision=fp16: parallel=pipeline has no gradient scaler over stages; try precision=bf16",
                "compile=true compiles a whole model, which no rank of parallel=pipeline has; set it false",
            ],
        ),
        (
            ("parallel=mesh", "parallel.shard=1", "parallel.stage=2", "compile=true"),
            ["compile=true compiles a whole model, which no rank of parallel.stage=2 has; set it false"],
        ),
        (
            ("parallel=fsdp", "parallel.mixed_precision=true"),
            ["parallel.mixed_precision=true computes in bfloat16; try precision=bf16"],
        ),
    ],
)
def test_refused_options_are_reported_before_processes_start(overrides: tuple[str, ...], messages: list[str]) -> None:
    config, request = configure(*overrides)
    with pytest.raises(InputError) as error:
        check_ahead(config, request.command.choices, 2)
    assert list(error.value.messages) == messages


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel=ps", "clip_grad_norm=1.0", "on_nonfinite=skip", "replay_every_steps=2", "compile=true"),
        ("parallel=mesh", "compile=true", "precision=fp16"),
        ("parallel=fsdp", "parallel.mixed_precision=true", "precision=bf16"),
        ("parallel=ddp", "replay_every_steps=2"),
    ],
)
def test_an_option_is_refused_only_with_the_values_and_mode_options_of_the_refusal(overrides: tuple[str, ...]) -> None:
    config, request = configure(*overrides)
    resolve(make_parallel(config.parallel, request.command.choices), config, 2)


@pytest.mark.parametrize("num_gpus", [0, 1, 2])
def test_dp_refuses_synchronized_batchnorm_only_on_several_gpus(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    config, request = configure("parallel=dp", "sync_batchnorm=true")
    mode: Parallel = make_parallel(config.parallel, request.command.choices)
    with pytest.raises(InputError, match=r"^sync_batchnorm=true: parallel=dp") if num_gpus > 1 else nullcontext():
        resolve(mode, config, 1)


def test_help_and_docs_list_the_refused_options() -> None:
    text = render_help([CONF], ["parallel=local_sgd"])
    assert "  loss_spike=VALUE: under parallel=local_sgd the ranks do not communicate" in text
    assert "refused options" not in render_help([CONF], ["parallel=allreduce"])
    assert f"\n{refusal_table()}\n" in (ROOT / "docs" / "parallel.md").read_text()


@pytest.mark.parametrize("path", sorted((CONF / "parallel").glob("*.yaml")), ids=lambda path: path.stem)
def test_resolving_a_mode_does_not_change_it(path: Any) -> None:
    config, request = configure(f"parallel={path.stem}")
    mode: Parallel = make_parallel(config.parallel, request.command.choices)
    before = {**vars(mode)}
    for world_size in (1, 2):
        try:
            mode.at(world_size)
        except ValueError:
            assert path.stem in ("none", "dp", "ps")
    assert vars(mode) == before
