"""Tests of sweeps, and of tasks that launch jobs, whose results are mirrored to an S3 server on loopback."""

import os
import signal
from pathlib import Path

import pytest
from commands import Commands
from object_stores import Bucket, wait_until
from worlds import run

from runner.checkpoints.pull import pull
from runner.records.ledger import LEDGER, read_ledger
from runner.remote.address import Address
from runner.remote.object_lock import LOCK
from runner.remote.store import ObjectStore

SMALL = ("model=toy", "data=toy", "logger=none", "epochs=2")


def names(bucket: Bucket) -> list[str]:
    return [each.path for each in ObjectStore(Address.parse(f"s3://{bucket.name}/runs"), bucket.options()).list()]


@pytest.mark.fault("SIGKILL of a sweep whose ledger is in an object store", outcome="survived")
def test_a_killed_sweep_is_resumed_on_another_machine(commands: Commands, bucket: Bucket, tmp_path: Path) -> None:
    outputs, _, options = bucket.overrides(tmp_path)
    process = commands.fork("-m", *SMALL, "seed=1,2,3", outputs, options, f"remote.local_dir={tmp_path / 'first'}")

    def has_finished_job() -> bool:
        return any('"finished"' in path.read_text() for path in tmp_path.glob(f"first/**/{LEDGER}"))

    wait_until(lambda: has_finished_job() or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not any(name.endswith(LOCK) for name in names(bucket)))  # the rest is uploaded
    (path,) = {name.rpartition("/")[0] for name in names(bucket) if name.endswith(LEDGER)}
    address = f"s3://{bucket.name}/runs/{path}"
    # The options of the store are needed to find the sweep.
    done = commands.forked("-m", f"resume={address}", options, f"remote.local_dir={tmp_path / 'second'}")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "3 of 3 jobs finished" in done.stdout
    jobs = read_ledger(pull(address, "run", (), bucket.options(), directory=tmp_path / "copy"))
    assert [job.state for job in jobs] == ["finished"] * 3
    assert jobs[0].num_starts == 1
    whole = run(tmp_path, 1, *SMALL, "seed=3")
    assert jobs[2].run is not None and jobs[2].run.weights_sha256 == whole.result["weights_sha256"]


SBATCH = """#!/bin/sh
while [ ! -e {go} ]; do sleep 0.05; done
echo "sbatch: error: invalid account" >&2
exit 1
"""


def test_a_sweep_that_is_refused_is_deleted_at_its_address(commands: Commands, bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(SBATCH.format(go=tmp_path / "go"))
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    overrides = bucket.overrides(tmp_path / "local")
    process = commands.fork(
        "-m", *SMALL, "seed=1,2", "launcher=slurm", "launcher.nproc_per_node=1", *overrides, env={"PATH": path}
    )
    wait_until(lambda: any(name.endswith(LEDGER) for name in names(bucket)) or process.poll() is not None)
    (tmp_path / "go").touch()
    done = commands.finish(process)
    assert done.returncode == 2 and "invalid account" in done.stderr, (done.stdout, done.stderr)
    assert names(bucket) == [] and not [*tmp_path.glob(f"local/**/{LEDGER}")]


def test_the_table_of_a_comparison_is_uploaded(commands: Commands, bucket: Bucket, tmp_path: Path) -> None:
    overrides = bucket.overrides(tmp_path / "local")
    words = ("task=compare", "compare.modes=[none]", "compare.world_sizes=[1]", "model=toy", "data=toy")
    done = commands.forked(*words, *overrides)
    assert done.returncode == 0, (done.stdout, done.stderr)
    found = {name.split("/", 2)[2] for name in names(bucket)}
    assert {"compare.csv", "compare.md", "result.json", "log.txt"} <= found, found
    assert not any(name.endswith(LOCK) for name in found)
