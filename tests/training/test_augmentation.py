"""Transforms of training samples: drawn from seed, epoch and index alone, and never on what is evaluated."""

import itertools
import pickle
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from ranks import RankError
from torch.utils.data import Dataset, TensorDataset
from torchvision.transforms import v2
from torchvision.tv_tensors import TVTensor
from worlds import configure, run

from data.shapes import Shapes
from data.tensors import TensorData
from runner import CONF
from runner.config.schema import Config
from runner.errors import InputError
from runner.training.augmentation import Augmented, augment, augmented
from runner.training.datasets import load_data
from runner.training.loader import Loader
from runner.training.precision import Precision
from runner.training.reader import reads_ahead
from runner.training.sampler import Sampler

CPU = torch.device("cpu")
V2 = "torchvision.transforms.v2"
IMAGES = torch.rand(22, 1, 8, 8, generator=torch.Generator().manual_seed(0))


class Jitter:
    """A transform of one's own, for samples that are no images, which draws from all three sources."""

    def __init__(self, by: float = 1.0) -> None:
        self.by = by

    def __call__(self, inputs: Any) -> Any:
        drawn = torch.rand(()).item() + np.random.rand() + random.random()
        return inputs + self.by * drawn


class Failing:
    def __call__(self, inputs: Any) -> Any:
        torch.rand(3), np.random.rand(), random.random()
        raise RuntimeError("no such colour\nat all")


class Whole(TensorDataset):
    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[list(indices)] for tensor in self.tensors)


class Named(Dataset[Any]):
    """Samples that are mappings, collated by the data set."""

    words = ("no", "yes")

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        return {"numbers": IMAGES[index, 0, 0], "class": index % 2}, np.int64(index)

    def collate(self, samples: list[Any]) -> Any:
        numbers = torch.stack([sample[0]["numbers"] for sample in samples])
        return {"numbers": numbers}, torch.tensor([int(sample[1]) for sample in samples])


def random_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def of(transforms: dict[str, Any], *words: str, **keys: Any) -> Config:
    return replace(configure("model=mlp", *words)[0], transforms=transforms, **keys)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_sample_follows_from_seed_epoch_and_index() -> None:
    transforms = {"crop": v2.RandomCrop(8, padding=4), "jitter": Jitter()}
    made = {}
    for key in itertools.product((0, 1), repeat=3):
        torch.manual_seed(sum(key))
        random.seed(sum(key))
        inputs, target = augmented((IMAGES[0], 3), transforms, *key)
        again = augmented((IMAGES[0], 3), transforms, *key)[0]
        assert torch.equal(inputs, again) and target == 3
        assert type(inputs) is torch.Tensor and inputs.shape == (1, 8, 8)
        made[key] = tuple(inputs.flatten().tolist())
    assert len(set(made.values())) == 8


@pytest.mark.parametrize("transform", [Jitter(), Failing()])
def test_the_process_draws_on_as_if_nothing_had_been_drawn(transform: Any) -> None:
    before = random_states()
    try:
        augmented((IMAGES[0], 0), {"it": transform}, 0, 0, 0)
    except RuntimeError:
        assert isinstance(transform, Failing)
    assert random_states() == before


def test_transforms_are_called_in_their_order() -> None:
    double, add = (lambda inputs: inputs * 2), (lambda inputs: inputs + 1)
    assert augmented((torch.ones(3), 0), {"a": double, "b": add}, 0, 0, 0)[0].tolist() == [3, 3, 3]
    assert augmented((torch.ones(3), 0), {"b": add, "a": double}, 0, 0, 0)[0].tolist() == [4, 4, 4]


def test_masks_move_with_their_images() -> None:
    data = Shapes("train", [1, 32, 32], 3, noise=0.0)
    transforms = {
        "crop": v2.RandomResizedCrop(32, interpolation=v2.InterpolationMode.NEAREST),
        "flip": v2.RandomHorizontalFlip(),
    }
    moved = 0
    for index in range(20):
        image, mask = augmented(data[index], transforms, 0, 0, index, masks=True)
        assert torch.equal(image[0] > 0, mask > 0) and mask.dtype == torch.int64
        assert not isinstance(image, TVTensor) and not isinstance(mask, TVTensor)
        moved += not torch.equal(mask, data[index][1])
        assert torch.equal(augmented(data[index], transforms, 0, 0, index)[1], data[index][1])
    assert moved > 15


@pytest.mark.parametrize("kind", [TensorDataset, Whole])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_the_same_for_any_ranks_and_workers_and_when_resumed(kind: type, num_workers: int) -> None:
    data = Augmented(kind(IMAGES, torch.arange(22)), {"crop": v2.RandomCrop(8, padding=4)}, seed=3, masks=False)
    expected = [
        torch.stack([augmented((IMAGES[i], i), data.transforms, 3, e, i)[0] for i in range(22)]) for e in range(2)
    ]
    assert not torch.equal(expected[0], expected[1])
    for rank, num_ranks in ((0, 1), (0, 3), (2, 3)):
        sampler = Sampler(22, batch_size=5, micro_batches=2, data_rank=rank, data_ranks=num_ranks, seed=3)
        loader = Loader(data, sampler, Precision("fp32", CPU), CPU, num_workers=num_workers)  # type: ignore[arg-type]
        try:
            for epoch, first_step in ((0, 0), (1, 0), (1, 3), (0, 2)):
                for step in loader.steps(epoch, first_step):
                    for batch in step.micro_batches:
                        assert torch.equal(batch.inputs[: len(batch.indices)], expected[epoch][list(batch.indices)])
                        assert batch.targets[: len(batch.indices)].tolist() == list(batch.indices)
        finally:
            loader.close()


def test_what_a_data_set_offers_is_reached_through_it() -> None:
    plain = Augmented(TensorDataset(IMAGES, torch.arange(22)), {"it": Jitter()}, 0, False)
    assert len(plain) == 22 and not hasattr(plain, "__getitems__") and not hasattr(plain, "collate")
    whole = pickle.loads(pickle.dumps(Augmented(Whole(IMAGES, torch.arange(22)), {"it": Jitter()}, 0, False)))
    inputs, targets = whole.__getitems__([4, 2])
    assert torch.equal(inputs[1], whole[2][0]) and targets.tolist() == [4, 2]
    assert whole.__getitems__([])[0].shape == (0, 1, 8, 8)
    assert not reads_ahead(Augmented(TensorData(IMAGES, torch.arange(22)), {"it": Jitter()}, 0, False))
    named = Augmented(Named(), {"it": lambda inputs: {**inputs, "numbers": inputs["numbers"] + 1}}, 0, False)
    assert named.words == ("no", "yes") and torch.equal(named[3][0]["numbers"], IMAGES[3, 0, 0] + 1)
    assert torch.equal(named.collate([named[3]])[0]["numbers"][0], IMAGES[3, 0, 0] + 1)


def test_samples_of_numpy_are_images_and_masks_too() -> None:
    image, mask = np.random.default_rng(0).random((1, 8, 8)).astype("f4"), np.arange(64).reshape(8, 8)
    flip = {"flip": {"_target_": f"{V2}.RandomHorizontalFlip", "p": 1.0}}
    data = augment(of(flip), [(image, mask)])
    assert torch.equal(data[0][0], torch.from_numpy(image[..., ::-1].copy()))
    assert torch.equal(data[0][1], torch.from_numpy(mask[:, ::-1].copy()))
    classes = augment(of(flip), [(image, np.int64(4))])
    assert torch.equal(classes[0][0], data[0][0]) and classes[0][1] == 4


@pytest.mark.parametrize("option", sorted(path.stem for path in (CONF / "transforms").glob("*.yaml")))
def test_an_option_is_made_of_the_configuration(option: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg: Any = OmegaConf.to_container(compose("config", ["data=shapes", f"transforms={option}"]), resolve=True)
    data = Shapes("train", [3, 64, 64], 3)
    made = augment(of(cfg["transforms"], "data=shapes"), data)
    if option == "none":
        assert made is data
        return
    assert made.masks is True and [tensor.shape for tensor in made[0]] == [(3, 64, 64), (64, 64)]
    assert any(not torch.equal(made[index][0], data[index][0]) for index in range(4))


def test_only_training_samples_are_transformed() -> None:
    jitter = {"jitter": {"_target_": f"{__name__}.Jitter"}}
    raw = load_data(of({}), {"data": "digits"}, None)  # type: ignore[arg-type]
    train, val = load_data(of(jitter), {"data": "digits"}, None)  # type: ignore[arg-type]
    assert torch.equal(val[0][0], raw[1][0][0]) and not torch.equal(train[0][0], raw[0][0][0])
    _, evaluated = load_data(of(jitter, split="train"), {"data": "digits"}, None)  # type: ignore[arg-type]
    assert torch.equal(evaluated[0][0], raw[0][0][0])


@pytest.mark.parametrize(
    ("node", "keys", "message"),
    [
        (
            {"_target_": f"{__name__}.Failing"},
            {},
            "transforms.a fails .* with: RuntimeError: no such colour .at .*test_aug",
        ),
        (
            {"_target_": f"{V2}.RandomCrop", "size": [9, 9]},
            {},
            "transforms.a fails on the first training sample with: Val",
        ),
        (
            {"_target_": f"{V2}.RandomCrop", "size": [5, 5]},
            {},
            r"transforms.a makes .* \[1, 5, 5\] .* \[1, 8, 8\] and",
        ),
        ({"_target_": f"{V2}.RandomHorizontalFlip", "p": 2}, {}, "transforms.a=.*`p` should be"),
        ({"_target_": "builtins.dict"}, {}, "transforms.a._target_=builtins.dict: what it makes cannot be called"),
        (
            {"_target_": f"{__name__}.Jitter"},
            {"transform_targets": True},
            "transform_targets=true needs images .*=auto$",
        ),
    ],
)
def test_what_cannot_be_transformed_is_told(node: dict[str, Any], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        augment(of({"a": node}, **keys), TensorDataset(IMAGES, torch.arange(22)))


def test_keys_are_checked_when_composing() -> None:
    for words, message in (
        (
            ["transform_targets=true"],
            "transform_targets=true has no effect without transforms; add transforms=flip_crop",
        ),
        (
            ["transform_targets=maybe", "transforms=flip_crop"],
            "transform_targets=maybe must be one of auto, true, false",
        ),
        (["transforms=flip_crop", "transforms.flip.p=often"], "transforms.flip.p=often must be a number"),
    ):
        with pytest.raises(InputError) as caught:
            configure(*words)
        assert message in str(caught.value)


def test_a_run_with_transforms_is_the_same_on_two_ranks_and_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    words = (
        "model=mlp",
        "model.hidden=[8]",
        "data.sample_shape=[1,8,8]",
        "transforms=flip_crop",
        "transforms.crop.padding=2",
    )
    words = (*words, "batch_size=300", "precision=fp64", "logger=none", "checkpoint.every_steps=2", "checkpoint.keep=9")
    one = run(tmp_path / "one", 1, *words, "epochs=2", "micro_batches=3")
    two = run(tmp_path / "two", 2, *words, "epochs=2", "parallel=ddp", "loader.num_workers=1")
    for name, weight in one.weights.items():
        torch.testing.assert_close(two.weights[name], weight, rtol=1e-9, atol=1e-12)
    plain = run(tmp_path / "plain", 1, *(word for word in words if "transforms" not in word), "epochs=2")
    assert plain.result["metrics"]["train/loss"] != pytest.approx(one.result["metrics"]["train/loss"], rel=1e-3)
    cut = run(tmp_path / "cut", 1, *words, "epochs=2", "micro_batches=3", "max_steps=7")
    went_on = run(tmp_path / "cut", 1, f"resume={cut.path}", "max_steps=null", f"outputs={tmp_path / 'cut'}")
    assert went_on.result["weights_sha256"] == one.result["weights_sha256"]
    with pytest.raises(RankError, match=r"transforms.flip.p=2|`p` should be"):
        run(tmp_path / "wrong", 1, *words, "transforms.flip.p=2")
    assert not (tmp_path / "wrong" / "run").exists()
