"""The host of rank 0, or that where the hosts meet, is lost in the middle of a run: which others go on, which end."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from commands import Commands, newest_step, wait_until
from namespaces import Hosts, why_not
from own_folders import SLOW, SLOWLY, write_files
from worlds import Run

pytestmark = pytest.mark.thorough

PORT = 29400
WORDS = (
    "model=mlp", "parallel=ddp", "threads=1", "logger=none", "epochs=1000", "backend.timeout_s=8",
    "checkpoint.every_steps=20", "launcher=torchrun", "launcher.nproc_per_node=1", "launcher.join_timeout_s=20",
)  # fmt: skip


@pytest.fixture
def make_hosts() -> Iterator[Callable[[int], Hosts]]:
    if reason := why_not():
        pytest.skip(reason)
    made: list[Hosts] = []

    def make(number: int) -> Hosts:
        made.append(Hosts(number))
        made[-1].start()
        return made[-1]

    try:
        yield make
    finally:
        for hosts in made:
            hosts.stop()


def start(hosts: Hosts, commands: Commands, *words: str) -> list[Popen[str]]:
    return [hosts.runner(commands, host, *WORDS, *words) for host in range(1, hosts.number + 1)]


def meeting(host: int) -> str:
    return f"launcher.rdzv_endpoint={Hosts.address(host)}:{PORT}"


def wait_for_checkpoint(tmp_path: Path, commands: Commands, processes: list[Popen[str]]) -> None:
    """That of step 20, or a later one."""
    wait_until(lambda: newest_step(tmp_path) >= 20 or any(process.poll() is not None for process in processes))
    if newest_step(tmp_path) < 20:
        ended = [commands.finish(process) for process in processes]
        pytest.fail("\n".join(f"{each.returncode}\n{each.stdout}\n{each.stderr}" for each in ended))


def only_run(tmp_path: Path) -> Run:
    (path,) = (tmp_path / "outputs" / "run").iterdir()
    return Run(path)


def attempts(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / "attempts.jsonl").read_text().splitlines()]


@pytest.mark.fault("the host of rank 0 lost, where fewer may go on", outcome="went_on")
def test_the_other_goes_on_in_the_kept_directory(
    make_hosts: Callable[[int], Hosts], commands: Commands, tmp_path: Path
) -> None:
    """They meet on the second; rank 0, and the ranks' store, are on the first."""
    hosts = make_hosts(2)
    write_files(tmp_path, SLOW)
    words = (*SLOWLY, "launcher.nodes='1:2'", "launcher.max_restarts=1", "max_steps=300", meeting(2))
    first, second = started = start(hosts, commands, *words)
    wait_for_checkpoint(tmp_path, commands, started)
    hosts.lose(1, commands, first)
    (tmp_path / "has-acted").touch()
    told = commands.finish(second)
    said = told.stdout + told.stderr
    assert told.returncode == 0, said
    assert "no word from rank 0 on host1" in said and said.count("resuming after step") == 1
    run = only_run(tmp_path)
    assert (run.result["state"], run.result["world_size"], run.result["step"]) == ("finished", 1, 300)
    killed, ended = attempts(run)
    assert (killed["state"], killed["host"], killed["world_size"]) == ("killed", "host1", 2)
    assert (ended["state"], ended["host"], ended["world_size"]) == ("finished", "host2", 1)
    assert ended["first_step"] >= 20


@pytest.mark.leaves_tmp  # rank 0's
@pytest.mark.parametrize(
    "elastic",
    [
        pytest.param(True, marks=pytest.mark.fault("the host where the others meet lost", outcome="refused")),
        pytest.param(False, marks=pytest.mark.fault("kill -9 of all on the host of rank 0", outcome="refused")),
    ],
)
def test_without_where_they_meet_the_other_says_so_and_how_to_go_on(
    elastic: bool, make_hosts: Callable[[int], Hosts], commands: Commands, tmp_path: Path
) -> None:
    hosts = make_hosts(2)
    nodes = ("launcher.nodes='1:2'", "launcher.max_restarts=1") if elastic else ("launcher.nodes=2",)
    first, second = started = start(hosts, commands, "max_steps=100000", *nodes, meeting(1))
    wait_for_checkpoint(tmp_path, commands, started)
    if elastic:
        hosts.lose(1, commands, first)
    else:
        hosts.kill(commands, first)
    ended = commands.finish(second)
    run = only_run(tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    lost = f"{meeting(1)}, where the nodes meet, is lost: nothing answers there; start every node again with resume="
    said = [line for line in ended.stderr.splitlines() if "where the nodes meet" in line]
    # An agent sees at once that connections to another one are closed: then it may end its ranks before they tell.
    if elastic or not said:
        assert "no word from rank 0 on host1" in ended.stderr, ended.stderr
        assert run.result["state"] == "failed" and "no word from rank 0 on host1" in run.result["error"]
    assert said == [f"{lost}{run.path}"] or not (elastic or said)
    if elastic:
        return
    step = newest_step(tmp_path)
    again = start(hosts, commands, f"max_steps={step + 20}", *nodes, meeting(1), "resume=last")
    told, silent = (commands.finish(process) for process in again)
    assert (told.returncode, silent.returncode) == (0, 0), told.stderr + silent.stderr
    assert f"resuming after step {step}" in told.stdout
    run = only_run(tmp_path)
    assert (run.result["state"], run.result["world_size"], run.result["step"]) == ("finished", 2, step + 20)
    assert [attempt["state"] for attempt in attempts(run)] == ["killed", "finished"]
