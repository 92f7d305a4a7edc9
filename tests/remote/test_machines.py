"""Tests of runs on several machines without a shared file system, whose mirrors upload to an S3 server on loopback."""

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import Popen

import pytest
from commands import Commands, free_port
from custom_files import SLOW, SLOWLY, write_files
from object_stores import Bucket, wait_until
from one_machine import separate_machines
from worlds import Run, run

from runner.checkpoints.layout import list_checkpoints, verify
from runner.checkpoints.part_mirror import WANTED
from runner.checkpoints.pull import pull
from runner.remote.address import Address
from runner.remote.object_lock import LOCK
from runner.remote.store import ObjectStore

# Each rank writes a file of a checkpoint.
SMALL = ("model=mlp", "model.hidden=[8]", "data=toy", "logger=none", "checkpoint.every_steps=4", "max_steps=60")
SPLIT = ("parallel=fsdp", "backend=gloo", "threads=1")


def start(commands: Commands, *arguments: str, local_dirs: Sequence[Path]) -> list[Popen[str]]:
    """Start a world of two ranks, each on a machine of its own, with its copies of runs in a directory."""
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    world["MASTER_PORT"] = str(free_port())
    return [
        commands.fork(
            *arguments,
            f"remote.local_dir={local_dir}",
            env={**world, "RANK": str(rank)},
            prepare=lambda: separate_machines(pytest.MonkeyPatch()),
        )
        for rank, local_dir in enumerate(local_dirs)
    ]


def store_of(bucket: Bucket) -> ObjectStore:
    return ObjectStore(Address.parse(f"s3://{bucket.name}/runs/run"), bucket.options())


def names(store: ObjectStore) -> list[str]:
    return [each.path for each in store.list()]


def run_id(store: ObjectStore) -> str:
    (found,) = {name.split("/")[0] for name in names(store)}
    return found


def copy_of(bucket: Bucket, folder: Path) -> Run:
    address = f"s3://{bucket.name}/runs/run/{run_id(store_of(bucket))}"
    return Run(pull(address, "run", ("all",), bucket.options(), directory=folder))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("whole"), 2, *SMALL, *SPLIT)


@pytest.mark.leaves_tmp
@pytest.mark.fault("SIGKILL of machines without a shared file system", outcome="survived")
@pytest.mark.parametrize(
    "where",
    ["others", pytest.param("same", marks=pytest.mark.thorough), pytest.param("shared", marks=pytest.mark.thorough)],
)
def test_killed_machines_without_shared_files_resume(
    where: str, whole: Run, commands: Commands, bucket: Bucket, tmp_path: Path
) -> None:
    write_files(tmp_path, SLOW)
    outputs, _, options = bucket.overrides(tmp_path)
    first = [tmp_path / "first"] * 2 if where == "shared" else [tmp_path / "first-0", tmp_path / "first-1"]
    ranks = start(commands, *SMALL, *SPLIT, *SLOWLY, outputs, options, local_dirs=first)
    store = store_of(bucket)
    wait_until(lambda: "manifest.json" in str(store.list()) or any(rank.poll() is not None for rank in ranks))
    killed = [pid for rank in ranks for pid in commands.living(rank)]  # also the mirrors
    for pid in killed:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    outs = [rank.communicate()[0][-2000:] for rank in ranks]
    assert len(killed) == 4, "\n".join(outs)
    assert bool([*first[1].rglob("manifest.json")]) == (where == "shared")
    (tmp_path / "has-acted").touch()
    second = [tmp_path / "second-0", tmp_path / "second-1"] if where == "others" else first
    address = f"s3://{bucket.name}/runs/run/{run_id(store)}"
    ranks = start(commands, f"resume={address}", options, local_dirs=second)
    for done in [commands.finish(rank, timeout_s=120) for rank in ranks]:
        assert done.returncode == 0, (done.stdout, done.stderr)
    resumed = copy_of(bucket, tmp_path / "copy")
    assert resumed.result["weights_sha256"] == whole.result["weights_sha256"]
    assert resumed.losses == whole.losses
    assert not {LOCK, WANTED} & {name.split("/")[-1] for name in names(store)}
    assert not [*second[1].rglob("step_*.tmp/*")]  # the other machine keeps only what it has resumed from
    for checkpoint in list_checkpoints(resumed.path / "checkpoints"):
        verify(checkpoint)
