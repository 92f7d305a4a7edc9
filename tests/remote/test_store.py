"""Tests of addresses and of the object store, against an S3 server on loopback and a directory."""

import multiprocessing
from pathlib import Path

import pytest
from object_stores import Bucket, Proxy, remove_variables
from worlds import run

from runner.errors import InputError
from runner.remote.address import Address, is_remote, local_outputs
from runner.remote.store import ObjectStore, Stale, StoreError, secret_options


def store_of(bucket: Bucket, proxy: Proxy | None = None, name: str | None = None, prefix: str = "runs") -> ObjectStore:
    address = Address.parse(f"s3://{name or bucket.name}/{prefix}")
    return ObjectStore(address, bucket.options(proxy.port if proxy else None))


def test_addresses() -> None:
    address = Address.parse("s3://bucket//some/prefix/")
    assert str(address) == "s3://bucket/some/prefix"
    assert (address.store, str(address / "run" / "/step_1/")) == ("s3://bucket", "s3://bucket/some/prefix/run/step_1")
    assert address.local_directory("/cache") == Path("/cache/s3/bucket/some/prefix")
    assert str(Address.parse("s3://bucket")) == "s3://bucket"
    assert str(Address.parse("file:///some/directory") / "run") == "file:///some/directory/run"
    assert local_outputs("file:///some/directory", "/cache") == Path("/cache/file/some/directory")
    assert local_outputs("some/directory", "/cache") == Path.cwd() / "some/directory"
    assert not is_remote("outputs") and not is_remote("http://bucket/prefix") and not is_remote(None)


@pytest.mark.parametrize("text", ["s3://", "s3:///prefix", "file://directory", "s3://bucket/../other"])
def test_a_wrong_address_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"outputs=.* must be an address"):
        Address.parse(text)


@pytest.mark.parametrize("kind", ["s3", "gs", "file"])
def test_objects(kind: str, bucket: Bucket, google_bucket: str, tmp_path: Path) -> None:
    if kind == "s3":
        store = store_of(bucket)
    else:
        address = f"{google_bucket}/runs" if kind == "gs" else f"file://{tmp_path}/some files"
        store = ObjectStore(Address.parse(address), {"allow_http": True})
    store.check_writable()
    assert store.list() == []
    store.put("a/one", b"1")
    (tmp_path / "file").write_bytes(b"x" * (12 * 2**20))  # in several parts
    store.put("a/two", tmp_path / "file")
    assert [(each.path, each.size) for each in store.list("a")] == [("a/one", 1), ("a/two", 12 * 2**20)]
    assert store.list("other") == []
    assert store.get("a/one") == b"1" and store.get("a/none") is None
    assert store.get_range("a/two", 5, 3) == b"xxx"
    store.download("a/two", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()
    with pytest.raises(FileNotFoundError):
        store.download("a/none", tmp_path / "none")
    assert store.create("lock", b"first") and store.create("lock", b"first")  # the second is a repeated request
    assert not store.create("lock", b"second")
    e_tag = store.find("lock")
    assert e_tag is not None
    new = store.replace("lock", b"third", e_tag)
    assert new == store.find("lock")
    with pytest.raises(Stale):
        store.replace("lock", b"fourth", e_tag)
    assert store.replace("lock", b"third", e_tag) == new  # a repeated request
    store.delete(["lock", "none", "a/one", "a/two"])
    assert store.list() == [] and store.find("lock") is None
    with pytest.raises(Stale):
        store.replace("lock", b"fifth", new)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no bucket", "the bucket does not exist; create it, or name another one"),
        ("no credentials", "there are no credentials; set them in AWS_"),
        ("denied", "the credentials have no permission for it; grant reading, writing, listing and deleting"),
        ("no deletion", "the credentials have no permission for it"),
        ("unconditional", "the store ignores conditional writes"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused(
    fault: str, message: str, bucket: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "denied":
        proxy.fault = lambda number, method, path: "denied"
    elif fault == "no deletion":
        proxy.fault = lambda number, method, path: "denied" if method == "DELETE" or "delete" in path else None
    elif fault == "unconditional":
        proxy.fault = lambda number, method, path: "unconditional"
    store = store_of(bucket, proxy, name="no-such-bucket" if fault == "no bucket" else None)
    if fault == "no credentials":
        remove_variables(monkeypatch)
        address = Address.parse(f"s3://{bucket.name}/runs")
        store = ObjectStore(address, {**bucket.options(), "region": "us-east-1"})
    with pytest.raises(InputError) as raised:
        store.check_writable()
    (line,) = str(raised.value).splitlines()
    assert line.startswith(f"outputs=s3://{store.address.bucket}/runs: {message}")


def test_a_wrong_option_is_refused(bucket: Bucket) -> None:
    with pytest.raises(InputError, match=r"^outputs=s3://bucket: .*'regoin'.*; correct remote.options"):
        ObjectStore(Address.parse("s3://bucket"), {"regoin": "x"})
    assert "AWS_SECRET_ACCESS_KEY" in secret_options({"aws_secret_access_key": "x"}, "s3")[0]
    assert "AZURE_STORAGE_ACCOUNT_KEY" in secret_options({"account_key": "x"}, "az")[0]
    assert not secret_options({"endpoint": "x", "allow_http": True, "region": "y", "access_key_id": "z"}, "s3")


@pytest.mark.parametrize("fault", ["busy", "cut", "cut body"])
def test_every_third_request_fails(fault: str, bucket: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    proxy.fault = lambda number, method, path: fault if number % 3 == 0 else None
    store = store_of(bucket, proxy)
    (tmp_path / "file").write_bytes(bytes(range(256)) * 2**15 + b"end")
    for name in ("a", "b", "c"):
        assert store.create(f"lock-{name}", name.encode())
    store.put("file", tmp_path / "file")
    store.download("file", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()
    assert sum(count for name, count in proxy.counts.items() if name.endswith(fault)) >= 2


def test_an_upload_whose_last_response_is_lost_is_repeated(bucket: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    lost: list[str] = []

    def lose(number: int, method: str, path: str) -> str | None:
        if method != "POST" or "uploadId" not in path or lost:
            return None
        lost.append(path)
        return "cut body"

    proxy.fault = lose
    (tmp_path / "file").write_bytes(b"x" * (12 * 2**20))
    store = store_of(bucket, proxy)
    store.put("file", tmp_path / "file")
    assert lost and store.num_retries == 1
    assert [(each.path, each.size) for each in store.list()] == [("file", 12 * 2**20)]


def test_a_forked_process_cannot_use_a_store(bucket: Bucket, tmp_path: Path) -> None:
    store = store_of(bucket)
    store.list()

    def use() -> None:
        for each in (store, store_of(bucket)):
            with pytest.raises(StoreError, match="forked after its parent had used an object store cannot use one"):
                each.list()

    forked = multiprocessing.get_context("fork").Process(target=use)
    forked.start()
    forked.join(60)
    forked.kill()  # obstore itself waits forever
    forked.join()
    assert forked.exitcode == 0


def test_a_server_that_cannot_be_reached(bucket: Bucket) -> None:
    store = ObjectStore(Address.parse("s3://bucket/runs"), bucket.options(port=1))
    with pytest.raises(StoreError, match=r"^outputs=s3://bucket/runs: .*error sending request") as raised:
        store.get("a")
    assert not raised.value.is_permanent


def test_a_run_in_googles_store_is_resumed_on_another_machine(google_bucket: str, tmp_path: Path) -> None:
    small = ("model=toy", "data=toy", "logger=none", "checkpoint.every_steps=4", "epochs=3")
    whole = run(tmp_path / "whole", 1, *small)
    outputs = (f"outputs={google_bucket}/runs", "remote.options={allow_http:true}")
    part = run(tmp_path / "work", 1, *small, "max_steps=5", *outputs, f"remote.local_dir={tmp_path / 'one'}")
    local = f"remote.local_dir={tmp_path / 'two'}"
    resumed = run(tmp_path / "work", 1, "resume=last", "max_steps=null", *outputs, local)
    assert resumed.path == tmp_path / "two" / part.path.relative_to(tmp_path / "one")
    assert resumed.result["weights_sha256"] == whole.result["weights_sha256"]
