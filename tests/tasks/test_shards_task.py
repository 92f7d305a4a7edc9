"""task=shards: the shards contain the samples of the dataset, and are complete after a kill."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import Commands
from object_stores import Bucket, wait_until
from parity import COMMON, assert_equal
from PIL import Image
from runner.shipped.data.digits import Digits
from runner.shipped.data.image_folder import ImageFolder
from runner.shipped.data.shards.dataset import Shards
from worlds import run

DIGITS = ("data.sample_shape=[1,28,28]", "data.num_outputs=10", "model=linear", "batch_size=90", "loader.shuffle=false")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_run_reads_the_same_samples_from_shards(
    here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "val"):
        options = (
            "data=digits",
            f"split={split}",
            "task.num_processes=2",
            "task.samples_per_shard=250",
            "task.shuffle=false",
        )
        assert here("task=shards", f"task.output={tmp_path / 'shards'}", *options) == 0, capfd.readouterr().err
    assert [*contents(tmp_path / "shards/val")] == ["00000000-00000249.tar", "00000250-00000359.tar"]
    assert f"read by  data=shards data.root={tmp_path / 'shards'}\n" in capfd.readouterr().out
    digits, shards = Digits("train", [1, 28, 28], 10), Shards("train", [1, 28, 28], 10, str(tmp_path / "shards"))
    assert len(digits) == len(shards)
    for index in (0, 249, 250, len(digits) - 1):
        assert all(
            torch.equal(torch.as_tensor(one), other) for one, other in zip(digits[index], shards[index], strict=True)
        )
    expected = run(tmp_path / "files", 1, "data=digits", *DIGITS, *COMMON)
    root = f"data.root={tmp_path / 'shards'}"
    found = run(tmp_path / "tar", 2, "data=shards", root, *DIGITS, *COMMON, "parallel=ddp")
    assert_equal(found, expected)


def test_samples_are_written_in_a_random_order(commands: Commands, tmp_path: Path) -> None:
    orders = []
    for seed in (0, 0, 1):
        options = (
            "data=toy",
            "split=train",
            f"seed={seed}",
            f"task.output=shards-{len(orders)}",
            "task.samples_per_shard=64",
        )
        assert commands.forked("task=shards", *options).returncode == 0
        names = []
        for path in sorted((tmp_path / f"shards-{len(orders)}" / "train").iterdir()):
            with tarfile.open(path) as tar:
                names += tar.getnames()
        orders.append([int(name.partition(".")[0]) for name in names[::2]])  # each sample has two members
    first, again, other = orders
    assert first == again != other and first != sorted(first)
    assert sorted(first) == sorted(other) == [*range(len(first))]


@pytest.mark.fault("kill -9 of task=shards", outcome="survived")
def test_a_killed_command_is_continued(commands: Commands, tmp_path: Path) -> None:
    """Only missing shards are written again, by another number of processes, and the result is bit-identical."""
    words = ("task=shards", "data=digits", "split=train", "task.samples_per_shard=10")
    process = commands.fork(*words, "task.output=killed", "task.num_processes=2")
    train = tmp_path / "killed/train"
    wait_until(lambda: process.poll() is not None or len([*train.glob("[!.]*.tar")]) >= 3)
    commands.kill(process)
    output = process.communicate()
    kept = {path: path.stat().st_mtime_ns for path in train.glob("[!.]*.tar")}
    assert 3 <= len(kept) < 144, output
    done = commands.forked(*words, "task.output=killed")
    assert done.returncode == 0, done.stderr
    assert f"of which {144 - len(kept)} were written now" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert commands.forked(*words, "task.output=whole").returncode == 0
    assert contents(train) == contents(tmp_path / "whole/train")


def test_images_are_written_unchanged_to_a_bucket(bucket: Bucket, commands: Commands, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 20, 30, 3), np.uint8)
    for number, array in enumerate(pixels):
        path = tmp_path / "images" / "train" / str(number % 2) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(path)
    root, store = f"s3://{bucket.name}/shards", bucket.overrides(tmp_path)[2]
    words = ("task=shards", "data=image_folder", "data.root=images", "data.sample_shape=[3,16,16]", "split=train")
    words += ("data.num_outputs=2", "task.samples_per_shard=4", "task.shuffle=false", f"task.output={root}", store)
    for written in (2, 0):
        done = commands.runner(*words)
        assert done.returncode == 0, done.stderr
        assert f"2 of 6 samples in {root}/train, of which {written} were written now" in done.stdout
    folder = ImageFolder("train", [3, 16, 16], 2, str(tmp_path / "images"))
    cache = str(tmp_path / "cache")
    shards = Shards("train", [3, 16, 16], 2, root, cache_dir=cache, remote_options=bucket.options())
    assert all(torch.equal(shards[index][0], folder[index][0]) for index in range(6))
    assert [int(shards[index][1]) for index in range(6)] == [0, 0, 0, 1, 1, 1]
    assert shards._read(5)["jpg"] == (tmp_path / "images/train/1/5.jpg").read_bytes()
    failed = commands.runner(*(word.replace("/shards", "x/shards") for word in words))
    assert failed.returncode == 1 and f"task.output=s3://{bucket.name}x/shards/train" in failed.stderr
    assert len(failed.stderr.splitlines()) <= 3, failed.stderr


def test_shards_in_a_bucket_are_written_again(bucket: Bucket, commands: Commands, tmp_path: Path) -> None:
    """In shards of another size, at another address, and in the first order again.

    The commands are not forked from this process, which may have used a store.
    """
    first, second, store = (f"s3://{bucket.name}/first", f"s3://{bucket.name}/second", bucket.overrides(tmp_path)[2])
    words = ("task=shards", "split=val", "task.shuffle=false", store)
    done = commands.runner(*words, "data=digits", f"task.output={first}", "task.samples_per_shard=100")
    assert done.returncode == 0, done.stderr
    sizes = ("data.sample_shape=[1,28,28]", "data.num_outputs=10")
    words += ("data=shards", f"data.root={first}", *sizes, "task.samples_per_shard=150", "task.num_processes=2")
    done = commands.runner(*words, f"task.output={second}")
    assert done.returncode == 0, done.stderr
    assert f"3 of 360 samples in {second}/val, of which 3 were written now" in done.stdout
    cache, options = str(tmp_path / "cache"), bucket.options()
    before, after = (
        Shards("val", [1, 28, 28], 10, root, cache_dir=cache, remote_options=options) for root in (first, second)
    )
    assert len(before) == len(after) == 360
    for index in (0, 149, 150, 359):
        assert all(
            torch.equal(torch.as_tensor(one), other) for one, other in zip(before[index], after[index], strict=True)
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=digits", "task.samples_per_shard=0"], "task.samples_per_shard=0 must be at least 1"),
        (["data=digits", "task.samples_per_shard=70"], "contains 00000000-00000099.tar, which is not a shard of this"),
        (["data=toy", "task.samples_per_shard=100"], "00000000-00000099.tar has other samples than the data"),
    ],
)
def test_unsuitable_options_are_refused(
    words: list[str], message: str, here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out/val").mkdir(parents=True)
    (tmp_path / "out/val/00000000-00000099.tar").write_bytes(io.BytesIO(b"other").getvalue())
    assert here("task=shards", f"task.output={tmp_path / 'out'}", "split=val", *words) == 2
    assert message in capfd.readouterr().err
    assert [*contents(tmp_path / "out/val")] == ["00000000-00000099.tar"]
