"""The data sets: values, splits, both ways to read them, what they refuse, and their configuration. All offline."""

import gzip
import hashlib
import importlib
import inspect
import pickle
import struct
import tarfile
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision
import yaml
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import ToTensor

from data import files
from data.cifar10 import CIFAR10
from data.counting import Counting, _hash
from data.digits import Digits
from data.fashion_mnist import FashionMNIST
from data.image_folder import ImageFolder
from data.mnist import MNIST
from data.random import RandomRegression
from data.tensors import TensorData
from data.toy import ToyRegression

CONF = Path(__file__).parents[1] / "conf" / "data"
KINDS = {
    "digits": Digits,
    "toy": ToyRegression,
    "random": RandomRegression,
    "counting": Counting,
    "mnist": MNIST,
    "fashion_mnist": FashionMNIST,
    "cifar10": CIFAR10,
    "image_folder": ImageFolder,
}
MADE = {  # the sets that read no files of the user's, each with its sample shape, outputs, and lengths
    "digits": (Digits, (1, 28, 28), 10, 1437, 360),
    "toy": (ToyRegression, (10,), 5, 1024, 256),
    "random": (RandomRegression, (20,), 1, 2048, 256),
    "counting": (Counting, (32,), 10, 2**20, 16384),
}
IDX_SETS = [(MNIST, torchvision.datasets.MNIST), (FashionMNIST, torchvision.datasets.FashionMNIST)]
SHAPES = {MNIST: (1, 28, 28), FashionMNIST: (1, 28, 28), CIFAR10: (3, 32, 32)}


def write_idx(root, name="MNIST", num_train=30, num_val=12, pack=False):
    """MNIST-format files under root, of random pixels; .gz archives alone where pack."""
    random = np.random.default_rng(0)
    home = root / name / "raw"
    home.mkdir(parents=True)
    for split, count in (("train", num_train), ("t10k", num_val)):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = random.integers(0, 10, count, dtype=np.uint8)
        for file, magic, sizes, array in (
            (f"{split}-images-idx3-ubyte", 2051, images.shape, images),
            (f"{split}-labels-idx1-ubyte", 2049, labels.shape, labels),
        ):
            content = struct.pack(f">{1 + len(sizes)}I", magic, *sizes) + array.tobytes()
            if pack:
                (home / f"{file}.gz").write_bytes(gzip.compress(content))
            else:
                (home / file).write_bytes(content)
    return home


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def cifar_root(tmp_path, monkeypatch):
    """Batches in CIFAR-10's format, four images each, whose checksums torchvision is told to expect."""
    kind = torchvision.datasets.CIFAR10
    home = tmp_path / "cifar" / kind.base_folder
    home.mkdir(parents=True)
    random = np.random.default_rng(1)
    for name, _ in kind.train_list + kind.test_list:
        images = random.integers(0, 256, (4, 3072), dtype=np.uint8)
        labels = random.integers(0, 10, 4).tolist()
        (home / name).write_bytes(pickle.dumps({"data": images, "labels": labels}))
    (home / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    for lists in ("train_list", "test_list"):
        monkeypatch.setattr(kind, lists, [[name, md5(home / name)] for name, _ in getattr(kind, lists)])
    monkeypatch.setattr(kind, "meta", kind.meta | {"md5": md5(home / "batches.meta")})
    return home.parent


@pytest.fixture
def offline(monkeypatch):
    """Every download fails at once, after torchvision has spoken and made a directory as it would."""

    def fail(url, root, *args, **kwargs):
        print("trying", url)
        Path(root).mkdir(parents=True, exist_ok=True)
        (Path(root) / "half").touch()
        raise URLError("no network")

    monkeypatch.setattr(torchvision.datasets.utils, "download_url", fail)


@pytest.fixture
def image_root(tmp_path):
    """Two classes of images: left halves white and right halves white, wide and tall, gray and coloured."""
    for split, count in (("train", 3), ("val", 2)):
        for name in ("left", "right"):
            home = tmp_path / "images" / split / name
            home.mkdir(parents=True)
            for number in range(count):
                pixels = np.zeros((20, 20 + 8 * number, 3), np.uint8)
                half = pixels.shape[1] // 2
                pixels[:, :half] = 255 * (name == "left")
                pixels[:, half:] = 255 * (name == "right")
                image = Image.fromarray(pixels)
                (image.convert("L") if number == 1 else image).save(home / f"{number}.png")
    return tmp_path / "images"


# What every set promises


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_samples_and_targets(name, train):
    kind, sample_shape, num_outputs, num_train, num_val = MADE[name]
    data = kind(train=train, sample_shape=sample_shape, num_outputs=num_outputs)
    assert len(data) == (num_train if train else num_val)
    samples, targets = data.__getitems__([0, len(data) - 1, 5])
    assert samples.shape == (3, *sample_shape) and samples.dtype == torch.float32
    if name in ("toy", "random"):
        assert targets.shape == (3, num_outputs) and targets.dtype == torch.float32
    else:
        assert targets.shape == (3,) and targets.dtype == torch.int64
        assert targets.min() >= 0 and targets.max() < num_outputs


def assert_both_ways_agree(data):
    indices = torch.randperm(len(data), generator=torch.Generator().manual_seed(5))[:7].tolist()
    samples, targets = data.__getitems__(indices)
    for row, index in enumerate(indices):
        sample, target = data[index]
        assert torch.equal(sample, samples[row]) and sample.dtype == samples.dtype
        assert torch.equal(target, targets[row]) and target.dtype == targets.dtype
    no_samples, no_targets = data.__getitems__([])
    assert no_samples.shape == (0, *samples.shape[1:]) and no_samples.dtype == samples.dtype
    assert no_targets.shape == (0, *targets.shape[1:]) and no_targets.dtype == targets.dtype
    for index in (len(data), -1):
        with pytest.raises(IndexError):
            data[index]
        with pytest.raises(IndexError):
            data.__getitems__([0, index])


@pytest.mark.parametrize("name", MADE)
def test_both_ways_to_read_agree(name):
    kind, sample_shape, num_outputs, *_ = MADE[name]
    for train in (True, False):
        assert_both_ways_agree(kind(train=train, sample_shape=sample_shape, num_outputs=num_outputs))


@pytest.mark.parametrize("name", MADE)
def test_the_same_every_time_whatever_the_global_seed(name):
    kind, sample_shape, num_outputs, *_ = MADE[name]
    batches = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        batches.append(kind(train=True, sample_shape=sample_shape, num_outputs=num_outputs).__getitems__(range(50)))
        assert torch.equal(torch.get_rng_state(), state)  # and the global generator is left alone
    assert torch.equal(batches[0][0], batches[1][0]) and torch.equal(batches[0][1], batches[1][1])


@pytest.mark.parametrize("name", MADE)
def test_values_do_not_depend_on_the_number_of_threads(name):
    kind, sample_shape, num_outputs, *_ = MADE[name]
    batches, before = [], torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            batches.append(
                kind(train=True, sample_shape=sample_shape, num_outputs=num_outputs).__getitems__(range(999))
            )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(batches[0][0], batches[1][0]) and torch.equal(batches[0][1], batches[1][1])


@pytest.mark.parametrize("name", MADE)
def test_sets_pickle_for_the_workers_of_a_loader(name):
    kind, sample_shape, num_outputs, *_ = MADE[name]
    data = kind(train=False, sample_shape=sample_shape, num_outputs=num_outputs)
    ours, copies = data.__getitems__([3, 1]), pickle.loads(pickle.dumps(data)).__getitems__([3, 1])
    assert torch.equal(ours[0], copies[0]) and torch.equal(ours[1], copies[1])


def test_a_loader_passes_collated_batches_through():
    data = Digits(train=False, sample_shape=(1, 28, 28), num_outputs=10)
    batches = list(DataLoader(data, batch_size=100, collate_fn=lambda batch: batch))
    assert [len(targets) for _, targets in batches] == [100, 100, 100, 60]
    assert torch.equal(torch.cat([samples for samples, _ in batches]), data.__getitems__(range(360))[0])
    collated = next(iter(DataLoader([data[i] for i in range(100)], batch_size=100)))
    assert torch.equal(collated[0], batches[0][0]) and torch.equal(collated[1], batches[0][1])


@pytest.mark.parametrize("name", MADE)
def test_empty_sizes_and_counts_are_refused(name):
    kind, sample_shape, num_outputs, *_ = MADE[name]
    with pytest.raises(ValueError, match=r"^sample_shape=\[\] must be one or more sizes"):
        kind(train=True, sample_shape=(), num_outputs=num_outputs)
    with pytest.raises(ValueError, match=r"^sample_shape=\[1, 0, 28\] must be one or more sizes"):
        kind(train=True, sample_shape=(1, 0, 28), num_outputs=num_outputs)
    with pytest.raises(ValueError, match=r"^num_outputs=0 must be"):
        kind(train=True, sample_shape=sample_shape, num_outputs=0)
    for option in {"num_train", "num_val"} & set(inspect.signature(kind).parameters):
        with pytest.raises(ValueError, match=f"^{option}=0 must be at least 1"):
            kind(train=True, sample_shape=sample_shape, num_outputs=num_outputs, **{option: 0})


@pytest.mark.parametrize("name", KINDS)
def test_configuration_states_every_option_and_its_default(name):
    text = (CONF / f"{name}.yaml").read_text()
    lines = text.splitlines()
    assert lines[0].startswith("# ") and not lines[0].endswith(".")
    assert all("  # " in line for line in lines[2:])
    options = yaml.safe_load(text)
    module, _, attribute = options.pop("_target_").rpartition(".")
    assert getattr(importlib.import_module(module), attribute) is KINDS[name]
    if name in MADE:
        _, sample_shape, num_outputs, num_train, num_val = MADE[name]
        assert (tuple(options["sample_shape"]), options["num_outputs"]) == (sample_shape, num_outputs)
        assert (options.get("num_train", num_train), options.get("num_val", num_val)) == (num_train, num_val)
    parameters = inspect.signature(KINDS[name]).parameters
    assert list(parameters)[:3] == ["train", "sample_shape", "num_outputs"]
    assert options.keys() == parameters.keys() - {"train"}
    own = list(parameters.values())[3:]
    assert {p.name: options[p.name] for p in own} == {p.name: p.default for p in own}


# The sets that are made


def test_digits_are_scikit_learns_own_split_in_two():
    from sklearn.datasets import load_digits

    source = load_digits()
    train, val = (Digits(train=train, sample_shape=(1, 8, 8), num_outputs=10) for train in (True, False))
    found = torch.cat([train.samples, val.samples]).mul(16).flatten(1)
    labels = torch.cat([train.targets, val.targets])
    expected = {(*pixels, label) for pixels, label in zip(source.data.tolist(), source.target.tolist(), strict=True)}
    rows = [(*pixels, label) for pixels, label in zip(found.tolist(), labels.tolist(), strict=True)]
    assert len(rows) == 1797 and set(rows) == expected  # every digit once, none in both splits
    assert torch.bincount(val.targets, minlength=10).min() > 20


def test_digits_are_scaled_images_in_0_to_1():
    small = Digits(train=False, sample_shape=[1, 8, 8], num_outputs=10)
    large = Digits(train=False, sample_shape=[1, 28, 28], num_outputs=10)
    assert torch.equal(small.targets, large.targets)
    assert large.samples.min() == 0 and 0.99 < large.samples.max() <= 1
    scaled = torch.nn.functional.interpolate(small.samples, size=(28, 28), mode="bilinear")
    torch.testing.assert_close(large.samples, scaled)


def test_digits_refuse_other_channels_and_classes():
    with pytest.raises(ValueError, match=r"^sample_shape=\[3, 28, 28\] must be .* 1 channel, .* try \[1, 28, 28\]$"):
        Digits(train=True, sample_shape=(3, 28, 28), num_outputs=10)
    with pytest.raises(ValueError, match=r"^sample_shape=\[10\] must be \[channels, height, width\]"):
        Digits(train=True, sample_shape=(10,), num_outputs=10)
    with pytest.raises(ValueError, match=r"^num_outputs=5 must be 10, the number of classes$"):
        Digits(train=True, sample_shape=(1, 28, 28), num_outputs=5)


def test_toy_is_a_linear_map_and_noise():
    train, val = (ToyRegression(train, (2, 5), 5, num_train=4000, noise=0.1) for train in (True, False))
    inputs = train.samples.flatten(1)
    weight = torch.linalg.lstsq(inputs, train.targets).solution
    # What is learned on one split explains the other down to the noise.
    error = (val.samples.flatten(1) @ weight - val.targets).square().mean().sqrt().item()
    assert error == pytest.approx(0.1, rel=0.1)
    assert inputs.std().item() == pytest.approx(1, rel=0.05) and abs(inputs.mean().item()) < 0.05
    assert weight.square().sum(0).mean().sqrt().item() == pytest.approx(1, rel=0.3)
    with pytest.raises(ValueError, match=r"^noise=-1 must be at least 0 and finite; try 0.1$"):
        ToyRegression(True, (10,), 5, noise=-1)


def test_random_is_uniform():
    data = RandomRegression(True, (20,), 1)
    for values in (data.samples, data.targets):
        assert values.min() >= 0 and values.max() < 1
        assert values.mean().item() == pytest.approx(0.5, abs=0.02)
        assert values.var().item() == pytest.approx(1 / 12, rel=0.05)


@pytest.mark.parametrize("kind", [ToyRegression, RandomRegression])
def test_splits_and_seeds_differ_and_neither_split_changes_with_the_size_of_the_other(kind):
    train, val, other = kind(True, (4,), 2), kind(False, (4,), 2), kind(True, (4,), 2, seed=1)
    assert not (train.samples[:, None] == val.samples).all(-1).any()
    assert not (train.samples == other.samples).any(1).any()
    assert torch.equal(kind(False, (4,), 2, num_train=10).samples, val.samples)
    assert torch.equal(kind(True, (4,), 2, num_val=10).targets, train.targets)


def test_counting_is_uniform_and_learnable():
    data = Counting(True, (32,), 10)
    samples, targets = data.__getitems__(range(20_000))
    assert samples.min() >= -1 and samples.max() < 1
    assert samples.mean(0).abs().max() < 0.02
    assert samples.var(0).sub(1 / 3).abs().max() < 0.02
    correlation = torch.corrcoef(samples.T) - torch.eye(32)
    assert correlation.abs().max() < 0.04  # features know nothing of each other
    assert (samples[1:] * samples[:-1]).mean(0).abs().max() < 0.02  # nor do neighbouring samples
    assert torch.bincount(targets, minlength=10).sub(2000).abs().max() < 200
    assert torch.equal(samples @ torch.eye(32, 10), samples[:, :10])
    assert torch.equal((samples @ torch.eye(32, 10)).argmax(1), targets)  # a linear model's answer


def test_counting_keeps_validation_apart():
    train, val = (Counting(train, (4,), 3, num_train=100, num_val=30) for train in (True, False))
    samples = torch.cat([train.__getitems__(range(100))[0], val.__getitems__(range(30))[0]])
    assert len(samples.unique(dim=0)) == 130
    longer = Counting(True, (4,), 3, num_train=130)
    assert torch.equal(longer.__getitems__(range(130))[0], samples)  # validation goes on where training ends
    other = Counting(True, (4,), 3, num_train=100, seed=1)
    assert not (other.__getitems__(range(100))[0] == samples[:100]).any(1).any()


def test_counting_holds_no_samples():
    assert len(pickle.dumps(Counting(True, (32,), 10))) < 2000


def test_counting_hash_is_one_to_one_on_32_bits():
    numbers = torch.cat([torch.arange(100_000), torch.arange(2**32 - 100_000, 2**32)])
    hashes = _hash(numbers)
    assert hashes.min() >= 0 and hashes.max() < 2**32
    assert len(hashes.unique()) == len(numbers)
    exact = []
    for number in (1, 12345, 2**31 + 7, 2**32 - 1):  # Python's integers know no overflow
        value = (number ^ (number >> 16)) * 0x21F0AAAD % 2**32
        value = (value ^ (value >> 15)) * 0x735A2D97 % 2**32
        exact.append(value ^ (value >> 15))
    assert _hash(torch.tensor([1, 12345, 2**31 + 7, 2**32 - 1])).tolist() == exact


def test_counting_refuses_what_it_cannot_count():
    with pytest.raises(ValueError, match=r"^num_outputs=10 must be at most the 8 features of a sample; try 8$"):
        Counting(True, (2, 4), 10)
    with pytest.raises(ValueError, match=r"^num_train=4294967296 must leave at most 2.32 samples .* try 4294967286$"):
        Counting(True, (32,), 10, num_train=2**32, num_val=10)


def test_tensors_of_pixels_become_floats_in_0_to_1():
    pixels = torch.arange(256, dtype=torch.uint8).reshape(4, 1, 8, 8)
    data = TensorData(pixels, torch.arange(4))
    samples, _ = data.__getitems__([0, 1, 2, 3])
    assert torch.equal(samples.flatten(), torch.arange(256, dtype=torch.float32) / 255)
    assert data.samples.dtype == torch.uint8  # what is kept is a quarter of that


# The sets that torchvision reads


@pytest.mark.parametrize(("kind", "source"), IDX_SETS)
@pytest.mark.parametrize("train", [True, False])
def test_idx_sets_equal_totensor_on_the_same_files(kind, source, train, tmp_path):
    write_idx(tmp_path, source.__name__)
    data = kind(train=train, sample_shape=(1, 28, 28), num_outputs=10, root=str(tmp_path), download=False)
    reference = source(tmp_path, train=train, transform=ToTensor())
    assert len(data) == len(reference) == (30 if train else 12)
    samples, targets = data.__getitems__(range(len(data)))
    assert torch.equal(samples, torch.stack([image for image, _ in reference]))
    assert targets.tolist() == [label for _, label in reference]
    assert samples.dtype == torch.float32 and targets.dtype == torch.int64
    assert_both_ways_agree(data)
    assert_both_ways_agree(pickle.loads(pickle.dumps(data)))


@pytest.mark.parametrize("train", [True, False])
def test_cifar10_equals_totensor_on_the_same_files(train, cifar_root):
    data = CIFAR10(train=train, sample_shape=(3, 32, 32), num_outputs=10, root=str(cifar_root), download=False)
    reference = torchvision.datasets.CIFAR10(cifar_root, train=train, transform=ToTensor())
    assert len(data) == len(reference) == (20 if train else 4)
    samples, targets = data.__getitems__(range(len(data)))
    assert torch.equal(samples, torch.stack([image for image, _ in reference]))
    assert targets.tolist() == [label for _, label in reference] and targets.dtype == torch.int64
    assert_both_ways_agree(data)


@pytest.mark.parametrize("size", [(32, 32), (14, 20), (27, 28)])
def test_images_are_resized_to_the_shape_of_a_sample(size, tmp_path, cifar_root):
    write_idx(tmp_path)
    for kind, root, channels in ((MNIST, tmp_path, 1), (CIFAR10, cifar_root, 3)):
        data = kind(train=True, sample_shape=(channels, *size), num_outputs=10, root=str(root), download=False)
        samples, _ = data.__getitems__(range(9))
        assert samples.shape == (9, channels, *size)
        assert samples.min() >= 0 and samples.max() <= 1
        plain = data.samples[:9].to(torch.float32) / 255
        expected = torch.nn.functional.interpolate(plain, size, mode="bilinear", antialias=True)
        torch.testing.assert_close(samples, expected, atol=1e-6, rtol=0)
        assert_both_ways_agree(data)


@pytest.mark.parametrize("kind", SHAPES)
def test_file_sets_check_the_shape_before_they_look_for_files(kind, tmp_path):
    channels = SHAPES[kind][0]
    with pytest.raises(ValueError, match=rf"^sample_shape=\[2, 28, 28\] must be .* with {channels} channel"):
        kind(train=True, sample_shape=(2, 28, 28), num_outputs=10, root=str(tmp_path))
    with pytest.raises(ValueError, match=r"^sample_shape=\[784\] must be"):
        kind(train=True, sample_shape=(784,), num_outputs=10, root=str(tmp_path))
    with pytest.raises(ValueError, match=r"^num_outputs=7 must be 10"):
        kind(train=True, sample_shape=SHAPES[kind], num_outputs=7, root=str(tmp_path))


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("download", [True, False])
def test_missing_files_are_one_line_and_leave_nothing(kind, download, tmp_path, offline, capfd):
    root = tmp_path / "not" / "there"
    with pytest.raises(ValueError) as raised:
        kind(train=True, sample_shape=SHAPES[kind], num_outputs=10, root=str(root), download=download)
    message = str(raised.value)
    folder = "cifar-10-batches-py" if kind is CIFAR10 else f"{kind.__name__}/raw"
    names = ["data_batch_1", "test_batch", "batches.meta"] if kind is CIFAR10 else ["train-images-idx3-ubyte"]
    assert message.startswith(f"root={root} has no {kind.__name__}: ") and "\n" not in message
    assert all(name in message for name in names) and f"missing in {root / folder}" in message
    assert message.endswith(f"set data.root to the directory that holds {folder}")
    assert ("no network" in message) == download and ("data.download=true" in message) != download
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_a_failed_download_leaves_what_was_there(tmp_path, offline):
    home = write_idx(tmp_path)
    (home / "t10k-labels-idx1-ubyte").unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="has no MNIST: t10k-labels-idx1-ubyte missing in"):
        MNIST(train=True, sample_shape=(1, 28, 28), num_outputs=10, root=str(tmp_path))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["MNIST"]


# torchvision 0.26 unpacks without a filter, which Python 3.12 warns about; the archive's checksum has been checked.
@pytest.mark.filterwarnings("ignore:Python 3.14 will:DeprecationWarning")
def test_archives_put_there_by_hand_are_unpacked(tmp_path, monkeypatch, cifar_root):
    kind = torchvision.datasets.MNIST
    home = write_idx(tmp_path / "mnist", pack=True)
    monkeypatch.setattr(kind, "resources", [(name, md5(home / name)) for name, _ in kind.resources])
    data = MNIST(train=False, sample_shape=(1, 28, 28), num_outputs=10, root=str(tmp_path / "mnist"))
    assert len(data) == 12
    assert len(list(home.iterdir())) == 8  # four archives and their contents

    kind = torchvision.datasets.CIFAR10
    packed = tmp_path / "packed"
    packed.mkdir()
    with tarfile.open(packed / kind.filename, "w:gz") as archive:
        archive.add(cifar_root / kind.base_folder, kind.base_folder)
    monkeypatch.setattr(kind, "tgz_md5", md5(packed / kind.filename))
    assert len(CIFAR10(train=True, sample_shape=(3, 32, 32), num_outputs=10, root=str(packed))) == 20
    assert sorted(path.name for path in packed.iterdir()) == [kind.base_folder, kind.filename]


def test_a_download_puts_all_files_in_place(tmp_path, monkeypatch, capfd):
    """torchvision's own download with the transfer alone replaced: archives come from a folder of this machine."""
    kind = torchvision.datasets.FashionMNIST
    home = write_idx(tmp_path / "server", "FashionMNIST", pack=True)
    monkeypatch.setattr(kind, "resources", [(name, md5(home / name)) for name, _ in kind.resources])
    monkeypatch.setattr(torchvision.datasets.utils, "_get_redirect_url", lambda url, max_hops: url)
    monkeypatch.setattr(
        torchvision.datasets.utils,
        "_urlretrieve",
        lambda url, path: Path(path).write_bytes((home / url.rpartition("/")[2]).read_bytes()),
    )
    root = tmp_path / "new" / "root"
    for _ in range(2):
        data = FashionMNIST(train=True, sample_shape=(1, 28, 28), num_outputs=10, root=str(root))
        assert len(data) == 30
    assert [path.name for path in root.iterdir()] == ["FashionMNIST"]
    assert len(list((root / "FashionMNIST" / "raw").iterdir())) == 4
    assert capfd.readouterr() == ("", "")


def test_torn_and_mismatched_files_are_told(tmp_path, cifar_root):
    home = write_idx(tmp_path / "torn")
    images = home / "train-images-idx3-ubyte"
    for content in (b"", b"<html>not found</html>", images.read_bytes()[:-100]):
        images.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"^root=.*torn has MNIST files that cannot be read \(.+\); remove "
        ) as told:
            MNIST(train=True, sample_shape=(1, 28, 28), num_outputs=10, root=str(tmp_path / "torn"))
        assert "\n" not in str(told.value)

    home = write_idx(tmp_path / "mixed")
    (home / "train-labels-idx1-ubyte").write_bytes((home / "t10k-labels-idx1-ubyte").read_bytes())
    with pytest.raises(ValueError, match="has 30 images but 12 labels in"):
        MNIST(train=True, sample_shape=(1, 28, 28), num_outputs=10, root=str(tmp_path / "mixed"))

    batch = cifar_root / "cifar-10-batches-py" / "data_batch_3"
    batch.write_bytes(batch.read_bytes() + b"x")
    with pytest.raises(ValueError, match=r"has CIFAR10 files that cannot be read .*corrupted"):
        CIFAR10(train=True, sample_shape=(3, 32, 32), num_outputs=10, root=str(cifar_root))


def test_the_time_limit_on_connecting_ends_with_the_download(tmp_path, monkeypatch):
    import socket

    seen = []

    def fail(*args, **kwargs):
        seen.append(socket.getdefaulttimeout())
        raise TimeoutError("timed out")

    monkeypatch.setattr(torchvision.datasets.utils, "download_url", fail)
    with pytest.raises(ValueError, match=r"downloading failed \(timed out\)"):
        MNIST(train=True, sample_shape=(1, 28, 28), num_outputs=10, root=str(tmp_path))
    assert seen == [files.CONNECT_TIMEOUT_S] and socket.getdefaulttimeout() is None


# A user's own images


@pytest.mark.parametrize(("channels", "size"), [(1, (16, 16)), (3, (16, 16)), (3, (30, 12)), (1, (8, 40))])
def test_image_folder_scales_cuts_and_converts(channels, size, image_root):
    for train, count in ((True, 6), (False, 4)):
        data = ImageFolder(train=train, sample_shape=(channels, *size), num_outputs=2, root=str(image_root))
        assert len(data) == count
        for sample, target in (data[index] for index in range(count)):
            assert sample.shape == (channels, *size) and sample.dtype == torch.float32
            assert sample.min() >= 0 and sample.max() <= 1
            assert target.dtype == torch.int64 and target.shape == ()
            # The cut is central: the white half is on its side, and as wide as the other.
            halves = sample.chunk(2, dim=2)
            assert (halves[int(target)].mean() > 0.9) and (halves[1 - int(target)].mean() < 0.1)
        assert [int(target) for _, target in data] == [0] * (count // 2) + [1] * (count // 2)


def test_image_folder_keeps_the_pixels_of_images_that_fit(image_root):
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (20, 20, 3), dtype=np.uint8)
    path = image_root / "val" / "left" / "0.png"
    Image.fromarray(pixels).save(path)
    data = ImageFolder(train=False, sample_shape=(3, 20, 20), num_outputs=2, root=str(image_root))
    assert torch.equal(data[0][0], ToTensor()(Image.open(path)))
    copy = pickle.loads(pickle.dumps(data))
    assert torch.equal(copy[0][0], data[0][0]) and len(copy) == len(data)
    samples, targets = next(iter(DataLoader(data, batch_size=4)))
    assert samples.shape == (4, 3, 20, 20) and targets.tolist() == [0, 0, 1, 1]


def test_image_folder_refuses_what_it_cannot_read(image_root, tmp_path):
    def make(root=image_root, sample_shape=(3, 8, 8), num_outputs=2):
        return ImageFolder(train=True, sample_shape=sample_shape, num_outputs=num_outputs, root=str(root))

    nowhere = tmp_path / "nowhere"
    with pytest.raises(ValueError, match=f"^root={nowhere} must hold train and val .* {nowhere}/train does not exist$"):
        make(root=nowhere)
    with pytest.raises(ValueError, match=r"^num_outputs=10 must be 2, .* in .*/train; set data.num_outputs=2$"):
        make(num_outputs=10)
    for shape in ((2, 8, 8), (8, 8)):
        with pytest.raises(ValueError, match=r"^sample_shape=\[.*\] must be .* with 1 or 3 channels; try"):
            make(sample_shape=shape)
    data = make()
    Path(data.files[0][0]).write_bytes(Path(data.files[0][0]).read_bytes()[:60])
    with pytest.raises(ValueError, match=r"left/0.png cannot be decoded \(.+\); replace it"):
        data[0]
    (image_root / "val" / "third").mkdir()
    with pytest.raises(ValueError, match=r"must have the same class folders in train and val, .* third$"):
        make()
    (image_root / "train" / "third").mkdir()
    with pytest.raises(ValueError, match=r"must hold an image of each class: .*third"):
        make(num_outputs=3)


# The house


def test_models_and_data_are_plain_pytorch():
    root = Path(__file__).parents[1]
    sources = [path for folder in ("models", "data") for path in (root / folder).glob("*.py")]
    assert len(sources) > 10
    for path in sources:
        text = path.read_text()
        for word in ("runner", "hydra", "omegaconf", "torch.distributed"):
            assert f"import {word}" not in text and f"from {word}" not in text, path


def test_made_sets_do_not_import_what_they_do_not_need():
    for name, module in (("toy", "data.toy"), ("random", "data.random"), ("counting", "data.counting")):
        source = Path(importlib.import_module(module).__file__).read_text()
        assert "torchvision" not in source and "sklearn" not in source, name
