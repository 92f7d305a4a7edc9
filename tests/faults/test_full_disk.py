"""A full disk: the run fails, and can be resumed when there is space."""

import functools
import itertools
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from commands import wait_until
from fault_rig import OVERRIDES, all_sound, assert_same, cut
from mode_cases import tier
from ranks import RankError
from worlds import MODES, Run, run

from runner.training.trainer import Trainer

LOGGED = (*OVERRIDES, "log_every=1", "checkpoint.every_epochs=9", "checkpoint.keep=99")
DDP = (*LOGGED, "parallel=ddp")
OFTEN, RARELY = ("checkpoint.every_steps=2",), ("checkpoint.every_steps=20",)
FEW = (*OFTEN, "checkpoint.keep=3", "log_every=5")  # neither fills the disk, and no line is due before a checkpoint
CHECKPOINT = "checkpoint {}/checkpoints/step_"  # the beginning of the error
RANKS = {"none": 1, "dp": 1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Return the uninterrupted run in a mode, with these overrides."""

    @functools.cache
    def of(mode: str, *words: str) -> Run:
        return run(tmp_path_factory.mktemp(mode), RANKS.get(mode, 2), *LOGGED, *words, f"parallel={mode}")

    return of


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Mount a file system of 700 KiB, or with other options, for the runs named `run`."""
    path = tmp_path / "run"
    path.mkdir()
    made = mount("-t", "tmpfs", "-o", getattr(request, "param", "size=700k"), "tmpfs", path)
    if made.returncode:
        pytest.skip(f"no file system can be mounted: {made.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True, timeout=60)


def mount(*args: Any) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(["mount", *args], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(args, 1, "", str(error))


def nothing(trainer: Trainer, batch: Any) -> None:
    pass


def fill(trainer: Trainer, batch: Any) -> None:
    """Fill the disk, as another process would."""
    if trainer.world.rank != 0 or trainer.state.step != 21:
        return
    (directory,) = Path(trainer.config.outputs, trainer.config.name).iterdir()
    newest, oldest = (directory / "checkpoints" / name for name in ("step_20", "step_14"))
    # They are written and removed in the background; a later removal would make room for another checkpoint.
    wait_until(lambda: newest.exists() and not oldest.exists())
    with (directory / "others").open("ab", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError:
                continue


@pytest.mark.fault("a full disk, in every mode", outcome="survived")
@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(
    ("mode", "every", "act", "what"),
    [
        pytest.param("ddp", OFTEN, nothing, CHECKPOINT, id="by its checkpoints", marks=pytest.mark.thorough),
        pytest.param("ddp", RARELY, fill, "{}/metrics.jsonl", id="by others, at a line", marks=pytest.mark.thorough),
        *(
            pytest.param(mode, FEW, fill, CHECKPOINT, id=mode, marks=tier(False, mode in ("none", "ddp", "pipeline")))
            for mode in MODES
        ),
    ],
)
def test_a_full_disk_fails_the_run_which_resumes_when_there_is_space(
    mode: str,
    every: tuple[str, ...],
    act: Callable[[Trainer, Any], None],
    what: str,
    whole: Callable[..., Run],
    disk: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    num_ranks = RANKS.get(mode, 2)
    full = cut(tmp_path, num_ranks, (*LOGGED, *every, f"parallel={mode}"), act)
    reported = "".join(capfd.readouterr())
    assert "Logging error" not in reported and full.result["state"] == "failed"
    _, *lines = reported.partition("error: ")[2].strip().splitlines()
    lines = [line for line in lines if "tensorpipe" not in line]  # the library of parallel=ps logs that a rank exits
    assert lines[0].startswith(what.format(full.path)) and " could not be written: " in lines[0]
    assert len(lines) == 2 and lines[1].endswith("and resume")
    checkpoints = all_sound(full.path / "checkpoints")
    assert checkpoints[-1] == "step_20" if act is fill else len(checkpoints) > 2
    assert not list(full.path.rglob("*.tmp"))
    assert mount("-o", "remount,size=64m", disk).returncode == 0
    assert_same(run(tmp_path, num_ranks, f"resume={full.path}"), whole(mode, *every))


@pytest.mark.thorough
@pytest.mark.fault("no space or no inodes for a new run", outcome="refused")
@pytest.mark.parametrize("disk", ["size=16k", "nr_inodes=6"], indirect=True)
def test_a_run_without_space_for_its_records_is_refused(disk: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"InputError: outputs=.*: cannot create .*No space left on device: '.*/run/"):
        run(tmp_path, 2, *DDP)
    assert not list(disk.iterdir())


@pytest.mark.thorough
@pytest.mark.fault("a full disk", outcome="survived")
def test_a_resume_on_a_full_disk_reports_one_line_and_does_not_stay_running(
    disk: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done = run(tmp_path, 2, *DDP, "epochs=1", "checkpoint.keep=1")
    others = disk / "others"
    others.mkdir()
    with suppress(OSError):
        for number in itertools.count():
            (others / str(number)).write_bytes(bytes(2**12))
    for number in range(4):
        (others / str(number)).unlink()
    capfd.readouterr()
    with pytest.raises(RankError):
        run(tmp_path, 2, f"resume={done.path}", "epochs=2")
    reported = "".join(capfd.readouterr())
    assert "No space left on device" in reported and "Traceback" not in reported
    assert done.result["state"] in ("finished", "failed")  # failed if a step could be made
