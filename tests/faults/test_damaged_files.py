"""Damage to any file of a checkpoint is detected before it is loaded, and the previous checkpoint is used."""

import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_rig import OVERRIDES, assert_same, cut, send
from worlds import Run, run

from runner.checkpoints.layout import choose_checkpoint, list_checkpoints


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train on two ranks, each of which stores a part of the weights."""
    return run(tmp_path_factory.mktemp("made"), 2, *OVERRIDES, "parallel=fsdp", "epochs=2")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train the same run, of which rank 1 is killed in step 24; it has the checkpoints step_15 and step_21."""
    args = (*OVERRIDES, "parallel=fsdp", "epochs=2")
    return cut(tmp_path_factory.mktemp("killed"), 2, args, send(signal.SIGKILL, 1, 24, once_saved=21))


def damages(path: Path, content: bytes, draw: random.Random, num_flips: int) -> list[tuple[str, bytes | None]]:
    """Return kinds of damage to a file, each with its name and the new bytes, or None for a missing file."""
    found: list[tuple[str, bytes | None]] = [("missing", None), ("empty", b"")]
    found += [("truncated", content[:-1]), ("longer", content + b"\0"), ("half", content[: len(content) // 2])]
    for _ in range(num_flips):
        place, bit = draw.randrange(len(content)), draw.randrange(8)
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        found.append((f"bit {bit} of byte {place} flipped", bytes(flipped)))
    start = next((at for at in range(len(content)) if content[at : at + 64].strip(b"\0")), 0)
    found.append(
        (f"64 zeros from {start}", content[:start] + bytes(len(content[start : start + 64])) + content[start + 64 :])
    )
    return found


@pytest.mark.fault("one bit of a checkpoint flipped", outcome="refused")
@pytest.mark.fault("a checkpoint file with zeros, truncated, empty or missing", outcome="refused")
def test_every_damage_is_refused(made: Run, record_property: Callable[[str, object], None]) -> None:
    """All files, also small ones, at seeded positions."""
    newest, draw, tried, believed = list_checkpoints(made.path / "checkpoints")[-1], random.Random(200), 0, []
    files = sorted(path for path in newest.iterdir() if path.is_file())
    for path in files:
        content = path.read_bytes()
        for what, damaged in damages(path, content, draw, -(-200 // len(files))):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            tried += 1
            try:
                choose_checkpoint(newest.parent, newest.name)
                believed.append(f"{path.name}: {what}")
            except ValueError as error:
                assert f"{newest.name}/{path.name}" in str(error) and "damaged" in str(error)
            path.write_bytes(content)
    assert believed == [] and tried > 200
    assert choose_checkpoint(newest.parent, newest.name) == newest  # restore it
    record_property("injected", tried)


@pytest.mark.fault("the newest checkpoint damaged", outcome="survived")
@pytest.mark.parametrize("file", ["manifest.json", pytest.param("largest", marks=pytest.mark.thorough)])
def test_the_run_resumes_from_the_previous_checkpoint(file: str, made: Run, killed: Run, tmp_path: Path) -> None:
    own = Run(Path(shutil.copytree(killed.path, tmp_path / "run" / killed.path.name, symlinks=True)))
    newest = list_checkpoints(own.path / "checkpoints")[-1]
    path = max(newest.iterdir(), key=lambda each: each.stat().st_size) if file == "largest" else newest / file
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)
    resumed = run(tmp_path, 2, f"resume={own.path}", f"outputs={tmp_path}")
    log = (resumed.path / "log.txt").read_text()
    assert f"{newest.name}/" in log and "damaged" in log and "resuming after step 15" in log
    assert_same(resumed, made)
