"""The caches of torch.compile: not writable by other users, whose code it would execute, and separate for each CPU."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import Commands
from worlds import only_run

from runner.jobs import compile_cache, process_state
from runner.jobs.compile_cache import check_compile_caches

SMALL = ("model=linear", "data=random", "logger=none", "threads=1", "max_steps=1")
ME = os.geteuid()
of_other_user = pytest.mark.fault("a compile cache of another user", outcome="refused")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return torch's default directory, which does not exist yet, in a TMPDIR that all users share."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    monkeypatch.setenv("LOGNAME", "victim")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return shared / "torchinductor_victim"


@of_other_user
def test_only_this_user_can_write_to_the_cache(cache: Path) -> None:
    assert check_compile_caches(True) == check_compile_caches(True) == []
    assert cache.stat().st_uid == ME and not cache.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@of_other_user
@pytest.mark.skipif(ME != 0, reason="only root can create files of another user")
@pytest.mark.parametrize("place", ["default", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "link"])
def test_a_cache_of_another_user_is_refused(
    place: str,
    cache: Path,
    here: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    theirs = cache if place == "default" else cache.with_name("theirs")
    theirs.mkdir()
    os.chown(theirs, 4321, 4321)
    if place == "link":
        cache.symlink_to(theirs)
    elif place != "default":
        monkeypatch.setenv(place, str(theirs))
    assert here(*SMALL, "compile=true") == 2
    (line,) = capsys.readouterr().err.splitlines()
    name = place if place.isupper() else "TMPDIR"
    assert line.startswith(f"compile=true: {cache if place == 'link' else theirs} ")
    assert "another user" in line and line.endswith(f"; set {name} to a directory of yours")
    assert not Path("outputs").exists()
    assert here(*SMALL) == 0  # nothing is compiled


@of_other_user
@pytest.mark.parametrize("writable", ["cache", "parent"])
def test_a_cache_that_other_users_can_change_is_refused(writable: str, cache: Path) -> None:
    cache.mkdir()
    (cache if writable == "cache" else cache.parent).chmod(0o777)
    (message,) = check_compile_caches("max-autotune")
    assert message.startswith(f"compile=max-autotune: {cache} can be changed by other users")


@of_other_user
def test_a_cache_that_cannot_be_created_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("")
    (message,) = check_compile_caches(True)
    assert "cannot be created (File exists)" in message
    monkeypatch.setattr(compile_cache, "TRUSTED", (ME + 1,))
    cache.unlink()
    assert "belongs to another user" in check_compile_caches(True)[0]


def test_each_job_finds_only_code_for_its_cpu(here: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "mine")
    monkeypatch.setattr(process_state, "_first", [])
    for capability in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        assert here(*SMALL) == 0
        assert torch.compiler.config.cache_key_tag == f"mine {capability}"


@pytest.mark.thorough
@pytest.mark.fault("a compile cache of another CPU", outcome="survived")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch selects one kind of code")
def test_code_that_was_compiled_for_another_cpu_is_not_used(commands: Commands, tmp_path: Path) -> None:
    """As on machines that share a home directory. torch's own cache returns the code, which does not even compile."""
    words = ("-m", "runner", "model=mlp", "model.hidden=[16]", "precision=fp64", *SMALL[2:])
    shared = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    losses = list[dict[int, float]]()
    for name, env in (("plain", {}), ("this", shared), ("other", {**shared, "ATEN_CPU_CAPABILITY": "default"})):
        compiled = ("compile=true",) if env else ()
        done = commands.finish(commands.start(*words, *compiled, f"name={name}", env=env))
        assert done.returncode == 0, done.stderr
        losses.append(only_run(tmp_path, name).losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-9) and losses[2] == pytest.approx(losses[0], rel=1e-9)
