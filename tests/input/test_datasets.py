"""Splits of a dataset, validation samples drawn from the training split, and unsuitable datasets."""

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from worlds import configure, run

from runner.config.schema import Config
from runner.distributed.world import World
from runner.errors import InputError
from runner.input.datasets import load_data, load_split
from runner.input.loader import Loader
from runner.input.sampler import Sampler

WORLD = cast(World, None)  # needed only to download files
CPU = torch.device("cpu")


class Plain(TensorDataset):
    """Has neither train nor split."""

    def __init__(self, num_samples: int = 50) -> None:
        numbers = torch.arange(num_samples)
        super().__init__(numbers[:, None].float(), numbers % 2)
        self.sample_weights = numbers.double()
        self.words = ["no", "yes"]


class Batched(Plain):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [tensor[indices] for tensor in self.tensors]

    def collate(self, samples: list[Any]) -> Any:
        return default_collate(samples)


class Chosen(Subset[Any]):
    """Its `__getitems__` returns a list of samples."""

    def __init__(self) -> None:
        super().__init__(Plain(), range(5, 45))


class ChosenBatches(Subset[Any]):
    """Its `__getitems__` returns a batch, like that of the whole."""

    def __init__(self) -> None:
        super().__init__(Batched(), range(5, 45))


class Noisy(Chosen):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        inputs, target = super().__getitem__(index)
        return inputs + torch.rand(1), target


class Padded(Chosen):
    """Collates lists of samples itself."""

    def collate(self, samples: list[Any]) -> Any:
        return torch.stack([inputs + 100 for inputs, _ in samples]), torch.tensor(
            [int(target) for _, target in samples]
        )


class Halves(Plain):
    def __init__(self, train: bool) -> None:
        super().__init__(30 if train else 20)


class More:
    def __call__(self, inputs: Any) -> Any:
        return inputs + 0.5


class Listed(Plain):
    def __init__(self, split: Literal["train", "test"]) -> None:
        super().__init__({"train": 30, "test": 7}[split])


class Named(Plain):
    """Refuses a split with ValueError, like torchvision's FER2013."""

    def __init__(self, split: str) -> None:
        if split not in ("train", "test"):
            raise ValueError(f"Unknown value '{split}' for argument split. Valid values are ('train', 'test').")
        super().__init__(30)


class Keyed(Plain):
    def __init__(self, split: str) -> None:
        super().__init__({"train": 30, "val": 8}[split])


class Failing(Plain):
    def __init__(self, split: str) -> None:
        if split == "val":
            raise ValueError("root=there contains a broken file; fix it")
        super().__init__(30)


class Endless(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1), torch.tensor(0)


class Huge(Endless):
    def __len__(self) -> int:
        return sys.maxsize


class Epochs(Plain):
    """Returns another dataset in each epoch."""

    def in_epoch(self, epoch: int) -> list[Any]:
        return [(inputs + 100 * epoch, target) for inputs, target in (self[index] for index in range(len(self)))]


class Fetched(Plain):
    """Lacks its files."""

    def __init__(self, train: bool, download: bool = True) -> None:
        raise ValueError("root=there: nothing was downloaded" if download else "root=there has no files")


class Empty(Plain):
    def __init__(self, train: bool) -> None:
        super().__init__(30 if train else 0)


def of(kind: type, **keys: Any) -> Config:
    options = keys.pop("options", {})
    node = {"_target_": f"{__name__}.{kind.__name__}", "sample_shape": [1], "num_outputs": 2, **options}
    return replace(configure("model=linear", "data=random")[0], data=node, **keys)


def lengths(kind: type, **keys: Any) -> tuple[int, int]:
    train, val = load_data(of(kind, **keys), {"data": "mine"}, WORLD)
    return len(train), len(val)


def test_the_split_is_passed_as_the_signature_requires() -> None:
    assert lengths(Halves) == (30, 20)
    assert lengths(Keyed) == (30, 8)
    assert lengths(Listed, val_fraction=0.2) == (24, 6)
    assert lengths(Named, val_fraction=0.2) == (24, 6)
    assert lengths(Plain, val_fraction=0.2) == (40, 10)


@pytest.mark.parametrize("kind", [Listed, Named])
def test_a_split_is_loaded_by_name(kind: type) -> None:
    assert len(load_split(of(kind), {}, WORLD, "test")) == (7 if kind is Listed else 30)
    assert lengths(Listed, val_fraction=0.2, split="test") == (24, 7)
    assert lengths(Listed, split="test") == (30, 7)  # no validation split is needed


def test_each_sample_is_validated_in_one_fold() -> None:
    folds = [load_data(of(Plain, val_fraction=0.33, val_fold=fold, seed=1), {}, WORLD) for fold in range(3)]
    parts = [(train.rows.tolist(), val.rows.tolist()) for train, val in folds]
    assert sorted(row for _, val in parts for row in val) == list(range(50))
    assert [len(val) for _, val in parts] == [16, 17, 17]
    assert all(sorted(train + val) == list(range(50)) for train, val in parts)


@pytest.mark.parametrize("kind", [Plain, Batched])
def test_validation_samples_are_drawn_from_the_training_split(kind: type) -> None:
    parts = load_data(of(kind, val_fraction=0.3, seed=1), {}, WORLD)
    again = load_data(of(kind, val_fraction=0.3, seed=1), {}, WORLD)
    other = load_data(of(kind, val_fraction=0.3, seed=2), {}, WORLD)
    rows = [part.rows.tolist() for part in parts]
    assert sorted(rows[0] + rows[1]) == list(range(50)) and len(rows[1]) == 15
    assert rows == [part.rows.tolist() for part in again]
    assert rows != [part.rows.tolist() for part in other]
    for part, numbers in zip(parts, rows, strict=True):
        assert [part[index][0].item() for index in range(len(part))] == numbers
        assert part.sample_weights.tolist() == numbers
        assert part.words == ["no", "yes"]
        assert part.read([3, 0])[0].flatten().tolist() == [numbers[3], numbers[0]]
        assert part.read([])[0].flatten().tolist() == [numbers[0]]
        assert hasattr(part, "collate") == (kind is Batched)
        with pytest.raises(IndexError):
            part[len(part)]
        with pytest.raises(AttributeError, match="nothing"):
            _ = part.nothing


def read_whole(dataset: Any, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of an epoch."""
    loader = Loader(dataset, Sampler(len(dataset), batch_size), torch.float32, CPU, shuffle=False)
    read = [each for step in loader.steps(0) for each in step.micro_batches]
    return torch.cat([each.inputs for each in read]).flatten(), torch.cat([each.targets for each in read])


@pytest.mark.parametrize("kind", [Chosen, ChosenBatches])
def test_torchs_subset_is_read_like_any_dataset(kind: type) -> None:
    whole = load_split(of(kind), {}, WORLD, "train")
    inputs, targets = read_whole(pickle.loads(pickle.dumps(whole)), 16)
    assert inputs.tolist() == list(range(5, 45)) and targets.tolist() == [row % 2 for row in range(5, 45)]
    part = load_split(of(kind, val_fraction=0.25), {}, WORLD, "val")
    inputs, _ = read_whole(part, 16)
    assert inputs.tolist() == [5 + row for row in part.rows.tolist()]


def test_lists_of_samples_are_drawn_and_collated_like_others() -> None:
    before = torch.get_rng_state()
    noisy = load_split(of(Noisy), {}, WORLD, "train")
    assert torch.equal(torch.get_rng_state(), before)
    (of_two, _), (of_many, _) = read_whole(noisy, 2), read_whole(noisy, 16)
    assert torch.equal(of_two, of_many) and of_two.frac().unique().numel() == 40
    inputs, _ = read_whole(load_split(of(Padded), {}, WORLD, "train"), 16)
    assert inputs.tolist() == list(range(105, 145))
    train, _ = load_data(
        of(Chosen, val_fraction=0.25, transforms={"more": {"_target_": f"{__name__}.More"}}), {}, WORLD
    )
    assert (read_whole(train, 16)[0].frac() == 0.5).all()


def test_a_dataset_may_depend_on_the_epoch() -> None:
    config = of(Epochs, val_fraction=0.3)
    jitter = {"more": {"_target_": f"{__name__}.More"}}
    for transforms, more in (({}, 0), (jitter, 0.5)):
        train, _ = load_data(replace(config, transforms=transforms), {}, WORLD)
        for epoch in range(2):
            inputs, _ = train.read(range(35), epoch)
            assert inputs.flatten().tolist() == [row + 100 * epoch + more for row in train.rows.tolist()]


def test_nothing_is_downloaded_for_unsuitable_options() -> None:
    config = of(Fetched, val_fraction=0.1, options={"download": True})
    with pytest.raises(InputError, match=r"^val_fraction=0.1 has no effect, because data=mine has a validation split"):
        load_data(config, {"data": "mine"}, WORLD)  # None, which cannot download


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        (Plain, {}, "data=mine has no validation split; set val_fraction=0.1 to take it from the training split"),
        (Named, {}, "data=mine has no validation split; set val_fraction=0.1 to"),
        (Failing, {"val_fraction": 0.1}, "data=mine: root=there contains a broken file; fix it"),
        (Halves, {"val_fraction": 0.1}, "val_fraction=0.1 has no effect, because data=mine has a validation split"),
        (Keyed, {"val_fraction": 0.1}, "val_fraction=0.1 has no effect, because data=mine has a validation split"),
        (Plain, {"split": "test"}, "split=test: data=mine has no such split"),
        (Keyed, {"split": "test"}, "split=test: data=mine has no such split"),
        (Plain, {"val_fraction": 0.001}, "val_fraction=0.001 of the 50 samples .* are 0, .*; try val_fraction=0.1"),
        (Plain, {"val_fraction": 0.999}, "val_fraction=0.999 of the 50 samples of data=mine are 50, but both splits"),
        (Endless, {}, "data=mine: Endless lacks __len__, by which a map-style dataset selects the samples"),
        (Huge, {}, "data=mine: Huge has 9,223,372,036,854,775,807 samples, and .*; if it has no end, derive it from"),
        (Empty, {}, "data=mine: its val split has no samples; at least one is required"),
    ],
)
def test_unsuitable_datasets_are_refused(kind: type, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        load_data(of(kind, **keys), {"data": "mine"}, WORLD)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["val_fraction=1"], "val_fraction=1 must be above 0 and below 1, or null; try 0.1"),
        (["transform_targets=true"], "=true has no effect without transforms; add transforms=flip_crop"),
        (["split=tset"], "split=tset must be one of train, val, test; did you mean test"),
    ],
)
def test_keys_are_checked_when_composing(words: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        configure(*words)
    assert [message in line for line in caught.value.messages] == [True]


@pytest.mark.thorough
def test_a_run_with_val_fraction_is_the_same_on_two_ranks_and_evaluates_its_test_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "listed_data.py").write_text(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "from typing import Literal\n"
        "class Listed(TensorDataset):\n"
        "    def __init__(self, split: Literal['train', 'test']):\n"
        "        generator = torch.Generator().manual_seed(len(split))\n"
        "        points = torch.randn(90 if split == 'train' else 40, 3, generator=generator)\n"
        "        super().__init__(points, (points.sum(1) > 0).long())\n"
        "        self.classes = ['below', 'above']\n"
        "        self.header_lines = ['drawn from a normal distribution']\n"
    )
    (tmp_path / "data" / "listed.yaml").write_text("_target_: listed_data.Listed\nsample_shape: [3]\nnum_outputs: 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "listed_data", raising=False)
    words = (f"hydra.searchpath=['file://{tmp_path}']", "data=listed", "model=linear", "val_fraction=0.2")
    words = (*words, "epochs=2", "batch_size=20", "precision=fp64", "logger=none")
    one = run(tmp_path / "one", 1, *words)
    two = run(tmp_path / "two", 2, *words, "parallel=ddp")
    assert two.result["metrics"] == pytest.approx(one.result["metrics"], rel=1e-9)
    assert one.result["step"] == 8  # 72 samples
    told = (
        "data     listed, 72 training and 18 validation samples; classes 0 below, 1 above\n"
        "data     drawn from a normal distribution\nworld"
    )
    assert told in (one.path / "log.txt").read_text()

    evaluate = ("task=evaluate", f"run={one.path}", words[0])
    tested = [run(tmp_path / split, 1, *evaluate, f"split={split}").result["metrics"] for split in ("val", "test")]
    assert tested[0] == pytest.approx({k: v for k, v in one.result["metrics"].items() if k.startswith("val/")})
    assert set(tested[1]) == {"test/loss", "test/accuracy"}
