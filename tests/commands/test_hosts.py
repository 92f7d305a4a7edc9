"""Runs on several machines with torchrun and spawn: late, cut off, unreachable and lost machines."""

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from commands import Commands, newest_step, wait_until
from custom_files import SLOW, SLOWLY, write_files
from namespaces import Hosts, why_not
from worlds import only_run, run

from runner.records.attempts import read_attempts

pytestmark = pytest.mark.thorough

TINY = ("model=mlp", "parallel=ddp", "threads=1", "logger=none")
LONG = (
    "model=mlp", "parallel=ddp", "threads=1", "logger=none", "epochs=1000", *SLOWLY, "backend.timeout_s=8",
    "checkpoint.every_steps=20", "launcher=torchrun", "launcher.nproc_per_node=1", "launcher.join_timeout_s=20",
)  # fmt: skip
PORT = 29400


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    hosts = Hosts(2)
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()


def rendezvous(host: int) -> str:
    return f"launcher.rdzv_endpoint={Hosts.address(host)}:{PORT}"


def agents(nodes: str) -> tuple[str, ...]:
    return ("launcher=torchrun", f"launcher.nodes='{nodes}'", "launcher.nproc_per_node=2", rendezvous(1))


def start(hosts: Hosts, commands: Commands, *args: str) -> list[Popen[str]]:
    return [hosts.runner(commands, host, *LONG, *args) for host in (1, 2)]


def test_two_machines_produce_the_weights_of_one_even_if_one_is_late(
    hosts: Hosts, commands: Commands, tmp_path: Path
) -> None:
    here = run(tmp_path / "here", 4, *TINY, "epochs=1", "backend=gloo")
    first = hosts.runner(commands, 1, *TINY, "epochs=1", *agents("2"))
    time.sleep(3)
    second = hosts.runner(commands, 2, *TINY, "epochs=1", *agents("2"))
    reported, silent = commands.finish(first), commands.finish(second)
    assert (reported.returncode, silent.returncode) == (0, 0), reported.stderr + silent.stderr
    assert "4 processes (torchrun)" in reported.stdout and "finished: val/accuracy" in reported.stdout
    assert silent.stdout == ""
    assert only_run(tmp_path).result["weights_sha256"] == here.result["weights_sha256"]


def test_spawn_on_two_machines_produces_the_weights_of_one(hosts: Hosts, commands: Commands, tmp_path: Path) -> None:
    here = run(tmp_path / "here", 4, *TINY, "epochs=1", "backend=gloo")
    spawn = ("launcher=spawn", "launcher.nodes=2", f"launcher.master_addr={Hosts.address(2)}")
    args = [*TINY, "epochs=1", *spawn]
    both = [hosts.runner(commands, host, *args, f"launcher.node_rank={2 - host}") for host in (1, 2)]
    silent, reported = [commands.finish(process) for process in both]  # rank 0 is on the second machine
    assert (reported.returncode, silent.returncode) == (0, 0), reported.stderr + silent.stderr
    assert "4 processes (spawn)" in reported.stdout and silent.stdout == ""
    assert only_run(tmp_path).result["weights_sha256"] == here.result["weights_sha256"]


@pytest.mark.fault("an unreachable host", outcome="refused")
def test_unreachable_machine_is_named_with_its_address(hosts: Hosts, commands: Commands, tmp_path: Path) -> None:
    """No process listens on the first machine, and the third does not exist."""
    spawn = ("launcher=spawn", "launcher.nodes=2", "launcher.node_rank=1", "launcher.join_timeout_s=3")
    refused = hosts.runner(commands, 2, *TINY, *spawn, f"launcher.master_addr={Hosts.address(1)}")
    done = commands.finish(refused)
    assert done.returncode == 2
    where = f"launcher.master_addr={Hosts.address(1)}:29500"
    assert f"{where}: 2 nodes did not find each other there within" in done.stderr

    nowhere = hosts.runner(
        commands, 2, *TINY, "launcher=torchrun", "launcher.nodes=2", "launcher.join_timeout_s=3",
        f"launcher.rdzv_endpoint={Hosts.address(3)}:{PORT}",
    )  # fmt: skip
    done = commands.finish(nowhere)
    assert done.returncode == 2
    where = f"launcher.rdzv_endpoint={Hosts.address(3)}:{PORT}"
    assert f"{where}: 2 nodes did not find each other there within" in done.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.fault("a disconnected host", outcome="refused")
def test_disconnected_machine_is_named(hosts: Hosts, commands: Commands, tmp_path: Path) -> None:
    write_files(tmp_path, SLOW)
    timeouts = ("backend.timeout_s=4", "launcher.join_timeout_s=15")
    args = (*TINY, *SLOWLY, "epochs=1000", "max_steps=300", *timeouts, *agents("2"))
    first, second = (hosts.runner(commands, host, *args) for host in (1, 2))
    wait_until(lambda: newest_step(tmp_path) > 0, first)
    hosts.cut(2)
    (tmp_path / "has-acted").touch()
    reported = commands.finish(first)
    output = reported.stdout + reported.stderr
    assert "no response from rank 2 on host2" in output and "no response from rank 3 on host2" in output
    assert (reported.returncode, only_run(tmp_path).result["state"]) == (1, "failed")
    assert commands.finish(second).returncode == 1, "the machine that was cut off exits too"


def wait_for_checkpoint(tmp_path: Path, commands: Commands, processes: list[Popen[str]]) -> None:
    """Wait for the checkpoint of step 20, or a later one."""
    wait_until(lambda: newest_step(tmp_path) >= 20 or any(process.poll() is not None for process in processes))
    if newest_step(tmp_path) < 20:
        ended = [commands.finish(process) for process in processes]
        pytest.fail("\n".join(f"{each.returncode}\n{each.stdout}\n{each.stderr}" for each in ended))


def attempts(path: Path) -> list[dict[str, Any]]:
    return [asdict(attempt) for attempt in read_attempts(path)]


@pytest.mark.fault("the host of rank 0 lost, with elastic nodes", outcome="went_on")
def test_the_other_machine_continues_in_the_same_directory(hosts: Hosts, commands: Commands, tmp_path: Path) -> None:
    """The rendezvous is on the second machine; rank 0 and the ranks' store are on the first."""
    write_files(tmp_path, SLOW)
    args = ("launcher.nodes='1:2'", "launcher.max_restarts=1", "max_steps=300", rendezvous(2))
    first, second = started = start(hosts, commands, *args)
    wait_for_checkpoint(tmp_path, commands, started)
    hosts.lose(1, commands, first)
    (tmp_path / "has-acted").touch()
    reported = commands.finish(second)
    output = reported.stdout + reported.stderr
    assert reported.returncode == 0, output
    assert "no response from rank 0 on host1" in output and output.count("resuming after step") == 1
    one = only_run(tmp_path)
    assert (one.result["state"], one.result["world_size"], one.result["step"]) == ("finished", 1, 300)
    assert one.result["hosts"] == ["host2"]
    killed, ended = attempts(one.path)
    assert (killed["state"], killed["hosts"], killed["world_size"]) == ("killed", ["host1", "host2"], 2)
    assert (ended["state"], ended["hosts"], ended["world_size"]) == ("finished", ["host2"], 1)
    assert ended["first_step"] >= 20


@pytest.mark.leaves_tmp  # rank 0's temporary directory
@pytest.mark.parametrize(
    "elastic",
    [
        pytest.param(True, marks=pytest.mark.fault("the host of the rendezvous lost", outcome="refused")),
        pytest.param(False, marks=pytest.mark.fault("kill -9 of all on the host of rank 0", outcome="refused")),
    ],
)
def test_without_the_rendezvous_the_other_machine_reports_it_and_how_to_resume(
    elastic: bool, hosts: Hosts, commands: Commands, tmp_path: Path
) -> None:
    write_files(tmp_path, SLOW)
    nodes = ("launcher.nodes='1:2'", "launcher.max_restarts=1") if elastic else ("launcher.nodes=2",)
    first, second = started = start(hosts, commands, "max_steps=100000", *nodes, rendezvous(1))
    wait_for_checkpoint(tmp_path, commands, started)
    if elastic:
        hosts.lose(1, commands, first)
    else:
        hosts.kill(commands, first)
    ended = commands.finish(second)
    one = only_run(tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    lost = f"{rendezvous(1)}, the rendezvous of the nodes, is lost: it does not respond; start every node again with"
    output = [line for line in ended.stderr.splitlines() if "the rendezvous of the nodes" in line]
    # An agent notices closed connections at once, and may terminate its ranks before they report the failure.
    if elastic or not output:
        assert "no response from rank 0 on host1" in ended.stderr, ended.stderr
        assert one.result["state"] == "failed" and "no response from rank 0 on host1" in one.result["error"]
    assert output == [f"{lost} resume={one.path}"] or not (elastic or output)
