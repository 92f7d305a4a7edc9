"""Random numbers of datasets, models and objectives: they depend on seed, epoch and index, or on the step."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from worlds import run

from runner.checkpoints.layout import list_checkpoints
from runner.input.loader import Loader
from runner.input.rng import DrawDetector, seed_all, seeded
from runner.input.sampler import Sampler
from runner.input.source import Source

CPU = torch.device("cpu")
NUM_SAMPLES = 13


def drawn() -> torch.Tensor:
    """Draw one number from each generator, (3,); normal ones, because NumPy computes those in pairs."""
    return torch.tensor([torch.randn(()).item(), np.random.randn(), random.gauss(0, 1)])


def test_a_step_on_a_gpu_seeds_only_what_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    monkeypatch.setattr(torch.xpu, "manual_seed_all", lambda _: pytest.fail("formats a traceback"))
    with seeded(0):
        seed_all(5, torch.device("cuda"))
    assert seeds == [5]


class Noisy(Dataset[Any]):
    """Every third sample draws nothing, which must not change the others."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return (drawn() if index % 3 else torch.zeros(3)), index


class Whole(Noisy):
    def __getitems__(self, indices: Sequence[int]) -> Any:
        samples = [self[index] for index in indices]
        return torch.stack([sample[0] for sample in samples]), torch.tensor([sample[1] for sample in samples])


class Changing(Noisy):
    """DrawDetector for an epoch."""

    def in_epoch(self, epoch: int) -> Any:
        shift = drawn()
        return [(self[index][0] + shift, index) for index in range(NUM_SAMPLES)]


class Collating(Noisy):
    def collate(self, samples: list[Any]) -> Any:
        return torch.stack([sample[0] for sample in samples]) + drawn(), torch.tensor([s[1] for s in samples])


def read(dataset: Any, ranks: int, workers: int, micro_batches: int = 1, first_step: int = 0) -> dict[Any, Any]:
    """Return the sample of each epoch and index, over all ranks, for two epochs."""
    found = {}
    for rank in range(ranks):
        sampler = Sampler(len(dataset), 5, micro_batches, rank, ranks, seed=3)
        loader = Loader(dataset, sampler, torch.float32, CPU, num_workers=workers)
        for epoch in (0, 1):
            drawn()  # from the process's own streams
            for batch in loader.steps(epoch, first_step if epoch == 0 else 0):
                for micro_batch in batch.micro_batches:
                    rows = micro_batch.inputs[: micro_batch.num_samples]
                    found |= {(epoch, i): tuple(r.tolist()) for i, r in zip(micro_batch.indices, rows, strict=True)}
        loader.close()
    return found


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


@pytest.mark.parametrize("dataset", [Noisy(), Whole(), Changing()], ids=["samples", "batches", "epochs"])
def test_a_sample_draws_the_same_for_any_ranks_workers_micro_batches_and_after_resuming(dataset: Any) -> None:
    whole = read(dataset, 1, 0)
    assert len(set(whole.values())) >= 2 * 8 + 1  # every sample that draws, in each epoch
    for ranks, workers, micro_batches in ((3, 0, 2), (1, 2, 3)):
        assert read(dataset, ranks, workers, micro_batches) == whole
    resumed = read(dataset, 2, 0, first_step=1)
    assert len(resumed) == len(whole) - 5
    assert resumed.items() <= whole.items()


def test_reading_and_the_rest_of_the_process_are_independent() -> None:
    for dataset in (Noisy(), Collating(), Changing()):
        source, before = Source.of(dataset), states()
        first = source.read([1, 2])
        assert states() == before
        drawn()
        assert torch.equal(source.read([1, 2])[0], first[0])
    failing = DrawDetector()
    before = states()
    with pytest.raises(ZeroDivisionError):
        failing.call(lambda: drawn() + 1 // 0)
    with seeded(1), seeded(2):
        drawn()
    assert states() == before


def test_generators_are_seeded_once_they_are_used() -> None:
    draws, calls = DrawDetector(), []

    def late() -> list[float]:
        draws.seed(7)
        calls.append(None)
        return [random.random(), *([np.random.rand()] if len(calls) > 3 else [])]

    first = draws.call(late)
    assert len(calls) == 2  # again, after the draw was detected
    assert draws.call(late) == first and len(calls) == 3
    second = draws.call(late)
    assert second[0] == first[0] and len(second) == 2 and len(calls) == 4
    silent = DrawDetector()
    assert silent.call(lambda: 1) == 1 and not silent.has_drawn


NOISE = """
import random

import numpy as np
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset

from runner import Objective


class Noise(Dataset):
    def __init__(self, train: bool, collates: bool = False, sorts: bool = False):
        self.train = train
        if collates:
            self.collate = self._collate
        if sorts:
            self.collate = self._sort

    def __len__(self):
        return 40 if self.train else 8

    def __getitem__(self, index):
        drawn = torch.randn(3, dtype=torch.float64) + np.random.rand() + random.random()
        return drawn.float(), drawn[:1].float()

    def _collate(self, samples):
        drawn = torch.stack([sample[0] for sample in samples]) + torch.rand(())
        return drawn, drawn[:, :1]

    def _sort(self, samples):
        return tuple(map(torch.stack, zip(*sorted(samples, key=lambda sample: -sample[0].sum()))))


class Shaken(Objective):
    def loss(self, model, batch):
        shake = np.random.rand() + random.random() + torch.rand(()).item()
        return mse_loss(shake * model(batch[0]), batch[1], reduction="sum"), len(batch[0])
"""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    mine = tmp_path / "mine"
    for group, text in (
        ("data/noise", "_target_: noise_and_shaken.Noise\nsample_shape: [3]\nnum_outputs: 1\ncollates: false\n"),
        ("objective/shaken", "_target_: noise_and_shaken.Shaken\n"),
    ):
        (mine / group).parent.mkdir(parents=True)
        (mine / f"{group}.yaml").write_text(f"# for a test\n{text}")
    (mine / "noise_and_shaken.py").write_text(NOISE)
    return f"--config-dir={mine}"


@pytest.mark.fault("a preempted run whose dataset draws random numbers", outcome="survived")
def test_a_run_with_random_data_is_the_same_after_resuming(tmp_path: Path, folder: str) -> None:
    words = (folder, "data=noise", "model=linear", "batch_size=8", "epochs=2", "precision=fp64", "logger=none")
    words += ("objective=shaken", "checkpoint.every_steps=3", "checkpoint.keep=9", "checkpoint.keep_best=0")
    whole = run(tmp_path, 1, *words)
    weights, losses = whole.result["weights_sha256"], whole.losses
    validated = [line["val/loss"] for line in whole.lines if "val/loss" in line]
    for path in list_checkpoints(whole.path / "checkpoints")[1:]:
        shutil.rmtree(path)
    random.seed(99), np.random.seed(99)  # as in another process
    resumed = run(tmp_path, 1, f"resume={whole.path}", "loader.num_workers=2")
    assert "resuming after step 3" in (whole.path / "log.txt").read_text()
    assert (resumed.result["weights_sha256"], resumed.losses) == (weights, losses)
    assert [line["val/loss"] for line in resumed.lines if "val/loss" in line] == validated


def test_a_collate_that_draws_causes_a_warning(tmp_path: Path, folder: str) -> None:
    words = (folder, "data=noise", "data.collates=true", "model=linear", "batch_size=8", "max_steps=2", "logger=none")
    told = (run(tmp_path, 1, *words).path / "log.txt").read_text()
    assert "data=noise: its collate draws random numbers, once for all samples of a local micro-batch" in told


def test_a_collate_that_sorts_causes_a_warning(tmp_path: Path, folder: str) -> None:
    words = (folder, "data=noise", "+data.sorts=true", "model=linear", "batch_size=8", "max_steps=2", "logger=none")
    told = (run(tmp_path, 1, *words).path / "log.txt").read_text()
    assert "data=noise: its collate changes the order of the samples" in told
