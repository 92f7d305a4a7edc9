"""Datasets that torchvision reads, offline: equal to ToTensor, downloads, and directories after a failure."""

import pickle
import tarfile
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision
from data_sets import IDX_SETS, SHAPES, assert_both_ways_agree, md5, write_idx
from runner.shipped.data.cifar10 import CIFAR10
from runner.shipped.data.fashion_mnist import FashionMNIST
from runner.shipped.data.mnist import MNIST
from torchvision.transforms import ToTensor


@pytest.fixture
def cifar_root(tmp_path, monkeypatch):
    """Write batches in CIFAR-10's format, four images each, and patch torchvision's checksums to match."""
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
    """Let every download fail immediately, after torchvision has printed a message and created a directory."""

    def fail(url, root, *args, **kwargs):
        print("trying", url)
        Path(root).mkdir(parents=True, exist_ok=True)
        (Path(root) / "half").touch()
        raise URLError("no network")

    monkeypatch.setattr(torchvision.datasets.utils, "download_url", fail)


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


@pytest.mark.parametrize("size", [(32, 32), (14, 20)])
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
@pytest.mark.parametrize("download", [True, False])
def test_missing_files_are_named_in_one_line_and_nothing_is_written(kind, download, tmp_path, offline, capfd):
    root = tmp_path / "not" / "there"
    with pytest.raises(ValueError) as raised:
        kind(train=True, sample_shape=SHAPES[kind], num_outputs=10, root=str(root), download=download)
    message = str(raised.value)
    folder = "cifar-10-batches-py" if kind is CIFAR10 else f"{kind.__name__}/raw"
    names = ["data_batch_1", "test_batch", "batches.meta"] if kind is CIFAR10 else ["train-images-idx3-ubyte"]
    assert message.startswith(f"root={root} has no {kind.__name__}: ") and "\n" not in message
    assert all(name in message for name in names) and f"missing in {root / folder}" in message
    assert message.endswith(f"set data.root to the directory that contains {folder}")
    assert ("no network" in message) == download and ("data.download=true" in message) != download
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_a_failed_download_keeps_existing_files(tmp_path, offline):
    home = write_idx(tmp_path)
    (home / "t10k-labels-idx1-ubyte").unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="has no MNIST: t10k-labels-idx1-ubyte missing in"):
        MNIST(train=True, sample_shape=(1, 28, 28), num_outputs=10, root=str(tmp_path))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["MNIST"]


# torchvision 0.26 unpacks without a filter, which Python 3.12 warns about; the archive's checksum has been checked.
@pytest.mark.filterwarnings("ignore:Python 3.14 will:DeprecationWarning")
def test_archives_copied_by_hand_are_unpacked(tmp_path, monkeypatch, cifar_root):
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
    """torchvision's download, in which only the transfer is replaced: archives are copied from a local directory."""
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


def test_truncated_and_mismatched_files_are_named(tmp_path):
    home = write_idx(tmp_path / "torn")
    images = home / "train-images-idx3-ubyte"
    for content in (b"", b"<html>not found</html>", images.read_bytes()[:-100]):
        images.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"^root=.*torn has MNIST files that cannot be read \(.+\); remove "
        ) as reported:
            MNIST(train=True, sample_shape=(1, 28, 28), num_outputs=10, root=str(tmp_path / "torn"))
        assert "\n" not in str(reported.value)

    home = write_idx(tmp_path / "mixed")
    (home / "train-labels-idx1-ubyte").write_bytes((home / "t10k-labels-idx1-ubyte").read_bytes())
    with pytest.raises(ValueError, match="has 30 images but 12 labels in"):
        MNIST(train=True, sample_shape=(1, 28, 28), num_outputs=10, root=str(tmp_path / "mixed"))
