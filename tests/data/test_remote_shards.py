"""data=shards with an address: the samples and steps of local shards, and one message for each failure."""

import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from object_stores import Bucket, Proxy, remove_variables, wait_until
from parity import COMMON
from runner.shipped.data.shards import requests
from runner.shipped.data.shards.dataset import Shards
from runner.shipped.data.shards.index import CRC
from sample_log import samples_of
from shard_files import save_parquet, save_vectors
from worlds import Run, configure, run

from runner.errors import InputError
from runner.remote.store import CLIENT_OPTIONS

SIZES = [5, 11, 1, 7, 13, 9, 4, 10]
THOROUGH = pytest.mark.thorough
UPLOAD = """
import json, sys
from obstore.store import from_url
address, options, files = json.load(sys.stdin)
store = from_url(address, endpoint=options["endpoint"], client_options={"allow_http": True})
for name, path in files: store.put(name, open(path, "rb").read())
"""


def upload(bucket: Bucket, directory: Path) -> str:
    """Copy a directory to the bucket. Return its address."""
    files = [[str(path.relative_to(directory)), str(path)] for path in directory.rglob("*.*")]
    address = f"s3://{bucket.name}/root"
    message = json.dumps([address, bucket.options(), files])
    subprocess.run([sys.executable, "-c", UPLOAD], input=message, text=True, check=True, timeout=120)
    return address


def opened(root: str, cache: Path, bucket: Bucket, port: int | None = None, **options: Any) -> Shards:
    return Shards("train", [8], 4, root, cache_dir=str(cache), remote_options=bucket.options(port), **options)


def test_samples_are_those_of_local_shards(tmp_path: Path, bucket: Bucket) -> None:
    save_vectors(tmp_path / "root", SIZES)
    local = Shards("train", [8], 4, str(tmp_path / "root"), cache_dir=str(tmp_path / "cache"))
    data = opened(upload(bucket, tmp_path / "root"), tmp_path / "cache", bucket)
    assert len(data) == len(local) and (data.block_ends == local.block_ends).all()
    for index in range(len(data)):
        assert all(map(torch.equal, data[index], local[index]))
    in_files = Shards("train", [8], 4, (tmp_path / "root").as_uri(), cache_dir=str(tmp_path / "cache"))
    assert all(map(torch.equal, in_files[3], local[3]))


@pytest.mark.fault("a cache of shards without space", outcome="refused")
def test_a_cache_without_space_is_named(tmp_path: Path, bucket: Bucket) -> None:
    save_vectors(tmp_path / "root", SIZES)
    address, cache = upload(bucket, tmp_path / "root"), tmp_path / "cache"
    data = opened(address, cache, bucket)
    for block in (cache / "blocks").iterdir():
        block.unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))  # also of the process that copies the block
    try:
        with pytest.raises(ValueError, match=r"cache_dir=.*/cache: .* cannot be copied there \(File too large\)"):
            data[20]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path for path in (cache / "blocks").iterdir() if path.is_file()] == []
    assert len(data[20]) == 2  # once there is space


def test_blocks_are_requested_once_and_the_cache_is_bounded(
    tmp_path: Path,
    bucket: Bucket,
    proxy: Proxy,
) -> None:
    save_vectors(tmp_path / "root", SIZES)
    address = upload(bucket, tmp_path / "root")
    data = opened(address, tmp_path / "cache", bucket, proxy.port)
    again = opened(address, tmp_path / "cache", bucket, proxy.port)
    for index in (0, 3, 4, 3, 59, 0):
        assert all(map(torch.equal, data[index], again[index]))
    assert proxy.counts["GET None"] <= len(SIZES) + 2 + 2  # the index, two lists, and two blocks
    assert data.remote
    data.remote._cache_gb = 40_000 / 1e9
    for index in range(len(data)):
        data[index]
        assert sum(path.stat().st_size for path in (tmp_path / "cache" / "blocks").iterdir()) <= 40_000
    proxy.fault = lambda number, method, path: "busy" if number % 3 == 0 else None
    for index in range(len(data)):
        assert all(map(torch.equal, data[index], again[index]))
    assert proxy.counts["GET busy"]


def test_blocks_that_were_copied_ahead_are_not_requested_again(tmp_path: Path, bucket: Bucket, proxy: Proxy) -> None:
    save_vectors(tmp_path / "root", SIZES)
    data = opened(upload(bucket, tmp_path / "root"), tmp_path / "cache", bucket, proxy.port)
    data.copy_ahead([0, 5, 16, 5])
    assert data.remote and data.remote._ahead
    process, blocks = data.remote._ahead, tmp_path / "cache" / "blocks"
    wait_until(lambda: len(list(blocks.glob("[!.]*"))) == 3)
    assert proxy.counts["GET None"] == len(SIZES) + 1 + 3  # the shards to index them, the list, and three blocks
    for index in (0, 4, 5, 15, 16):
        assert len(data[index]) == 2
    assert proxy.counts["GET None"] == len(SIZES) + 1 + 3
    proxy.fault = lambda number, method, path: "denied"
    data.copy_ahead([17])  # ignores the failure, which reading reports
    wait_until(lambda: proxy.counts["GET denied"])
    with pytest.raises(ValueError, match="AccessDenied"):
        data[17]
    assert process.poll() is None
    del data
    assert process.poll() is not None


def test_row_groups_of_parquet_are_copied(tmp_path: Path, bucket: Bucket, proxy: Proxy) -> None:
    for name in ("a", "b"):
        columns = {"x": [[number / 7] * 8 for number in range(10)], "y": [number % 4 for number in range(10)]}
        save_parquet(tmp_path / "root" / f"{name}.parquet", columns, 4)
    address, columns = upload(bucket, tmp_path / "root"), {"input": "x", "target": "y"}
    local = Shards("train", root=str(tmp_path / "root"), cache_dir=str(tmp_path / "local"), **columns)
    data = opened(address, tmp_path / "cache", bucket, proxy.port, **columns)
    data.copy_ahead([10, 14])
    wait_until(lambda: len(list((tmp_path / "cache" / "blocks").glob("[!.]*"))) == 3)  # and that of the first sample
    before = proxy.counts["GET None"]
    for index in (*range(4), *range(10, 18)):
        assert all(map(torch.equal, data[index], local[index]))
    assert proxy.counts["GET None"] == before == 1 + 2 + 3 * 2  # the list, the shards, and each group with its metadata
    for index in range(4, 10):
        assert all(map(torch.equal, data[index], local[index]))


def test_a_damaged_copy_is_replaced_once(tmp_path: Path, bucket: Bucket, proxy: Proxy) -> None:
    save_vectors(tmp_path / "root", SIZES[:1])
    data = opened(upload(bucket, tmp_path / "root"), tmp_path / "cache", bucket, proxy.port)
    expected = data[3]
    (block,) = (tmp_path / "cache" / "blocks").iterdir()
    content = block.read_bytes()
    for damaged in (content[:-3000], bytes(len(content))):
        block.write_bytes(damaged)
        assert all(map(torch.equal, data[3], expected)) and block.read_bytes() == content
    table = data.index.table.copy()
    table[3, CRC] += 1
    data.index = replace(data.index, table=table)
    before = proxy.counts["GET None"]
    with pytest.raises(ValueError, match=r"part-000\.tar, sample 3 has changed since it was indexed"):
        data[3]
    assert proxy.counts["GET None"] == before + 1


def test_a_failure_is_one_message(
    tmp_path: Path, bucket: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_vectors(tmp_path / "root", SIZES)
    address = upload(bucket, tmp_path / "root")
    with pytest.raises(ValueError, match=r"root=s3://no-such-bucket cannot be read: .*NoSuchBucket"):
        opened("s3://no-such-bucket", tmp_path / "cache", bucket)
    with pytest.raises(ValueError, match=r"root=.*/nothing: the address has no shards"):
        opened(f"s3://{bucket.name}/nothing", tmp_path / "cache", bucket)
    with pytest.raises(ValueError, match=r"cache_gb=1e-05 must be at least .* the blocks of two windows"):
        opened(address, tmp_path / "cache", bucket, cache_gb=1e-5)
    proxy.fault = lambda number, method, path: "denied"
    with pytest.raises(ValueError, match=r"root=.* cannot be read: .*AccessDenied"):
        opened(address, tmp_path / "cache", bucket, proxy.port)
    save_vectors(tmp_path / "root", [SIZES[0] - 2, *SIZES[1:]])
    upload(bucket, tmp_path / "root")
    with pytest.raises(ValueError, match=r"part-000\.tar"):
        opened(address, tmp_path / "cache", bucket)
    remove_variables(monkeypatch)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with pytest.raises(ValueError, match=r"root=.* cannot be read: there are no credentials; set them in the envir"):
        opened(address, tmp_path / "cache", bucket, proxy.port)


@pytest.mark.parametrize("workers", [2, pytest.param(0, marks=THOROUGH)])
def test_steps_are_those_of_local_shards(tmp_path: Path, bucket: Bucket, workers: int) -> None:
    save_vectors(tmp_path / "root" / "train", SIZES)
    save_vectors(tmp_path / "root" / "val", SIZES[:3])
    sizes = ["data.sample_shape=[8]", "data.num_outputs=4", "data.window=3", f"data.cache_dir={tmp_path / 'cache'}"]
    model = ["model=mlp", "model.hidden=[6]", "batch_size=7", "data=shards", *sizes]
    common = [*model, *COMMON, "max_steps=12", "log_every=1"]
    local = run(tmp_path / "local", 1, *common, f"data.root={tmp_path / 'root'}", "parallel=none")
    options = f'data.remote_options={{endpoint:"http://127.0.0.1:{bucket.port}",allow_http:true}}'
    address = upload(bucket, tmp_path / "root")
    others = [f"data.root={address}", options, f"loader.num_workers={workers}", "parallel=ddp"]
    remote = run(tmp_path / "remote", 2, *common, *others)
    assert remote.losses == pytest.approx(local.losses, rel=1e-9)
    assert remote.values("val/loss") == pytest.approx(local.values("val/loss"), rel=1e-9)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, 2), (1, 0)),
        pytest.param((1, 2), (3, 0), marks=THOROUGH),
        pytest.param((3, 2), (2, 0), marks=THOROUGH),
        pytest.param((1, 0), (2, 2), marks=THOROUGH),
        pytest.param((2, 0), (3, 2), marks=THOROUGH),
        pytest.param((3, 0), (1, 2), marks=THOROUGH),
    ],
)
def test_ranks_workers_and_a_resume_on_another_machine_do_not_change_the_samples(
    tmp_path: Path, bucket: Bucket, first: tuple[int, int], second: tuple[int, int]
) -> None:
    save_vectors(tmp_path / "root", SIZES)
    address = upload(bucket, tmp_path / "root")
    options = [f'data.remote_options={{endpoint:"http://127.0.0.1:{bucket.port}",allow_http:true}}', "data.window=3"]
    data = ["data=shards", "data.sample_shape=[8]", "data.num_outputs=4", *options, "val_fraction=0.2"]
    model = ["model=mlp", "model.hidden=[6]", "batch_size=7", "+callbacks.log._target_=sample_log.SampleLog"]
    common = [*data, *model, *COMMON, "epochs=3", "max_steps=16", "log_every=1"]
    whole = run(tmp_path / "whole", 1, *common, f"data.root={tmp_path / 'root'}")

    def resumed(machine: str, counts: tuple[int, int], *others: str) -> Run:
        mode = "parallel=ddp" if counts[0] > 1 else "parallel=none"
        cache = f"data.cache_dir={tmp_path / machine}"
        return run(tmp_path / "part", counts[0], *others, mode, cache, f"loader.num_workers={counts[1]}")

    part = resumed("one", first, *common, f"data.root={address}", "max_steps=9")
    found = resumed("two", second, f"resume={part.path}", "max_steps=16")
    assert samples_of(found) == samples_of(whole) and len(samples_of(found)) == 16
    assert found.losses == pytest.approx(whole.losses, rel=1e-9)


def test_a_secret_among_the_options_is_refused() -> None:
    message = r"options\.secret_access_key must not be in the configuration, .* AWS_SECRET_ACCESS_KEY"
    for key in ("data.remote_", "remote."):
        with pytest.raises(InputError, match=f"^{key}{message}"):
            configure("data=shards", "data.root=s3://bucket/x", f"{key}options={{secret_access_key:x}}")


def test_options_of_the_client_are_those_of_the_runner() -> None:
    assert requests.CLIENT == CLIENT_OPTIONS
