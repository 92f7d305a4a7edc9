"""Tests of local copies of runs at an address, in an S3 server on loopback."""

import shutil
from pathlib import Path

import pytest
from commands import Commands
from object_stores import Bucket, remove_variables
from worlds import run

from runner.api.run_commands import run_command
from runner.api.runs import open_run
from runner.checkpoints.layout import list_checkpoints
from runner.checkpoints.pull import pull
from runner.errors import InputError
from runner.records.run_record import read_run
from runner.remote.address import Address
from runner.remote.store import ObjectStore

SMALL = ("model=toy", "data=toy", "logger=none", "epochs=2", "checkpoint.every_steps=4", "checkpoint.keep=3")


def store_of(bucket: Bucket) -> ObjectStore:
    return ObjectStore(Address.parse(f"s3://{bucket.name}/runs"), bucket.options())


def upload(bucket: Bucket, run: Path) -> str:
    """Upload all files of a run, and return its address."""
    for path in sorted(path for path in run.rglob("*") if path.is_file() and "/best/" not in f"{path}"):
        if not any(each.is_symlink() for each in path.parents):
            store_of(bucket).put(f"run/{run.name}/{path.relative_to(run)}", path)
    return f"s3://{bucket.name}/runs/run/{run.name}"


@pytest.fixture
def trained(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """Train a run, and upload it. Return its directory and its address."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.options()["endpoint"])
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    path = run(tmp_path / "work", 1, *SMALL).path
    return path, upload(bucket, path)


def names(copy: Path) -> list[str]:
    return [path.name for path in list_checkpoints(copy / "checkpoints")]


def test_only_the_needed_checkpoints_are_downloaded(trained: tuple[Path, str], bucket: Bucket, tmp_path: Path) -> None:
    path, address = trained
    *others, newest = names(path)
    copy = pull(address, "run", ("last",), local_dir=str(tmp_path / "cache"))
    assert copy == tmp_path / "cache" / "s3" / bucket.name / "runs" / "run" / path.name
    assert names(copy) == [newest] and read_run(copy).weights_sha256 == read_run(path).weights_sha256
    # A checkpoint without a manifest does not exist, and a damaged one is replaced by the previous one.
    store = store_of(bucket)
    store.delete([f"run/{path.name}/checkpoints/{newest}/manifest.json"])
    store.put(f"run/{path.name}/checkpoints/{others[-1]}/rank_0.safetensors", b"truncated")
    assert names(pull(address, "run", ("last",), directory=tmp_path / "other")) == [others[-2]]
    with pytest.raises(InputError, match=rf"run={address}: checkpoints/{others[-1]}/rank_0.safetensors is not what"):
        pull(address, "run", (others[-1],), directory=tmp_path / "other")
    # A copy that has come further is kept.
    assert names(pull(address, "run", ("last",), local_dir=str(tmp_path / "cache")))[-1] == newest


def test_the_copy_that_has_come_further_wins(trained: tuple[Path, str], bucket: Bucket, tmp_path: Path) -> None:
    path, address = trained
    *others, newest = names(path)
    copy = pull(address, "run", ("all",), directory=tmp_path / "copy")
    assert names(copy) == names(path)
    (copy / "log.txt").write_text("of this machine")
    pull(address, "run", ("last",), directory=copy)
    assert (copy / "log.txt").read_text() == "of this machine"
    shutil.rmtree(copy / "checkpoints" / newest)  # as if another machine had continued the run
    damaged = copy / "checkpoints" / others[-1] / "rank_0.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    pull(address, "run", ("last", others[-1]), directory=copy)
    assert (copy / "log.txt").read_bytes() == (path / "log.txt").read_bytes()
    assert (copy / ".replaced" / "log.txt").read_text() == "of this machine"
    assert names(copy) == names(path)
    assert damaged.read_bytes() == (path / "checkpoints" / others[-1] / damaged.name).read_bytes()


def test_commands_accept_addresses(
    trained: tuple[Path, str], bucket: Bucket, tmp_path: Path, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    path, address = trained
    outputs = f"outputs=s3://{bucket.name}/runs"
    local = f"remote.local_dir={tmp_path / 'cache'}"
    for arguments in (
        ["task=evaluate", f"run={address}", local],
        [f"resume={address}", local, "epochs=3"],
        [f"fork={address}", local, f"outputs={tmp_path / 'forks'}"],
        ["task=report", f"run={address}", local, f"report.output={tmp_path / 'report.html'}"],
    ):
        done = commands.forked(*arguments)
        assert done.returncode == 0, (arguments, done.stderr)
    kept = {each.path for each in store_of(bucket).list()}
    assert f"run/{path.name}/checkpoints/step_48/manifest.json" in kept  # the resumed run is mirrored
    done = commands.forked("task=evaluate", f"run={address}", local, "checkpoint=step_999")
    assert done.returncode == 2 and f"{address} has no checkpoint step_999" in done.stderr
    assert str(tmp_path / "cache") not in done.stderr
    longer = [each.replace("epochs=2", "epochs=3") for each in SMALL]
    done = commands.forked(f"run_id={path.name}", outputs, f"remote.local_dir={tmp_path / 'third'}", *longer)
    assert done.returncode == 0 and f"run_id={path.name} is finished" in done.stdout, done.stderr
    done = commands.forked("-m", f"fork={address}", "seed=1,2")
    assert done.returncode == 2 and f"type runs pull {address} first" in done.stderr
    done = commands.forked("task=evaluate", "run=last", outputs, local)
    assert done.returncode == 0, done.stderr
    assert run_command(["pull", address, str(tmp_path / "pulled")]) == 0
    # The resumed run keeps three, and has replaced those of the first attempt.
    assert names(tmp_path / "pulled") == ["step_40", "step_44", "step_48"]
    assert not [*tmp_path.glob("**/.*pulling")]
    assert open_run(tmp_path / "pulled").state == "finished"
    with pytest.raises(InputError, match=r"RUN=s3://.*only list, show and pull accept an address"):
        run_command(["delete", address, "--yes"])
    capsys.readouterr()


def test_invalid_addresses(trained: tuple[Path, str], bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    _, address = trained
    with pytest.raises(InputError, match=r"run=s3://.*/none contains no run"):
        pull(f"s3://{bucket.name}/none", "run")
    with pytest.raises(InputError, match=r"run=s3://no-such.*the bucket does not exist"):
        pull("s3://no-such-bucket/runs", "run")
    with pytest.raises(InputError, match=r"remote.options.secret_access_key must not be in the configuration"):
        pull(address, "run", options={"secret_access_key": "x"})
    remove_variables(monkeypatch)
    with pytest.raises(InputError, match=r"run=s3://"):
        pull(address, "run", options=bucket.options())
