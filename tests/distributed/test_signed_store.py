"""Values that another user writes into the ranks' store."""

import json
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
import worlds
from ranks import run_ranks

from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.rendezvous import join, serve_store
from runner.distributed.signed_store import SignedStore, below, ignored, publish_secret, read_secret, report_ignored
from runner.jobs.job import run_job

NOBODY = 65534
FORGED = {
    "secret0": f"{os.getpid()}/0",
    "runner/attempt0/stopped": "forged",
    "runner/attempt0/job0/failure": json.dumps(["forged", []]),
}


def as_another_user(act: Callable[[], None]) -> None:
    """Call `act` in a process of another user, or of this user unless this is root, and wait for it."""

    def call() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        act()

    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    process.join(300)
    assert process.exitcode == 0


@pytest.mark.fault("a forged value in the ranks' store", outcome="survived")
def test_forged_values_do_not_change_a_run(tmp_path: Path) -> None:
    overrides = ("model=toy", "data=toy", "parallel=ddp", "max_steps=2", "logger=none")
    expected = worlds.run(tmp_path / "expected", 2, *overrides).result["weights_sha256"]
    config, request = worlds.configure(*overrides, "threads=1", f"outputs={tmp_path / 'outputs'}")
    store = serve_store("127.0.0.1", 0, loopback=True, timeout_s=300)  # as an agent does

    def connect() -> dist.Store:
        return dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False)

    def forge() -> None:
        for key, value in FORGED.items():
            connect().set(key, value)

    def read() -> None:
        pid, file = connect().get("secret0").decode().split("/")
        if os.geteuid() == NOBODY:
            with pytest.raises(PermissionError):
                os.open(f"/proc/{pid}/fd/{file}", os.O_RDONLY)

    def act(rank: int, world_size: int) -> set[str]:
        where = {"master_addr": "127.0.0.1", "master_port": store.port}
        rank_info = RankInfo(rank, rank, world_size, world_size, source="test", **where)  # type: ignore[arg-type]
        world = join(rank_info, as_backend(config.backend))
        run_job(config, request, world)
        assert world.store.job is not None and not world.store.job.check(["failure"]) and not world.store.stop_reason()
        if rank == 1:
            as_another_user(read)
        world.consensus.first_error("read", [])  # rank 0 must not exit before
        world.shutdown.close()
        return set(ignored)

    as_another_user(forge)
    ignored_keys = set().union(*run_ranks(act, 2, forms_group=False))
    finished = worlds.only_run(tmp_path)
    assert finished.result["weights_sha256"] == expected
    assert ignored_keys == FORGED.keys() - {"secret0"}
    assert "unsigned values of" in (finished.path / "log.txt").read_text()


@pytest.mark.fault("a forged value in the ranks' store", outcome="survived")
def test_values_with_another_signature_count_as_missing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.distributed.signed_store.ignored", {})
    raw = dist.HashStore()
    store, earlier = (SignedStore("run", raw, secret) for secret in (b"secret", b"that of an earlier run"))
    job = below("job0", store)
    job.set("key", "value")
    assert job.check(["key"]) and job.get("key") == b"value"
    below("job1", store).set("key", "of another job")
    earlier.set("replayed", "of an earlier run")
    forged = {
        "run/job0/unsigned": b"value",
        "run/job0/empty": b"",
        "run/job0/copied": raw.get("run/job0/key"),
        "run/job0/key": raw.get("run/job1/key"),
    }
    for key, value in forged.items():
        raw.set(key, value)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        assert not store.check(["replayed"])
        assert not any(job.check([key]) for key in ("unsigned", "empty", "copied", "key", "key"))
    raw.set("run/job0/unsigned", "another value")
    assert not job.check(["unsigned"])
    report_ignored()
    report_ignored()
    assert caplog.text.count("ignored 6 unsigned values of 5 keys in the ranks' store") == 1
    assert caplog.text.count("another user may have set it") == 5 and caplog.text.count("run/job0/key") == 1
    assert job.compare_set("key", "", "first") == b"first" == job.compare_set("key", "", "second")
    writer = threading.Timer(0.1, lambda: job.set("unsigned", "signed"))
    writer.start()
    assert job.multi_get(["key", "unsigned"]) == [b"first", b"signed"]
    writer.join()


def test_a_forged_address_of_the_secret_is_ignored() -> None:
    store = serve_store("127.0.0.1", 0, loopback=True, timeout_s=60)
    assert read_secret(store, "secret0") is None
    for key in ("secret0", "secret1"):
        publish_secret(store, key)
    address, of_another_world = (store.get(key).decode() for key in ("secret0", "secret1"))
    secret = read_secret(store, "secret0")
    assert secret is not None and len(secret) == 32
    pid, file = address.split("/")
    for forged in (of_another_world, f"{pid}/0", f"{address}/0", f"1/{file}", "", "x/y", f"../{address}"):
        store.set("secret0", forged)
        assert read_secret(store, "secret0") is None, forged
    for published in (address, of_another_world):
        os.close(int(published.split("/")[1]))
