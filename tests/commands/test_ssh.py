"""Runs on machines that ssh reaches: lost and unreachable machines, and what is left on them."""

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest
from commands import Commands, newest_step, wait_until
from custom_files import SLOW, write_files
from machine_runs import JOB, LONG, TINY, check_end_with_command, run_undisturbed
from namespaces import Hosts, why_not
from worlds import only_run, run

from runner.records.attempts import read_attempts
from runner.records.ledger import read_ledger

pytestmark = pytest.mark.thorough

SUBMITTER = 3


class Cluster:
    """Two hosts with SSH servers, and a third one on which the commands are typed."""

    def __init__(self, commands: Commands, hosts: Hosts, folder: Path):
        self.commands, self.hosts, self.folder = commands, hosts, folder
        self.servers = {host: hosts.serve_ssh(commands, host, folder) for host in (1, 2)}

    def start(self, *args: str, names: str = "host1,host2") -> Popen[str]:
        ssh = ("launcher=ssh", f"launcher.hosts=[{names}]", "launcher.nproc_per_node=1")
        options = f"launcher.options=[-F,{self.folder / 'config'}]"
        return self.hosts.runner(self.commands, SUBMITTER, *ssh, options, *args)

    def start_sweep(self, *args: str) -> Popen[str]:
        options = (f"hydra.launcher.options=[-F,{self.folder / 'config'}]", "hydra.launcher.slots=1")
        hosts = ("hydra/launcher=ssh", "hydra.launcher.hosts=[host1,host2]")
        return self.hosts.runner(self.commands, SUBMITTER, "-m", *hosts, *options, *args)

    def living(self, host: int) -> list[int]:
        """Return the processes of jobs on the host, without those of its SSH server."""
        found = self.commands.living(self.servers[host])
        return [pid for pid in found if b"sshd" not in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def wait_until_idle(self) -> None:
        wait_until(lambda: not self.living(1) and not self.living(2))


@pytest.fixture
def cluster(commands: Commands, tmp_path: Path) -> Iterator[Cluster]:
    if reason := why_not("/usr/sbin/sshd", "ssh", "ssh-keygen"):
        pytest.skip(reason)
    hosts = Hosts(3)
    try:
        hosts.start()
        cluster = Cluster(commands, hosts, tmp_path / "ssh")
        yield cluster
        for server in cluster.servers.values():
            commands.kill(server)
    finally:
        hosts.stop()


def test_two_machines_produce_the_weights_of_one(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    here = run(tmp_path / "here", 3, *TINY)
    done = commands.finish(cluster.start(*TINY, names="host1,host2:2"))
    assert done.returncode == 0, done.stderr
    assert "3 processes (ssh)" in done.stdout and "finished: val/accuracy" in done.stdout
    result = only_run(tmp_path).result
    assert result["weights_sha256"] == here.result["weights_sha256"]
    assert result["hosts"] == ["host1", "host2"]
    cluster.wait_until_idle()


@pytest.mark.fault("a host that ssh does not reach, or that lacks the runner", outcome="refused")
def test_what_is_wrong_with_each_machine_is_listed(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    cases = {
        ("host1,host9", ()): r"launcher.hosts=host9: ssh: Could not resolve hostname host9",
        ("host1,host3", ()): r"launcher.hosts=host3: ssh: connect to host 10.213.7.3 port 22: Connection refused",
        ("host1,host2", ("launcher.python=/no/python",)): r"launcher.hosts=host2: .*/no/python",
        ("host1,host2", ("model.hidden=0",)): r"model.hidden",
    }
    for (names, args), message in cases.items():
        done = commands.finish(cluster.start(*TINY, *args, names=names))
        assert done.returncode == 2, done.stdout + done.stderr
        assert len(done.stderr.strip().splitlines()) <= 3
        assert re.search(message, done.stderr), done.stderr
    assert not (tmp_path / "outputs").exists() or not any((tmp_path / "outputs").rglob("result.json"))


@pytest.mark.fault("Ctrl-C of a run on several hosts by ssh", outcome="survived")
@pytest.mark.fault("kill -9 of a command whose run is on other hosts by ssh", outcome="survived")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_ranks_save_and_end_with_the_command(
    number: signal.Signals, cluster: Cluster, commands: Commands, tmp_path: Path
) -> None:
    write_files(tmp_path, SLOW)
    process = cluster.start(*LONG, "max_steps=100000")
    check_end_with_command(process, number, commands, tmp_path, cluster.wait_until_idle)


@pytest.mark.fault("power failure of a host that ssh has reached", outcome="survived")
def test_a_lost_machine_that_returns_takes_part_again(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    write_files(tmp_path, SLOW)
    whole = commands.finish(cluster.start(*LONG, "max_steps=120", "name=whole"))
    assert whole.returncode == 0, whole.stderr
    process = cluster.start(*LONG, "max_steps=120", "launcher.max_restarts=2")
    wait_until(lambda: newest_step(tmp_path) >= 20, process)
    cluster.hosts.lose(2, commands, cluster.servers[2])
    time.sleep(2)
    cluster.hosts.join(2)
    cluster.servers[2] = cluster.hosts.serve_ssh(commands, 2, cluster.folder)
    done = commands.finish(process)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^host2 is lost: (ssh|Connection|Timeout|client_loop)\b", done.stderr, re.MULTILINE), done.stderr
    found = only_run(tmp_path)
    assert found.result["weights_sha256"] == only_run(tmp_path, "whole").result["weights_sha256"]
    assert len([*read_attempts(found.path)]) > 1


@pytest.mark.fault("a host that ssh has reached is cut off for good", outcome="refused")
def test_the_others_are_stopped_if_too_few_machines_are_left(
    cluster: Cluster, commands: Commands, tmp_path: Path
) -> None:
    write_files(tmp_path, SLOW)
    process = cluster.start(*LONG, "max_steps=100000")
    wait_until(lambda: newest_step(tmp_path) >= 20, process)
    cluster.hosts.cut(2)
    done = commands.finish(process)
    assert done.returncode == 1 and "error: host2 is lost: " in done.stderr
    assert f"resume={only_run(tmp_path).path} continues the run" in done.stderr
    cluster.wait_until_idle()  # also the host that is cut off


@pytest.mark.fault("a host that ssh has reached is cut off, and others are enough", outcome="went_on")
def test_the_run_continues_on_the_machines_that_are_left(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    write_files(tmp_path, SLOW)
    process = cluster.start(*LONG, "max_steps=200", "launcher.min_nodes=1", "launcher.max_restarts=2")
    wait_until(lambda: newest_step(tmp_path) >= 20, process)
    cluster.hosts.lose(2, commands, cluster.servers[2])
    done = commands.finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    assert only_run(tmp_path).result["world_size"] == 1


@pytest.mark.fault("power failure of one of the hosts on which a sweep runs by ssh", outcome="survived")
def test_the_jobs_of_a_lost_machine_run_on_the_others(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    write_files(tmp_path, SLOW)
    whole = run_undisturbed(tmp_path, 1, *JOB, "max_steps=40", "seed=1")
    process = cluster.start_sweep(*JOB, "max_steps=40", "run_id=grid", "seed=0,1,2")
    sweep = tmp_path / "outputs" / "run" / "grid"
    wait_until(lambda: (sweep / "1-seed-1" / "checkpoints" / "step_20").exists(), process)
    cluster.hosts.lose(2, commands, cluster.servers[2])
    done = commands.finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "host2 is lost: " in done.stdout and "3 of 3 jobs finished" in done.stdout
    jobs = read_ledger(sweep)
    assert [(job.state, job.num_starts) for job in jobs] == [("finished", 1), ("finished", 2), ("finished", 1)]
    assert result_of(jobs[1].directory)["weights_sha256"] == whole.result["weights_sha256"]
    cluster.wait_until_idle()


def result_of(run: Path) -> dict[str, object]:
    return dict(json.loads((run / "result.json").read_text()))
