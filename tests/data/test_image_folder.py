"""A directory of custom images."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from runner.shipped.data.image_folder import ImageFolder
from torchvision.transforms import ToTensor


@pytest.fixture
def image_root(tmp_path):
    """Write two classes of images: left or right half white; wide and tall, gray and color."""
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


@pytest.mark.parametrize(("channels", "size"), [(1, (16, 16)), (3, (30, 12)), (3, (8, 40))])
def test_image_folder_scales_crops_and_converts(channels, size, image_root):
    for split, count in (("train", 6), ("val", 4)):
        data = ImageFolder(split=split, sample_shape=(channels, *size), num_outputs=2, root=str(image_root))
        assert len(data) == count
        for sample, target in (data[index] for index in range(count)):
            assert sample.shape == (channels, *size) and sample.dtype == torch.float32
            assert sample.min() >= 0 and sample.max() <= 1
            assert target.dtype == torch.int64 and target.shape == ()
            # The crop is central: the white half stays on its side and is as wide as the other.
            halves = sample.chunk(2, dim=2)
            assert (halves[int(target)].mean() > 0.9) and (halves[1 - int(target)].mean() < 0.1)
        assert [int(target) for _, target in data] == [0] * (count // 2) + [1] * (count // 2)


def test_image_folder_keeps_the_pixels_of_images_that_fit(image_root):
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (20, 20, 3), dtype=np.uint8)
    path = image_root / "val" / "left" / "0.png"
    Image.fromarray(pixels).save(path)
    data = ImageFolder(split="val", sample_shape=(3, 20, 20), num_outputs=2, root=str(image_root))
    assert torch.equal(data[0][0], ToTensor()(Image.open(path)))


def test_image_folder_refuses_what_it_cannot_read(image_root, tmp_path):
    def make(root=image_root, sample_shape=(3, 8, 8), num_outputs=2, split="train"):
        return ImageFolder(split=split, sample_shape=sample_shape, num_outputs=num_outputs, root=str(root))

    nowhere = tmp_path / "nowhere"
    for split in ("train", "test"):
        root = nowhere if split == "train" else image_root
        with pytest.raises(
            ValueError, match=f"^root={root}: the {split} split needs .* {root}/{split}, which does not"
        ):
            make(root=root, split=split)
    with pytest.raises(ValueError, match=r"^num_outputs=10 must be 2, .* in .*/train; set data.num_outputs=2$"):
        make(num_outputs=10)
    for shape in ((2, 8, 8), (8, 8)):
        with pytest.raises(ValueError, match=r"^sample_shape=\[.*\] must be .* with 1 or 3 channels; try"):
            make(sample_shape=shape)
    data = make()
    Path(data.files[0][0]).write_bytes(Path(data.files[0][0]).read_bytes()[:60])
    with pytest.raises(ValueError, match=r"left/0.png cannot be decoded \(.+\); replace or remove it"):
        data[0]
    (image_root / "val" / "third").mkdir()
    with pytest.raises(ValueError, match=r"must have the same class directories in train and val, .* third$"):
        make(split="val")
    (image_root / "train" / "third").mkdir()
    with pytest.raises(ValueError, match=r"must contain an image of each class, but .*train/third has none$"):
        make(num_outputs=3)


def test_image_folder_reports_what_it_skips(image_root):
    def make(split="train"):
        return ImageFolder(split=split, sample_shape=(3, 8, 8), num_outputs=2, root=str(image_root))

    assert make().header_lines == make("val").header_lines == [] and make().classes == ["left", "right"]
    train, pixels = image_root / "train", Image.new("RGB", (9, 9))
    for path in (".checkpoints/0.png", "left/.cache/0.png", "left/._0.png", "right/nested/UPPER.GIF", "right/0.jp2"):
        (train / path).parent.mkdir(parents=True, exist_ok=True)
        pixels.save(train / path)
    for path in ("left/0.heic", "left/1.HEIC", "right/README", "labels.csv"):
        (train / path).write_text("not decoded")
    data = make()
    assert data.header_lines == [
        f"skipped in {train}: files that are not images (.heic 2, without an ending 1), hidden files (1), hidden "
        "directories (.cache, .checkpoints), files outside of the class directories (labels.csv)"
    ]
    assert [Path(path).relative_to(train).as_posix() for path, _ in data.files] == [
        *("left/0.png", "left/1.png", "left/2.png"),
        *("right/0.jp2", "right/0.png", "right/1.png", "right/2.png", "right/nested/UPPER.GIF"),
    ]
    (train / "right" / "loop").symlink_to(train / "right")
    with pytest.raises(ValueError, match=r"right/loop links to .*train/right, which is read already; remove the link$"):
        make()
    for path in train.glob("left/*.png"):
        path.unlink()
    with pytest.raises(ValueError, match=r"train/left has none \(skipped in .*: files that are not images "):
        make()


def test_a_folder_without_validation_images_trains_as_advised_and_evaluates_its_test_images(
    image_root: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (image_root / "val").rename(image_root / "test")
    options = (f"data.root={image_root}", "data.sample_shape=[1,8,8]", "data.num_outputs=2", "threads=1")
    command = ("data=image_folder", *options, "model=linear", "logger=none", "epochs=1")
    assert here(*command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    (advice,) = re.findall(r"data=image_folder has no validation split; set (\S+) to take it from the training", line)
    assert here(*command, advice) == 0
    assert "5 training and 1 validation samples; classes 0 left, 1 right" in capsys.readouterr().out
    assert here("task=evaluate", "run=last", "split=test") == 0
    evaluation = max((image_root.parent / "outputs" / "run").iterdir())
    result = json.loads((evaluation / "result.json").read_text())
    assert result["samples"]["val"] == 4  # the evaluated samples
    assert set(result["metrics"]) == {"test/loss", "test/accuracy"}
