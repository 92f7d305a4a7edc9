"""Text in blocks and images of shapes: samples, splits, and refused options."""

import pickle

import pytest
import torch
from data_sets import assert_both_ways_agree
from runner.shipped.data.shapes import Shapes
from runner.shipped.data.text import PRINTABLE, Text

SPLITS = ("train", "val", "test")


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a.txt").write_text("abcde\n" * 50, encoding="utf-8")
    (tmp_path / "b.txt").write_text("ünïcödé €🙂" * 50, encoding="utf-8")
    return str(tmp_path / "*.txt")


def test_the_default_text_is_repeatable_and_split_by_position():
    splits = [Text(split, [64], 96) for split in SPLITS]
    again = [Text(split, [64], 96) for split in SPLITS]
    texts = [split.decode(split.tokens.tolist()) for split in splits]
    assert texts == [split.decode(split.tokens.tolist()) for split in again]
    total = sum(map(len, texts))
    assert total > 300_000 and [len(text) / total for text in texts] == pytest.approx([0.9, 0.05, 0.05], abs=1e-4)
    assert set("".join(texts)) <= set(PRINTABLE) and splits[0].vocabulary == sorted(PRINTABLE)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("unit", ["characters", "bytes"])
def test_targets_are_the_tokens_that_follow(unit, split, files):
    data = Text(split, [8], 256 if unit == "bytes" else 14, files, unit)
    inputs, targets = data.__getitems__(range(len(data)))
    assert inputs.dtype == targets.dtype == torch.int64 and inputs.shape == targets.shape == (len(data), 8)
    assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])  # the blocks follow each other
    read = data.decode([*inputs.flatten().tolist(), targets[-1, -1].item()])
    whole = "abcde\n" * 50 + "ünïcödé €🙂" * 50
    encoded = whole.encode() if unit == "bytes" else whole
    start, end = (
        round(part * len(encoded)) for part in {"train": (0, 0.9), "val": (0.9, 0.95), "test": (0.95, 1)}[split]
    )
    part = encoded[start:end][: len(data) * 8 + 1]
    assert read == (part if isinstance(part, str) else part.decode(errors="replace"))
    assert (end - start - 1) // 8 == len(data)
    assert_both_ways_agree(data) if len(data) >= 7 else None
    assert torch.equal(pickle.loads(pickle.dumps(data))[1][1], data[1][1])


def test_a_byte_order_mark_is_no_character(tmp_path):
    (tmp_path / "a.txt").write_text("ab" * 100, encoding="utf-8-sig")
    assert Text("train", [8], 2, str(tmp_path / "a.txt")).vocabulary == ["a", "b"]
    assert Text("train", [8], 256, [str(tmp_path / "a.txt")] * 2, "bytes").tokens.tolist() == [97, 98] * 180


def test_text_refuses_invalid_options(files, tmp_path):
    with pytest.raises(
        ValueError, match=r"^num_outputs=96 must be 14, the number of different characters .* data.num_outputs=14$"
    ):
        Text("train", [8], 96, files)
    with pytest.raises(ValueError, match=r"^num_outputs=14 must be 256, .*different bytes .* data.num_outputs=256$"):
        Text("train", [8], 14, files, "bytes")
    with pytest.raises(
        ValueError, match=r"^sample_shape=\[60\] is too long: the val split has 40 tokens, .* try \[10\]"
    ):
        Text("val", [60], 14, files)
    with pytest.raises(ValueError, match=r"^files=.* is a directory; name the files in it, as in .*/\*"):
        Text("train", [8], 14, str(tmp_path))
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe\x00")
    for unit in ("characters", "bytes"):
        with pytest.raises(ValueError, match=r"^files: /proc/self/mem cannot be read: Input/output error"):
            Text("train", [8], 256, "/proc/self/mem", unit)
    with pytest.raises(ValueError, match=r"^files: .*c\.txt is not UTF-8 \(.*\); convert it, or set unit=bytes"):
        Text("train", [8], 14, str(tmp_path / "c.txt"))


@pytest.mark.parametrize("channels", [1, 3])
def test_shapes_are_where_their_classes_are(channels):
    data = Shapes("train", [channels, 32, 40], 3, noise=0.0)
    images, targets = data.__getitems__(range(300))
    assert images.shape == (300, channels, 32, 40) and images.dtype == torch.float32
    assert targets.shape == (300, 32, 40) and targets.dtype == torch.int64
    assert targets.unique().tolist() == [0, 1, 2]
    fractions = torch.bincount(targets.flatten()) / targets.numel()
    assert 0.6 < fractions[0] < 0.95 and fractions[1:].min() > 0.03
    covered = (targets > 0)[:, None].expand_as(images)
    assert (images[~covered] == 0).all() and images[covered].min() >= 0.5 and images[covered].max() < 1
    # Every image has a shape, and some have more than two.
    assert (targets > 0).flatten(1).any(1).all()
    assert max(len(image[0].unique()) for image in images) > 3
    noisy = Shapes("train", [channels, 32, 40], 3, noise=0.5).__getitems__(range(300))
    assert torch.equal(noisy[1], targets)
    noise = noisy[0] - images
    assert noise.min() >= 0 and noise.max() <= 0.5 and noise.mean().item() == pytest.approx(0.25, abs=0.01)


def test_shapes_stores_no_images_and_its_splits_differ():
    options = {"num_train": 40, "num_val": 20, "num_test": 10}
    splits = [Shapes(split, [1, 16, 16], 3, **options) for split in SPLITS]
    assert [len(split) for split in splits] == [40, 20, 10] and len(pickle.dumps(splits[0])) < 6000
    images = torch.cat([split.__getitems__(range(len(split)))[0] for split in splits])
    assert len(images.flatten(1).unique(dim=0)) == 70
    other = Shapes("train", [1, 16, 16], 3, seed=1, **options).__getitems__(range(40))[0]
    assert not (other == images[:40]).flatten(1).all(1).any()
    for split in splits:
        assert_both_ways_agree(split)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_shape": [2, 64, 64]}, r"sample_shape=\[2, 64, 64\] must be .* 1 or 3 channels .* try \[1, 64, 64\]"),
        ({"sample_shape": [1, 4, 64]}, "sample_shape=.* at least 8 x 8"),
        ({"num_outputs": 10}, "num_outputs=10 must be 3, for background, disc and square"),
    ],
)
def test_shapes_refuses_invalid_options(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Shapes(**{"split": "train", "sample_shape": [1, 64, 64], "num_outputs": 3, **options})
