"""The options and environments that a launcher refuses."""

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from worlds import configure

from runner.distributed.environment import RankInfo
from runner.errors import InputError, JobFailed
from runner.launchers import torchrun
from runner.launchers.elastic import Ranks
from runner.launchers.kubernetes.launcher import Kubernetes
from runner.launchers.launch import launch, make_launcher
from runner.launchers.ray.launcher import Ray
from runner.launchers.slurm.launcher import Slurm
from runner.launchers.spawn import Spawn
from runner.launchers.ssh import Ssh
from runner.launchers.ssh_hosts import LOST, SshHosts
from runner.launchers.torchrun import REPEAT, Torchrun
from runner.records.run_directory import Destination


@pytest.mark.parametrize("kind", [Spawn, Torchrun, Slurm])
def test_a_launcher_inside_a_world_is_refused(kind: type) -> None:
    name = kind.__name__.lower()
    _, request = configure("model=mlp", "parallel=ddp", f"launcher={name}")
    rank_info = RankInfo(1, 1, 2, 2, source="torchrun")
    with pytest.raises(InputError, match=f"launcher={name} starts processes itself, but torchrun has started this one"):
        launch(request, rank_info)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Spawn, {"nproc_per_node": 0}, "launcher.nproc_per_node=0 must be at least 1"),
        (Spawn, {"nodes": 2}, "launcher.nodes=2 needs launcher.master_addr"),
        (Spawn, {"nodes": 2, "node_rank": 2}, "launcher.node_rank=2 must be at least 0 and below"),
        (Spawn, {"master_addr": "a"}, "launcher.master_addr=a needs several nodes"),
        (Torchrun, {"nodes": "2:1"}, "launcher.nodes=2:1 must be a number of at least 1, or MIN:MAX"),
        (Torchrun, {"nodes": "1:2"}, "launcher.nodes=1:2 needs launcher.rdzv_endpoint=HOST:PORT"),
        (Torchrun, {"nodes": 2, "rdzv_endpoint": "a"}, "launcher.rdzv_endpoint=a must be HOST:PORT"),
        (Torchrun, {"rdzv_endpoint": "a:1"}, "launcher.rdzv_endpoint=a:1 needs several nodes"),
        (
            Torchrun,
            {"nodes": 2, "master_addr": "a", "node_rank": 2},
            "launcher.node_rank=2 must be at least 0 and below",
        ),
        (Torchrun, {"nodes": "1:2", "master_addr": "a", "node_rank": 0}, "launcher.nodes=1:2, a fixed number"),
        (Torchrun, {"nproc_per_node": "gpu"}, "launcher.nproc_per_node=gpu: Cuda is not available"),
        (Torchrun, {"max_restarts": -1}, "launcher.max_restarts=-1 must be at least 0"),
        (Ssh, {}, "launcher.hosts=[] must name machines"),
        (Ssh, {"hosts": ["a", "a:2"]}, "name each machine once"),
        (Ssh, {"hosts": ["ssh://a:22"]}, "launcher.hosts: ssh://a:22 must be NAME or NAME:4"),
        (Ssh, {"hosts": ["a:0"]}, "launcher.hosts: a:0 must be NAME or NAME:4"),
        (Ssh, {"hosts": ["a", "b"], "min_nodes": 1}, "launcher.min_nodes=1 needs launcher.max_restarts"),
        (Ssh, {"hosts": ["a", "b"], "rdzv_endpoint": "a"}, "launcher.rdzv_endpoint=a must be HOST:PORT"),
        (Ssh, {"hosts": ["a"], "min_nodes": 2}, "launcher.min_nodes=2 must be from 1 to 1"),
        (Ray, {"address": "head"}, "launcher.address=head must be auto, local, or HOST:PORT"),
        (Ray, {"address": "local", "nodes": 2}, "launcher.address=local is this machine, but launcher.nodes=2"),
        (Ray, {"nodes": "1:2"}, "launcher.nodes=1:2 needs launcher.max_restarts"),
        (Ray, {"nodes": 0}, "launcher.nodes=0 must be a number of at least 1, or MIN:MAX"),
        (Ray, {"cpus_per_node": 0}, "launcher.cpus_per_node=0 must be at least 1"),
        (Ray, {"gpus_per_node": 1}, "launcher.nproc_per_node=2 needs a GPU each, but launcher.gpus_per_node=1"),
        (Kubernetes, {}, "launcher.image=null must name a container image with the runner"),
        (Kubernetes, {"image": "a", "nodes": "2:1"}, "launcher.nodes=2:1 must be a number of at least 1, or MIN:MAX"),
        (Kubernetes, {"image": "a", "gpus_per_node": 1}, "launcher.nproc_per_node=2 needs a GPU each"),
        (Kubernetes, {"image": "a", "grace_s": 0}, "launcher.grace_s=0 must be at least 1"),
        (Kubernetes, {"image": "a", "pod": {"containers": []}}, "launcher.pod.containers: the launcher sets this key"),
        (Slurm, {"nodes": 0}, "launcher.nodes=0 must be at least 1"),
        (Slurm, {"gpus_per_node": 2, "nproc_per_node": 4}, "launcher.nproc_per_node=4 needs a GPU each"),
        (Slurm, {"sbatch": {"job_name": "x"}}, "launcher.sbatch.job_name: the launcher sets this option"),
        (Slurm, {"conda": "a", "venv": "b"}, "launcher.conda=a and launcher.venv=b exclude each other"),
    ],
)
def test_impossible_options_are_refused(kind: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        kind(**options)
    assert message in str(caught.value)


def test_torchrun_reads_the_variables_of_the_command_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"NNODES": "2", "NPROC_PER_NODE": "3", "NODE_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
    for name, value in {**values, "MAX_RESTARTS": "4"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    config, _ = configure("model=mlp", "launcher=torchrun", "launcher.max_restarts=5")
    launcher = make_launcher(config.launcher, debug=False)
    assert isinstance(launcher, Torchrun)
    assert (launcher.max_nodes, launcher.nproc_per_node, launcher.node_rank, launcher.is_host) == (2, 3, 1, False)
    assert (launcher.host, launcher.port, launcher.max_restarts, launcher.world_size) == ("node0", 1234, 5, 6)


def test_auto_starts_a_process_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "cpu")
    config, _ = configure("model=mlp", "launcher=torchrun")
    assert make_launcher(config.launcher, debug=False).world_size == torch._utils.cpu_count()


def test_the_name_of_the_first_machine_may_become_known_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a pod whose address is not assigned yet. A name that a user typed is refused at once."""
    found = [InputError("unknown"), InputError("unknown"), "10.0.0.1"]

    def look_up(host: str, key: str) -> str:
        if isinstance(result := found.pop(0), InputError):
            raise result
        return result

    monkeypatch.setattr(torchrun, "address_towards", look_up)
    monkeypatch.setattr(torchrun, "NAME_POLL_S", 0.0)
    assert Torchrun(1, 2, node_rank=1, master_addr="pod-0")._own_address() == "10.0.0.1"
    found = [InputError("unknown")]
    with pytest.raises(InputError, match="unknown"):
        Torchrun(1, 2, rdzv_endpoint="typo:29400")._own_address()


def test_the_hosts_of_ssh_have_their_own_numbers_of_ranks() -> None:
    assert Ssh(["me@node1", "node2:4"], nproc_per_node=8).world_size == 12
    assert Ssh(["node1", "node2"], min_nodes=1, max_restarts=1).world_size is None


def test_a_lost_machine_is_explained_by_ssh() -> None:
    output = "step 1\nTimeout, server node2 not responding.\n  warnings.warn('leaked objects')\n"
    hosts = SshHosts("launcher", 1, ["node1"])
    assert hosts.why_lost(0, LOST, output) == "Timeout, server node2 not responding."
    assert hosts.why_lost(0, LOST, "step 1\n") == "ssh has ended with status 255"
    assert hosts.why_lost(0, 1, output) is None


@pytest.mark.parametrize(
    ("error", "worlds", "status"),
    [
        (RendezvousConnectionError("no response"), [0], REPEAT),
        (RendezvousClosedError(), [0], REPEAT),
        (RendezvousClosedError(), [], REPEAT),  # another node was stopped while it waited
        (RendezvousTimeoutError(), [0], 1),
        (RendezvousTimeoutError(), [], 2),
    ],
)
def test_the_command_of_a_lost_node_is_repeated_only_with_a_run_id(
    error: RendezvousError, worlds: list[int], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(nodes: object, *args: object) -> NoReturn:
        raise error

    monkeypatch.setattr(torchrun, "Nodes", lambda *args: SimpleNamespace(worlds=worlds))
    monkeypatch.setattr(torchrun, "run_worlds", fail)
    for is_repeated, expected in {True: status, False: 1 if worlds else 2}.items():
        launcher = Torchrun(1, 2, node_rank=0, master_addr="127.0.0.1")
        launcher.is_repeated = is_repeated
        with pytest.raises((JobFailed, InputError)) as caught:
            launcher._run(Ranks(1, int, ()), Destination(), [], 1.0)
        assert getattr(caught.value, "status", 2) == expected
