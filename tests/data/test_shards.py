"""data=shards: samples of tar files and JSON lines by an index, and their order in blocks."""

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import COMMON
from PIL import Image
from runner.shipped.data.image_folder import ImageFolder
from runner.shipped.data.shards.dataset import Shards
from shard_files import npy, save_parquet, save_tar, save_vectors
from worlds import run

from runner.input.loader import Loader
from runner.input.sampler import Sampler
from runner.input.source import Source

SIZES = [5, 11, 1, 7, 13, 9, 4, 10]
THOROUGH = pytest.mark.thorough


def opened(root: Path, shape: list[int] = [8], classes: int = 4, **options: Any) -> Shards:  # noqa: B006
    return Shards("train", shape, classes, str(root), cache_dir=str(root.parent / "cache"), **options)


def test_samples_are_those_of_the_files(tmp_path: Path) -> None:
    save_vectors(tmp_path / "root", SIZES)
    data = opened(tmp_path / "root")
    generator = np.random.default_rng(0)
    for index in range(len(data)):
        inputs, target = data[index]
        assert torch.equal(inputs, torch.from_numpy(generator.normal(size=8)).to(torch.float32))
        assert target == index % 4 and target.dtype == torch.int64
    assert len(data) == sum(SIZES) and data.block_ends.tolist() == np.cumsum(SIZES).tolist()


def test_images_are_those_of_an_image_folder(tmp_path: Path) -> None:
    pixels, samples = np.random.default_rng(0).integers(0, 256, (3, 20, 30, 3), np.uint8), []
    for number, kind in enumerate(("jpg", "png", "png")):
        Image.fromarray(pixels[number]).save(file := io.BytesIO(), "jpeg" if kind == "jpg" else kind)
        path = tmp_path / "images" / "train" / str(number) / f"a.{kind}"
        path.parent.mkdir(parents=True)
        path.write_bytes(file.getvalue())
        samples.append({"jpg": file.getvalue(), "cls": str(number).encode()})
    save_tar(tmp_path / "root" / "train" / "a.tar", samples)
    folder = ImageFolder("train", [3, 16, 16], 3, str(tmp_path / "images"))
    data = opened(tmp_path / "root", [3, 16, 16], 3)
    for index in range(3):
        assert all(map(torch.equal, data[index], folder[index]))


def test_members_and_fields_are_selected(tmp_path: Path) -> None:
    members = {"x.json": b"[1, 2.5]", "y.npy": npy(np.array([3, 4])), "txt": b"ab"}
    save_tar(tmp_path / "tar" / "a.tar", [members, members])
    inputs, target = opened(tmp_path / "tar", [2], 2, input="x.json", target="y.npy")[1]
    assert inputs.tolist() == [1, 2.5] and target.tolist() == [3, 4] and target.dtype == torch.int64
    assert opened(tmp_path / "tar", [2], 2, input="txt", target="y.npy")[0][0].tolist() == [97, 98]
    decoded = opened(tmp_path / "tar", decode=lambda sample: (len(sample), sample["txt"]))
    assert decoded[0] == (3, b"ab")
    (tmp_path / "lines").mkdir()
    records = [{"x": [0.5, number], "y": number} for number in range(3)]
    (tmp_path / "lines" / "a.jsonl").write_text("\n\n".join(map(json.dumps, records)))
    inputs, target = opened(tmp_path / "lines", [2], 3, target="y")[2]
    assert inputs.tolist() == [0.5, 2] and target == 2


def test_a_sample_that_cannot_be_decoded_is_one_message(tmp_path: Path) -> None:
    samples = [{"npy": npy(np.zeros(2)), "cls": b"0"}, {"npy": npy(np.zeros(2))}]
    save_tar(tmp_path / "root" / "a.tar", samples)
    with pytest.raises(ValueError, match=r"a\.tar, sample 1 cannot be decoded \(it has no cls\)"):
        opened(tmp_path / "root", [2], 1)[1]
    decoded = opened(tmp_path / "root", decode=lambda sample: {"cat": 0}["dog"])
    with pytest.raises(ValueError, match=r"a\.tar, sample 0 cannot be decoded \(KeyError: 'dog'\)"):
        decoded[0]


def test_rows_of_parquet_are_samples(tmp_path: Path) -> None:
    numbers = [[float(number), 0.1] for number in range(7)]
    columns = {
        "x": numbers,
        "y": [3, 1, 0, 2, 2, 2, 1],
        "png": [b"%d" % number for number in range(7)],
        "text": ["é"] * 7,
    }
    save_parquet(tmp_path / "root" / "train" / "a.parquet", columns, 3)
    save_parquet(tmp_path / "root" / "train" / "b.parquet", {"x": numbers[:2], "y": [0, 1]}, 3)
    data = Shards("train", root=str(tmp_path / "root"), input="x", target="y", cache_dir=str(tmp_path / "cache"))
    assert (data.sample_shape, data.num_outputs, data.block_ends.tolist()) == ([2], 4, [3, 6, 7, 9])
    expected = [*numbers, *numbers[:2]]
    for index in (8, 0, 3, 5, 6, 7, 1, 2, 4):
        inputs, target = data[index]
        assert torch.equal(inputs, torch.tensor(expected[index])) and target == [*columns["y"], 0, 1][index]
    assert len(list((tmp_path / "cache" / "blocks").iterdir())) == 4
    members = Shards("train", [2], 4, str(tmp_path / "root"), decode=dict, cache_dir=str(tmp_path / "cache"))[4]
    assert members == {"x.json": b"[4.0, 0.1]", "y.json": b"2", "png": b"4", "text.txt": "é".encode()}
    save_parquet(tmp_path / "root" / "train" / "b.parquet", {"x": numbers[:2], "y": [0, 2]}, 3)
    with pytest.raises(ValueError, match=r"b\.parquet has changed since it was indexed"):
        Shards("train", root=str(tmp_path / "root"), input="x", target="y", cache_dir=str(tmp_path / "cache"))


def test_a_truncated_parquet_shard_is_refused(tmp_path: Path) -> None:
    save_parquet(tmp_path / "root" / "a.parquet", {"x": [[0.5]] * 100, "y": [0] * 100}, 50)
    os.truncate(tmp_path / "root" / "a.parquet", 500)
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read \(.*\); replace or remove it"):
        opened(tmp_path / "root", input="x", target="y")


def damage_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.rindex(b"NUMPY") + 128] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path, 3000), "part-001.tar, sample 1 is truncated"),
        (damage_byte, "part-001.tar, sample 10 has changed since it was indexed"),
        (lambda path: path.unlink(), "part-001.tar is missing"),
        (lambda path: shutil.copy(path, path.with_name("z.tar")), "z.tar was added after the shards were indexed"),
    ],
)
def test_shards_that_changed_since_they_were_indexed_are_refused(tmp_path: Path, damage: Any, message: str) -> None:
    save_vectors(tmp_path, SIZES[:2])
    opened(tmp_path)
    damage(tmp_path / "part-001.tar")
    with pytest.raises(ValueError, match=message):
        opened(tmp_path)[15]


def test_a_truncated_shard_is_refused_before_it_is_indexed(tmp_path: Path) -> None:
    save_vectors(tmp_path, SIZES[:2])
    os.truncate(tmp_path / "part-001.tar", 3000)
    with pytest.raises(ValueError, match=r"part-001\.tar cannot be read \(unexpected end of data\)"):
        opened(tmp_path)
    assert not list(tmp_path.glob("*.shards"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": [7]}, r"sample_shape=\[7\] must be \[8\], .* set data.sample_shape=\[8\]"),
        ({"classes": 3}, "num_outputs=3 must be at least 4, .* set data.num_outputs=4"),
        ({"target": "json"}, "target=json: the first sample has only npy, cls"),
        ({"input": "jpg"}, "input=jpg: the first sample has only npy, cls"),
        ({"window": 0}, "window=0 must be at least 1"),
    ],
)
def test_options_that_do_not_fit_the_shards_are_refused(tmp_path: Path, options: Any, message: str) -> None:
    save_vectors(tmp_path, SIZES[:1])
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, **options)


def found(root: Path, **options: Any) -> tuple[list[int], int]:
    data = Shards("train", root=str(root), cache_dir=str(root.parent / "cache"), **options)
    return data.sample_shape, data.num_outputs


def picture(height: int, width: int, mode: str = "RGB", **options: Any) -> bytes:
    Image.new(mode, (width, height)).save(file := io.BytesIO(), "jpeg", **options)
    return file.getvalue()


def test_shape_and_number_of_outputs_are_found_in_the_shards(tmp_path: Path) -> None:
    save_vectors(tmp_path / "vectors", SIZES)
    assert found(tmp_path / "vectors") == ([8], 4)
    assert found(tmp_path / "vectors", decode=lambda members: (torch.zeros(2, 3), int(members["cls"]))) == ([2, 3], 4)
    (exif := Image.Exif())[274] = 6  # turned by 90 degrees
    images = [{"jpg": picture(16, 20), "cls": b"2"}, {"jpg": picture(20, 16, exif=exif), "cls": b"0"}]
    save_tar(tmp_path / "images" / "a.tar", images)
    assert found(tmp_path / "images") == ([3, 16, 20], 3)
    save_tar(tmp_path / "gray" / "a.tar", [{"jpg": picture(16, 20, "L"), "npy": npy(np.zeros(5))}])
    assert found(tmp_path / "gray", target="npy") == ([1, 16, 20], 5)
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.jsonl").write_text('{"x": [1, 2], "y": 6, "z": 0.5}\n{"x": [3, 4], "y": 2, "z": 1}\n')
    assert found(tmp_path / "lines", input="x", target="y") == ([2], 7)
    assert found(tmp_path / "lines", input="x", target="z") == ([2], 1)


def test_sizes_that_the_shards_do_not_determine_are_named(tmp_path: Path) -> None:
    save_tar(tmp_path / "images" / "a.tar", [{"jpg": picture(16, size), "cls": b"0"} for size in (16, 20)])
    with pytest.raises(ValueError, match=r"sample_shape=null: the images \.jpg have different sizes; set .* data\."):
        found(tmp_path / "images")
    save_tar(tmp_path / "pixels" / "a.tar", [{"npy": npy(np.zeros(2)), "map.npy": npy(np.zeros((2, 2), int))}])
    with pytest.raises(ValueError, match=r"num_outputs=null: .* set data.num_outputs"):
        found(tmp_path / "pixels", target="map.npy")
    with pytest.raises(ValueError, match=r"sample_shape=null: .* set data.sample_shape"):
        found(tmp_path / "pixels", decode=lambda members: members)


def test_a_validation_split_may_lack_the_highest_class(tmp_path: Path) -> None:
    vector = npy(np.zeros(8))
    for split, labels in (("train", (0, 1, 2)), ("val", (1, 0)), ("test", (1, 3))):
        save_tar(tmp_path / split / "a.tar", [{"npy": vector, "cls": b"%d" % label} for label in labels])
    assert len(Shards("val", [8], 3, str(tmp_path))) == 2
    with pytest.raises(ValueError, match="num_outputs=3 must be at least 4, because the test split has a class 3"):
        Shards("test", [8], 3, str(tmp_path))


def test_the_order_reads_the_blocks_of_a_window_at_a_time(tmp_path: Path) -> None:
    save_vectors(tmp_path, SIZES)
    source = Source.of(opened(tmp_path, window=3))
    orders = {}
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        loader = Loader(source, Sampler(len(source), 7, seed=seed), torch.float32, torch.device("cpu"))
        orders[seed, epoch] = order = [index for batch in loader.sampler.local_batches(epoch) for index in batch]
        assert sorted(order) == list(range(len(source)))
        blocks = np.searchsorted(source.block_ends, order, side="right")
        first, num_windows = 0, 0
        while first < len(order):  # a window ends when all samples of its blocks have occurred
            window = blocks[first : first + 1]
            while len(window) < (size := sum(SIZES[block] for block in set(window))) or len(set(window)) < 2:
                window = blocks[first : first + max(size, len(window) + 1)]
                if first + len(window) >= len(order):
                    break
            assert len(set(window)) <= 3
            first, num_windows = first + len(window), num_windows + 1
        assert num_windows >= 3
    assert len(set(map(tuple, orders.values()))) == 3


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"first_step": 6}])
def test_blocks_are_copied_ahead_of_the_step_that_reads_them(tmp_path: Path, options: dict[str, Any]) -> None:
    save_vectors(tmp_path, SIZES)
    ends, window, first_step = opened(tmp_path).block_ends, 2, options.pop("first_step", 0)
    sampler = Sampler(sum(SIZES), 4, seed=5, block_ends=ends, window=window, **options)
    copied, read = list[int](), set[int]()
    ahead = sampler.blocks_ahead(1, first_step)
    for samples in sampler.local_batches(1, first_step):
        copied += np.searchsorted(ends, next(ahead), side="right").tolist()
        read.update(np.searchsorted(ends, samples, side="right").tolist())
        assert read <= set(copied) and len(copied) <= len(read) + 2 * window
    assert next(ahead, None) is None and len(copied) == len(set(copied))
    assert first_step or len(copied) == len(SIZES)


def test_a_part_of_the_samples_keeps_the_blocks(tmp_path: Path) -> None:
    save_vectors(tmp_path, SIZES)
    rows = torch.tensor([0, 1, 5, 6, 30, 59])
    source = Source(opened(tmp_path), rows=rows)
    assert source.block_ends.tolist() == [2, 4, 5, 6]


def overrides(root: Path) -> list[str]:
    shards = [f"data.root={root}", "data.window=3"]  # sample_shape and num_outputs are found
    model = ["model=mlp", "model.hidden=[6]", "val_fraction=0.2", "batch_size=7", "parallel=ddp"]
    return ["data=shards", *shards, *model, *COMMON, "epochs=3", "max_steps=16", "log_every=1"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, 0), (1, 2)),
        pytest.param((1, 2), (3, 0), marks=THOROUGH),
        pytest.param((3, 2), (2, 0), marks=THOROUGH),
        pytest.param((2, 2), (3, 2), marks=THOROUGH),
        pytest.param((3, 0), (2, 2), marks=THOROUGH),
    ],
)
def test_ranks_workers_and_a_resume_do_not_change_the_steps(
    tmp_path: Path, first: tuple[int, int], second: tuple[int, int]
) -> None:
    save_vectors(tmp_path / "root", SIZES)
    common = overrides(tmp_path / "root")
    whole = run(tmp_path / "whole", 1, *common, "parallel=none")

    def arguments(ranks: int, workers: int) -> tuple[Any, ...]:
        return ranks, f"loader.num_workers={workers}", *(["parallel=none"] if ranks == 1 else ["parallel=ddp"])

    ranks, *others = arguments(*first)
    part = run(tmp_path / "part", ranks, *common, *others, "max_steps=9")
    assert part.losses == pytest.approx({step: whole.losses[step] for step in part.losses}, rel=1e-9)
    ranks, *others = arguments(*second)
    resumed = run(tmp_path / "part", ranks, f"resume={part.path}", "max_steps=16", *others)
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-9)
    for step in (14, 16):
        assert resumed.values("val/loss")[step] == pytest.approx(whole.values("val/loss")[step], rel=1e-9)
