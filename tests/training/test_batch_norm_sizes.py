"""Batches in which BatchNorm would get a single value per channel are refused before the run, and no others."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from custom_files import write_files
from worlds import configure, unconnected

from runner.errors import InputError
from runner.input.sampler import Sampler
from runner.training.build import build

FILES = {
    "norms.py": """\
        from math import prod

        from torch import nn


        class Norm(nn.Sequential):
            def __init__(self, sample_shape: list[int], num_outputs: int, tracks: bool = True, freezes: bool = False):
                norm = nn.BatchNorm1d(6, track_running_stats=tracks)
                super().__init__(nn.Flatten(), nn.Linear(prod(sample_shape), 6), norm, nn.Linear(6, num_outputs))
                self.freezes = freezes  # only once train() is called, as in a loop

            def train(self, mode: bool = True):
                super().train(mode)
                if self.freezes:
                    self[2].eval()
                return self
        """,
    "model/norm.yaml": "_target_: norms.Norm\nsample_shape: ${data.sample_shape}\nnum_outputs: ${data.num_outputs}\n"
    "tracks: true\nfreezes: false\n",
}
# The dataset has 1,024 samples for training and 256 for validation.
REFUSED = {
    # the last step of each epoch
    "batch_size=341": "the last step of an epoch has 1 sample, .* two; try loader.drop_last=true or batch_size=342$",
    "batch_size=341 parallel=ddp": "the last step of an epoch has 1 sample,",  # synchronized
    "batch_size=341 parallel=ddp sync_batchnorm=false": "341: the last step .* 1 sample on 2 ranks, .* in each; try",
    "batch_size=204 micro_batches=3": "the last step .* 4 samples in 3 micro-batches, .*; try loader.drop_last=true or",
    "batch_size=511 parallel=ddp micro_batches=2": "the last step .* 2 samples in 2 micro-batches, .* batch_size=512$",
    # each step
    "batch_size=1": "a step of an epoch has 1 sample, but BatchNorm needs two; try batch_size=2$",
    "batch_size=3 parallel=ddp sync_batchnorm=false max_steps=1": "3 samples on 2 ranks, .* sync_batchnorm=auto or",
    "batch_size=3 parallel=local_sgd max_steps=1": "a step of an epoch has 3 samples on 2 ranks, .*; try batch_size=4$",
    "batch_size=4 parallel=pipeline model=mlp model.batch_norm=true": "a step .* 4 samples in .* micro-batches",
    # an evaluation by the statistics of its batches
    "batch_size=255 model.tracks=false": "the last batch of an evaluation has 1 sample, .*; try batch_size=256$",
}
ACCEPTED = (
    "batch_size=342",
    "batch_size=341 max_steps=3",
    "batch_size=341 loader.drop_last=true",
    "batch_size=341 model.freezes=true",
    "batch_size=341 model=convnet data.sample_shape=[1,8,8]",
    "batch_size=3 parallel=ddp max_steps=1",
    "batch_size=4 parallel=ddp sync_batchnorm=false",
    "batch_size=255",
    "batch_size=255 model.tracks=false eval_batches=1",
    "batch_size=1 model.freezes=true max_steps=2",
)


@pytest.fixture
def norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    write_files(tmp_path, FILES)
    monkeypatch.syspath_prepend(tmp_path)
    return (f"--config-dir={tmp_path}", "model=norm", "data=random", "data.num_train=1024", "logger=none")


def construct(norms: tuple[str, ...], options: str) -> None:
    words = options.split()
    kept = [word for word in norms if word.partition("=")[0] not in [each.partition("=")[0] for each in words]]
    config, request = configure(*kept, *words)
    build(config, request.command.choices, unconnected(0, 2 if "parallel=" in options else 1))


@pytest.mark.parametrize("options", REFUSED)
def test_a_single_value_per_channel_is_refused(options: str, norms: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=REFUSED[options]):
        construct(norms, options)


@pytest.mark.parametrize("options", ACCEPTED)
def test_what_works_is_not_refused(options: str, norms: tuple[str, ...]) -> None:
    construct(norms, options)


def test_the_fewest_samples_are_those_that_the_ranks_read() -> None:
    numbers = random.Random(0)
    for _ in range(300):
        size, parts, ranks = (numbers.randint(1, most) for most in (40, 6, 5))
        sampler = Sampler(numbers.randint(size, 100), max(size, parts), parts, data_ranks=ranks)
        for step in (0, sampler.steps_per_epoch - 1):
            local = [replace(sampler, data_rank=rank).positions(step) for rank in range(ranks)]
            whole = [sum(map(len, of_ranks)) for of_ranks in zip(*local, strict=True)]
            assert sampler.fewest(step, per_rank=False) == min(whole)
            assert sampler.fewest(step, per_rank=True) == min(len(part) for parts in local for part in parts if part)
