"""The parts of launcher=ray that need no cluster: its options, and how its actor starts processes."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import wait_until
from worlds import configure

import runner.errors
from runner.distributed.environment import RankInfo
from runner.errors import InputError
from runner.launchers.launch import launch
from runner.launchers.ray.starter import LOST, Starter

READ = "import os, sys; open('started', 'w'); print(os.environ.get('OMP_NUM_THREADS'), sys.stdin.read()); sys.exit(3)"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.mark.parametrize(("env", "threads"), [({}, "None"), ({"OMP_NUM_THREADS": "4"}, "4")])
def test_a_process_receives_its_input_but_not_the_number_of_threads_of_ray(
    env: dict[str, str], threads: str, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    starter = Starter(str(tmp_path), env, silence_s=60)
    ended = pool.submit(starter.run, 0, ("-c", READ), b"a ", None)
    wait_until((tmp_path / "started").exists)
    starter.send(0, b"b ")
    starter.send(None, b"c")
    starter.send(1, b"of an earlier process")
    starter.close(0)
    assert ended.result() == (3, f"{threads} a b c\n".encode(), b"")


def test_the_output_is_appended_to_a_file(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    starter, log = Starter(str(tmp_path), {}, silence_s=60), tmp_path / "log"
    log.write_text("before\n")
    ended = pool.submit(starter.run, 0, ("-c", READ), b"", str(log))
    wait_until((tmp_path / "started").exists)
    starter.kill(0)
    assert ended.result() == (-9, b"", b"")
    assert starter.run(1, ("-c", "raise SystemExit('wrong')"), b"", str(log)).status == 1
    assert log.read_text() == "before\nwrong\n"


def test_an_agent_that_received_nothing_for_too_long_is_lost(tmp_path: Path) -> None:
    assert Starter(str(tmp_path), {}, silence_s=0).run(0, ("-c", ""), b"", None).status == LOST


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runner.errors, "find_spec", lambda package: None if package == "ray" else SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(tmp_path)
    _, request = configure("model=mlp", "parallel=ddp", "launcher=ray", "backend=gloo")
    with pytest.raises(InputError, match=r"launcher=ray needs ray; pip install 'experiment-runner\[ray\]'"):
        launch(request, RankInfo())
    assert not [*tmp_path.iterdir()]
