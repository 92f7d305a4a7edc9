"""Tests of runs that are mirrored to an S3 server on loopback."""

import json
import os
import random
import re
import shutil
import signal
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from subprocess import Popen

import pytest
from commands import Commands, ranks_of
from custom_files import SLOW, SLOWLY, write_files
from object_stores import Bucket, Proxy, wait_until
from ranks import RankError
from worlds import Run, run

from runner.checkpoints.layout import list_checkpoints, verify
from runner.errors import InputError
from runner.remote.address import Address
from runner.remote.object_lock import LOCK
from runner.remote.store import ObjectStore

SMALL = ("model=toy", "data=toy", "logger=none", "checkpoint.keep=2", "checkpoint.every_steps=4")


@cache  # each store keeps connections open
def open_store(name: str, prefix: str, port: int) -> ObjectStore:
    return ObjectStore(Address.parse(f"s3://{name}/{prefix}"), Bucket(port, name).options())


def store_of(bucket: Bucket, prefix: str = "runs/run") -> ObjectStore:
    return open_store(bucket.name, prefix, bucket.port)


def store_of_run(bucket: Bucket, path: Path) -> ObjectStore:
    return store_of(bucket, f"runs/run/{path.name}")


def objects(bucket: Bucket, path: Path) -> dict[str, int]:
    """Return the sizes of the objects of a run by their paths."""
    return {each.path: each.size for each in store_of_run(bucket, path).list()}


def local_files(path: Path) -> dict[str, int]:
    return {
        file.relative_to(path).as_posix(): file.stat().st_size
        for file in path.rglob("*")
        if file.is_file() and not any(each.is_symlink() for each in (file, *file.parents))
    }


def download(bucket: Bucket, name: str, directory: Path) -> Path:
    """Download all objects of a run, as another machine does before it resumes the run."""
    store = store_of(bucket, f"runs/run/{name}")
    shutil.rmtree(directory, ignore_errors=True)
    complete = {each.path.rpartition("/")[0] for each in store.list() if each.path.endswith("manifest.json")}
    for each in store.list():
        folder = each.path.rpartition("/")[0]
        if each.path != LOCK and (not folder.startswith("checkpoints") or folder in complete):
            (directory / folder).mkdir(parents=True, exist_ok=True)
            store.download(each.path, directory / each.path)
    return directory


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_is_mirrored_completely(world_size: int, bucket: Bucket, tmp_path: Path) -> None:
    parallel = ("parallel=ddp",) if world_size > 1 else ()
    done = run(tmp_path / "work", world_size, *SMALL, "epochs=3", *parallel, *bucket.overrides(tmp_path / "local"))
    assert done.path.parent == tmp_path / "local" / "s3" / bucket.name / "runs" / "run"
    assert objects(bucket, done.path) == local_files(done.path)  # without a lock, and without removed checkpoints
    copy = download(bucket, done.path.name, tmp_path / "copy")
    for checkpoint in list_checkpoints(copy / "checkpoints"):
        verify(checkpoint)
    assert len(list_checkpoints(copy / "checkpoints")) in (2, 3)
    assert all(each.path.startswith("runs/run/") for each in store_of(bucket, "").list())  # the probe is deleted


def start(commands: Commands, overrides: list[str], *others: str) -> Popen[str]:
    return commands.fork(*SMALL, *overrides, *others)


def lock_facts(bucket: Bucket, path: Path) -> dict[str, object]:
    return json.loads(store_of_run(bucket, path).get(LOCK) or b"{}")


def run_directory(local: Path, bucket: Bucket) -> Path | None:
    found = [*(local / "s3" / bucket.name / "runs" / "run").glob("*/overrides.yaml")]
    return found[0].parent if found else None


def crash(process: Popen[str], local: Path, bucket: Bucket, random_: random.Random) -> Path:
    """Kill a run, and often the process that uploads it, after a checkpoint is remote. Return the run directory."""
    wait_until(lambda: process.poll() is not None or run_directory(local, bucket))
    directory = run_directory(local, bucket)
    assert directory is not None
    store = store_of_run(bucket, directory)
    wait_until(lambda: process.poll() is not None or "manifest" in str(store.list("checkpoints")))
    time.sleep(random_.uniform(0, 0.4))
    pid = lock_facts(bucket, directory).get("pid")
    process.kill()
    process.communicate()
    if random_.random() < 0.7 and isinstance(pid, int):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # the machine has crashed
    wait_until(lambda: not is_running(pid))  # it has uploaded the rest
    return directory


def kill_and_resume(commands: Commands, bucket: Bucket, proxy: Proxy, folder: Path, seed: int) -> Run:
    """Kill a run at random moments, and resume it from the bucket in an empty directory each time."""
    random_ = random.Random(seed)

    def delay(number: int, method: str, path: str) -> None:
        time.sleep(random_.uniform(0, 0.05))  # so that kills interrupt uploads

    proxy.fault = delay
    local = folder / "local-0"
    process = commands.fork(*SMALL, "epochs=12", *bucket.overrides(local, port=proxy.port), "seed=3")
    for number in range(1, 4):
        name = crash(process, local, bucket, random_).name
        local = folder / f"local-{number}"
        copy = download(bucket, name, local / "s3" / bucket.name / "runs" / "run" / name)
        assert list_checkpoints(copy / "checkpoints")
        process = commands.fork(f"resume={copy}", f"remote.local_dir={local}")
    out = commands.finish(process, timeout_s=60)
    assert out.returncode == 0, out.stderr
    return Run(download(bucket, name, folder / "final"))


def is_running(pid: object) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.leaves_tmp
@pytest.mark.fault("SIGKILL of the run and of the process that uploads it", outcome="survived")
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 20))])
def test_a_killed_run_is_resumed_on_another_machine(
    seed: int, commands: Commands, bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    whole = run(tmp_path, 1, *SMALL, "epochs=12", "seed=3")
    resumed = kill_and_resume(commands, bucket, proxy, tmp_path, seed)
    assert resumed.result["weights_sha256"] == whole.result["weights_sha256"]
    assert resumed.losses == whole.losses


FAULTS = ["busy", "cut", "cut body", "slow", "off"]


@pytest.mark.fault("an object store that fails, or is slow", outcome="went_on")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_that_fails_for_a_while(
    fault: str, bucket: Bucket, proxy: Proxy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    since: list[float] = []

    def inject(number: int, method: str, path: str) -> str | None:
        if fault == "slow":
            time.sleep(0.1)
            return None
        if fault == "off":
            since.append(time.monotonic())
            return "cut" if number > 15 and time.monotonic() - since[15] < 3 else None
        return fault if number % 3 == 0 else None

    proxy.fault = inject
    done = run(tmp_path / "work", 1, *SMALL, "epochs=3", *bucket.overrides(tmp_path / "local", port=proxy.port))
    assert objects(bucket, done.path) == local_files(done.path)
    assert fault == "slow" or sum(n for name, n in proxy.counts.items() if not name.endswith("None")) >= 2
    assert ("repeated" in capfd.readouterr().out) == (fault != "slow")
    # With the other faults, all repetitions may follow the last step.
    assert fault not in ("busy", "slow") or bool(done.result["upload_retries"]) == (fault == "busy")


@pytest.mark.fault("failure of the store while a checkpoint is deleted", outcome="survived")
def test_a_removed_checkpoint_is_deleted_completely_after_an_error(
    bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    deleted: list[str] = []

    def inject(number: int, method: str, path: str) -> str | None:
        if method in ("DELETE", "POST"):
            deleted.append(path)
        elif method == "GET" and "step_" in path and "prefix" in path and len(deleted) > 1 and "cut" not in deleted:
            deleted.append("cut")  # the list of the files of a checkpoint whose manifest is deleted
            return "denied"
        return None

    proxy.fault = inject
    done = run(tmp_path / "work", 1, *SMALL, "epochs=60", *bucket.overrides(tmp_path / "local", port=proxy.port))
    assert "cut" in deleted
    assert objects(bucket, done.path) == local_files(done.path)


def test_files_that_could_not_be_uploaded_are_named_and_uploaded_by_the_next_attempt(
    bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    fails = [True]
    proxy.fault = lambda number, method, path: "denied" if fails[0] and "step_48/rank_0" in path else None
    overrides = bucket.overrides(tmp_path / "local", port=proxy.port)
    with pytest.raises(RankError) as raised:
        run(tmp_path / "work", 1, *SMALL, "epochs=3", *overrides, "remote.patience_s=1")
    assert "could not be uploaded: checkpoints/step_48" in str(raised.value)
    assert "have no permission" in str(raised.value)
    directory = run_directory(tmp_path / "local", bucket)
    assert directory is not None and (directory / "result.json").exists()
    assert not [path for path in objects(bucket, directory) if "step_48/manifest" in path]
    fails[0] = False
    resumed = run(tmp_path / "work", 1, f"resume={directory}", "epochs=4", f"remote.local_dir={tmp_path / 'local'}")
    assert objects(bucket, resumed.path) == local_files(resumed.path)


def test_checkpoints_that_an_earlier_attempt_has_not_deleted_are_deleted(bucket: Bucket, tmp_path: Path) -> None:
    done = run(tmp_path / "work", 1, *SMALL, "epochs=3", *bucket.overrides(tmp_path / "local"))
    store = store_of(bucket, f"runs/run/{done.path.name}")
    for file in (done.path / "checkpoints" / "step_48").iterdir():
        store.put(f"checkpoints/step_4/{file.name}", file)
    resumed = run(tmp_path / "work", 1, f"resume={done.path}", "epochs=4", f"remote.local_dir={tmp_path / 'local'}")
    assert objects(bucket, resumed.path) == local_files(resumed.path)


def test_a_run_fails_when_its_store_fails_for_longer_than_the_patience(
    bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    proxy.fault = lambda number, method, path: "denied" if "step_" in path else None
    overrides = bucket.overrides(tmp_path / "local", port=proxy.port)
    with pytest.raises(RankError, match=r"uploads have failed for 1 s \(remote.patience_s\)"):
        run(tmp_path / "work", 1, *SMALL, *overrides, "remote.patience_s=1", "epochs=100000")


@pytest.mark.fault("two runs that write to one address", outcome="refused")
def test_two_writers(commands: Commands, bucket: Bucket, tmp_path: Path) -> None:
    first = start(commands, bucket.overrides(tmp_path / "local-1"), "run_id=same", "epochs=100000")
    wait_until(lambda: lock_facts(bucket, Path("same")))
    second = commands.finish(start(commands, bucket.overrides(tmp_path / "local-2"), "run_id=same", "epochs=100000"))
    (line,) = second.stderr.splitlines()
    assert line.startswith(f"s3://{bucket.name}/runs/run/same has been locked by process {first.pid} on ")
    first.send_signal(signal.SIGTERM)
    commands.finish(first)
    assert (first.returncode, second.returncode) == (143, 2)
    assert "manifest" in str(objects(bucket, Path("same"))) and LOCK not in objects(bucket, Path("same"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("outputs=s3://no-such-bucket/runs", "outputs=s3://no-such-bucket/runs: the bucket does not exist"),
        ("remote.options={regoin:x}", "outputs=s3://bucket/runs: Configuration key: 'regoin' is not valid"),
        ("remote.options={secret_access_key:x}", "remote.options.secret_access_key must not be in the configuration"),
        ("outputs=s3://", "outputs=s3:// must be an address"),
        ("remote.options=3", "remote.options=3 must be a mapping"),
        ("remote.local_dir=/dev/null/x", "remote.local_dir=/dev/null/x/s3/bucket/runs must be writable"),
    ],
)
def test_outputs_that_cannot_be_used_are_refused(override: str, message: str, bucket: Bucket, tmp_path: Path) -> None:
    given = ["outputs=s3://bucket/runs", *bucket.overrides(tmp_path / "local")[1:]]
    overrides = [each for each in given if each.partition("=")[0] != override.partition("=")[0]]
    with pytest.raises((InputError, RankError), match=re.escape(f"{message}")):
        run(tmp_path, 1, *SMALL, "epochs=3", *overrides, override)
    assert not (tmp_path / "local").exists()


def test_a_store_without_conditional_writes_is_refused(bucket: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    proxy.fault = lambda number, method, path: "unconditional"
    with pytest.raises(RankError, match="ignores conditional writes"):
        run(tmp_path, 1, *SMALL, "epochs=3", *bucket.overrides(tmp_path / "local", port=proxy.port))
    assert store_of(bucket, "runs").list() == [] and not (tmp_path / "local").exists()


def test_a_directory_as_a_store(tmp_path: Path) -> None:
    done = run(
        tmp_path, 1, *SMALL, "epochs=3", f"outputs=file://{tmp_path}/store", f"remote.local_dir={tmp_path / 'local'}"
    )
    assert local_files(tmp_path / "store" / "run" / done.path.name) == local_files(done.path)


@pytest.mark.leaves_tmp
@pytest.mark.fault("kill -9 of rank 0, which mirrors the run, or of another rank", outcome="went_on")
@pytest.mark.parametrize("with_mirror", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_ranks_that_continue_mirror_the_run(
    with_mirror: bool, commands: Commands, bucket: Bucket, tmp_path: Path
) -> None:
    """with_mirror: the process that uploads the run is killed as well."""
    job = (*SMALL, "log_every=1", "max_steps=150", "precision=fp64", "threads=1")
    whole = run(tmp_path / "whole", 1, *job)
    write_files(tmp_path, SLOW)
    elastic = ("elastic_every_steps=1", "launcher=spawn", "launcher.nproc_per_node=2", "launcher.max_restarts=2")
    words = (*job, *SLOWLY, "parallel=ddp", *elastic, *bucket.overrides(tmp_path / "local"))
    process = commands.start("-m", "runner", *words)
    wait_until(lambda: process.poll() is not None or run_directory(tmp_path / "local", bucket))
    directory = run_directory(tmp_path / "local", bucket)
    assert directory is not None, commands.finish(process).stderr

    def wait_for_log(text: str, count: int) -> None:
        wait_until(lambda: process.poll() is not None or (directory / "log.txt").read_text().count(text) == count)

    wait_until(lambda: process.poll() is not None or "manifest" in str(store_of_run(bucket, directory).list()))
    first = lock_facts(bucket, directory)
    os.kill(ranks_of(commands, process)[-1], signal.SIGKILL)
    wait_for_log("2 ranks continued after step", 1)
    assert lock_facts(bucket, directory)["id"] == first["id"]  # of the same process
    for name in ("run_pid", *["pid"] * with_mirror):
        os.kill(int(str(first[name])), signal.SIGKILL)
    wait_for_log("2 ranks continued after step", 2)
    (tmp_path / "has-acted").touch()
    done = commands.finish(process)
    assert done.returncode == 0, done.stderr
    one = Run(directory)
    assert (directory / "log.txt").read_text().count("2 ranks continued after step") == 2
    local = local_files(directory)  # the kill may have interrupted a write
    assert objects(bucket, directory) == {name: local[name] for name in local if not name.endswith(".tmp")}
    assert one.losses == pytest.approx(whole.losses, rel=1e-9)
    for name, weight in whole.weights.items():
        assert (one.weights[name] - weight).abs().max() <= 1e-9 * weight.abs().max(), name
