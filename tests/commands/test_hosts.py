"""Runs over several hosts: started by the elastic agent and by spawn, late, cut off in the middle, out of reach."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Commands, newest_step, wait_until
from namespaces import Hosts, why_not
from own_folders import SLOW, SLOWLY, write_files
from worlds import Run, run

pytestmark = pytest.mark.thorough

TINY = ("model=mlp", "parallel=ddp", "threads=1", "logger=none")
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


def agents(nodes: str) -> tuple[str, ...]:
    meeting = f"launcher.rdzv_endpoint={Hosts.address(1)}:{PORT}"
    return ("launcher=torchrun", f"launcher.nodes='{nodes}'", "launcher.nproc_per_node=2", meeting)


def only_run(tmp_path: Path) -> Run:
    (path,) = (tmp_path / "outputs" / "run").iterdir()
    return Run(path)


def test_two_hosts_give_the_weights_of_one_also_when_one_is_late(
    hosts: Hosts, commands: Commands, tmp_path: Path
) -> None:
    here = run(tmp_path / "here", 4, *TINY, "epochs=1", "backend=gloo")
    first = hosts.runner(commands, 1, *TINY, "epochs=1", *agents("2"))
    time.sleep(3)
    second = hosts.runner(commands, 2, *TINY, "epochs=1", *agents("2"))
    told, silent = commands.finish(first), commands.finish(second)
    assert (told.returncode, silent.returncode) == (0, 0), told.stderr + silent.stderr
    assert "4 processes (torchrun)" in told.stdout and "finished: val/accuracy" in told.stdout
    assert silent.stdout == ""
    assert only_run(tmp_path).result["weights_sha256"] == here.result["weights_sha256"]


def test_spawn_on_two_hosts_and_a_mistake_told_once(hosts: Hosts, commands: Commands, tmp_path: Path) -> None:
    here = run(tmp_path / "here", 4, *TINY, "epochs=1", "backend=gloo")
    spawn = ("launcher=spawn", "launcher.nodes=2", f"launcher.master_addr={Hosts.address(1)}")
    words = [*TINY, "epochs=1", *spawn]
    both = [hosts.runner(commands, host, *words, f"launcher.node_rank={host - 1}") for host in (1, 2)]
    told, silent = [commands.finish(process) for process in both]
    assert (told.returncode, silent.returncode) == (0, 0), told.stderr + silent.stderr
    assert "4 processes (spawn)" in told.stdout and silent.stdout == ""
    assert only_run(tmp_path).result["weights_sha256"] == here.result["weights_sha256"]


@pytest.mark.fault("a host out of reach", outcome="refused")
def test_a_host_that_reaches_no_other_says_where_it_tried(hosts: Hosts, commands: Commands, tmp_path: Path) -> None:
    """The first host runs nothing: its port is closed. The third does not exist."""
    spawn = ("launcher=spawn", "launcher.nodes=2", "launcher.node_rank=1", "launcher.join_timeout_s=3")
    refused = hosts.runner(commands, 2, *TINY, *spawn, f"launcher.master_addr={Hosts.address(1)}")
    done = commands.finish(refused)
    assert done.returncode == 2
    assert f"on host2 found no world at {Hosts.address(1)}:29500 within 3 s" in done.stderr

    nowhere = hosts.runner(
        commands, 2, *TINY, "launcher=torchrun", "launcher.nodes=2", "launcher.join_timeout_s=3",
        f"launcher.rdzv_endpoint={Hosts.address(3)}:{PORT}",
    )  # fmt: skip
    done = commands.finish(nowhere)
    assert done.returncode == 2
    where = f"launcher.rdzv_endpoint={Hosts.address(3)}:{PORT}"
    assert f"{where}: 2 nodes did not find each other there within" in done.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    "elastic",
    [
        pytest.param(False, marks=pytest.mark.fault("a host cut off", outcome="refused")),
        pytest.param(True, marks=pytest.mark.fault("a host cut off, where fewer may go on", outcome="went_on")),
    ],
)
def test_a_host_that_is_cut_off_is_named(elastic: bool, hosts: Hosts, commands: Commands, tmp_path: Path) -> None:
    """The other ends, or goes on alone from the newest checkpoint where the number of nodes may fall."""
    write_files(tmp_path, SLOW)
    nodes = agents("1:2" if elastic else "2")
    restarts = ("launcher.max_restarts=1",) if elastic else ()
    words = [
        *TINY,
        *SLOWLY,
        "epochs=1000",
        "max_steps=300",
        "backend.timeout_s=4",
        "launcher.join_timeout_s=15",
        *nodes,
        *restarts,
    ]
    first, second = (hosts.runner(commands, host, *words) for host in (1, 2))
    wait_until(lambda: newest_step(tmp_path) > 0, first)
    hosts.cut(2)
    (tmp_path / "has-acted").touch()
    told = commands.finish(first)
    one = only_run(tmp_path)
    said = told.stdout + told.stderr
    assert "no word from rank 2 on host2" in said and "no word from rank 3 on host2" in said
    if elastic:
        assert told.returncode == 0 and one.result["state"] == "finished", said
        assert (one.result["world_size"], one.result["step"]) == (2, 300)
        assert said.count("resuming after step") == 1
    else:
        assert told.returncode == 1 and one.result["state"] == "failed"
        assert commands.finish(second).returncode == 1, "the host that was cut off ends too"
