"""Runs on machines that ssh reaches: lost and unreachable machines, and what is left on them."""

import json
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest
from commands import Commands, newest_step, wait_until, youngest_rank
from custom_files import SLOW, SLOWLY, write_files
from machine_runs import JOB, LONG, TINY, check_end_with_command, check_equal, run_undisturbed
from namespaces import Hosts, why_not
from worlds import only_run, run

from runner.records.attempts import read_attempts
from runner.records.ledger import read_ledger

pytestmark = pytest.mark.thorough

SERVERS, SUBMITTER = (1, 2, 3), 4
# Instead of Python on the machines: what is wrong with one depends on the name by which ssh reaches it.
FAULTY = """\
    #!/bin/sh
    set -e
    prepare=:
    case $FAULT in
    torch) export PYTHONPATH=$PWD/torch ;;
    runner) echo '{"versions": {}, "cores": [0]}'; exit ;;
    python) exec /no/python ;;
    unshared) prepare='mount -t tmpfs none shared' ;;
    readonly) prepare='mount --bind shared shared && mount -o remount,ro,bind shared' ;;
    full) export TMPDIR=$PWD/full; prepare='mount -t tmpfs -o size=64k none full' ;;
    gpu) export PATH=$PWD/bin:$PATH ;;
    code) prepare='mount -t tmpfs none mine && echo x=1 > mine/slow.py' ;;
    esac
    exec unshare --mount sh -c "$prepare && "'exec "$@"' sh INTERPRETER "$@"
"""
FAULTS = ("torch", "runner", "python", "unshared", "readonly", "full", "code", "gpu")
CHECK = """\
    import sys
    from pathlib import Path

    from runner.errors import InputError
    from runner.launchers.machines import check_machines
    from runner.launchers.ssh_hosts import SshHosts

    outputs, python, config, mine, *names = sys.argv[1:]
    try:
        check_machines(SshHosts("launcher", 1, names, python, None, ["-F", config]), Path(outputs), [mine])
    except InputError as error:
        print(error)
    """
NVIDIA_SMI = """\
    #!/bin/sh
    printf '0, 61000, 81559\\n1, 4, 81559\\n'
    """


class Cluster:
    """Three hosts with SSH servers, and a fourth one on which the commands are typed."""

    def __init__(self, commands: Commands, hosts: Hosts, folder: Path):
        self.commands, self.hosts, self.folder = commands, hosts, folder
        self.servers = {host: hosts.serve_ssh(commands, host, folder) for host in SERVERS}

    def start(self, *args: str, names: str = "host1,host2") -> Popen[str]:
        ssh = ("launcher=ssh", f"launcher.hosts=[{names}]", "launcher.nproc_per_node=1")
        options = f"launcher.options=[-F,{self.folder / 'config'}]"
        return self.hosts.runner(self.commands, SUBMITTER, *ssh, options, *args)

    def start_sweep(self, *args: str, names: str) -> Popen[str]:
        options = (f"hydra.launcher.options=[-F,{self.folder / 'config'}]", "hydra.launcher.slots=1")
        hosts = ("hydra/launcher=ssh", f"hydra.launcher.hosts=[{names}]")
        return self.hosts.runner(self.commands, SUBMITTER, "-m", *hosts, *options, *args)

    def living(self, host: int) -> list[int]:
        """Return the processes of jobs on the host, without those of its SSH server."""
        found = self.commands.living(self.servers[host])
        return [pid for pid in found if b"sshd" not in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def wait_until_idle(self) -> None:
        wait_until(lambda: not any(map(self.living, SERVERS)))


@pytest.fixture
def cluster(commands: Commands, tmp_path: Path) -> Iterator[Cluster]:
    if reason := why_not("/usr/sbin/sshd", "ssh", "ssh-keygen"):
        pytest.skip(reason)
    hosts = Hosts(SUBMITTER)
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
@pytest.mark.fault("a host with other code, other versions or a full disk, or without the outputs", outcome="refused")
def test_what_is_wrong_with_each_machine_is_listed(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    python, shared, mine = tmp_path / "python", tmp_path / "shared", tmp_path / "mine"
    files = {"python": FAULTY.replace("INTERPRETER", sys.executable), "bin/nvidia-smi": NVIDIA_SMI}
    write_files(tmp_path, {**SLOW, **files})
    for name in files:
        (tmp_path / name).chmod(0o755)
    for folder in (shared, tmp_path / "full", tmp_path / "torch" / "torch-9.9.dist-info"):
        folder.mkdir(parents=True)
    (tmp_path / "torch" / "torch-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nVersion: 9.9\n")
    with (cluster.folder / "config").open("a") as file:
        file.write("".join(f"Host {name}\n  HostName {Hosts.address(1)}\n  SetEnv FAULT={name}\n" for name in FAULTS))
        file.write(f"Host denied\n  HostName {Hosts.address(1)}\n  PubkeyAuthentication no\n")
        file.write(f"Host silent\n  HostName {Hosts.address(9)}\n")
    messages = {
        "nowhere": "ssh: Could not resolve hostname nowhere: ",
        "host4": "ssh: connect to host 10.213.7.4 port 22: Connection refused",
        "silent": "ssh: connect to host 10.213.7.9 port 22: ",
        "denied": "root@10.213.7.1: Permission denied ",
        "torch": "torch 9.9, but ",
        "runner": "another version of the runner than here",
        "python": "",
        "unshared": f"does not see the files in {shared}; set outputs= to a shared directory",
        "readonly": f"cannot write 1 MiB to {shared}: Read-only file system",
        "full": f"cannot write 1 MiB to {tmp_path / 'full'}: No space left on device",
        "code": f"{mine / 'slow.py'} differs from here; copy your code there, or use a shared directory",
    }
    config, script = str(cluster.folder / "config"), textwrap.dedent(CHECK)
    words = map(str, (shared, python, config, mine, "host2", *messages))
    sweep = (f"outputs={shared}", "--config-dir=mine", "+callbacks.slow._target_=slow.Slow", "model=mlp", "seed=0,1")
    on_hosts = f"hydra.launcher.python={python}"
    started = [
        cluster.hosts.python(commands, SUBMITTER, "-c", script, *words),
        cluster.start(*sweep[:3], *TINY, f"launcher.python={python}", names="host1,unshared,code"),
        cluster.start_sweep(*sweep, on_hosts, "backend=gloo", names="host1,code"),
        cluster.start_sweep(*sweep, on_hosts, "launcher=spawn", names="gpu"),  # has too few slots for two ranks
    ]
    listed, *refused = map(commands.finish, started)
    lines = listed.stdout.splitlines()
    assert len(lines) == len(messages), listed.stdout + listed.stderr
    for line, (name, message) in zip(lines, messages.items(), strict=True):
        assert line.startswith(f"launcher.hosts={name}: {message}"), line
    assert [(done.returncode, len(done.stderr.strip().splitlines())) for done in refused] == [(2, 2), (2, 1), (2, 2)]
    used = "warning: hydra.launcher.hosts=gpu: in use by other processes: GPU 0 (61,000 of 81,559 MiB)"
    for done, expected in zip(refused, ("hosts=code: ", "hydra.launcher.hosts=code: ", used), strict=True):
        assert expected in done.stderr, done.stderr
    assert not [path for path in shared.rglob("*") if path.is_file()]


@pytest.mark.fault("Ctrl-C of a run on several hosts by ssh", outcome="survived")
@pytest.mark.fault("kill -9 of a command whose run is on other hosts by ssh", outcome="survived")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_ranks_save_and_end_with_the_command(
    number: signal.Signals, cluster: Cluster, commands: Commands, tmp_path: Path
) -> None:
    write_files(tmp_path, SLOW)
    process = cluster.start(*LONG, "max_steps=100000")
    check_end_with_command(process, number, commands, tmp_path, cluster.wait_until_idle)


@pytest.mark.fault("the ssh connection to a host of a run is lost", outcome="survived")
@pytest.mark.fault("power failure of a host that ssh has reached", outcome="survived")
def test_a_lost_machine_that_returns_takes_part_again(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    write_files(tmp_path, SLOW)
    whole = run_undisturbed(tmp_path, 2, *LONG, "max_steps=120")
    process = cluster.start(*LONG, "max_steps=120", "launcher.max_restarts=2")
    wait_until(lambda: newest_step(tmp_path) >= 20, process)
    cluster.hosts.disconnect(2)  # the ranks save, and all are started again
    wait_until(lambda: newest_step(tmp_path) >= 40, process)
    found = only_run(tmp_path)
    assert [each.state for each in read_attempts(found.path)] == ["preempted"]
    cluster.hosts.lose(2, commands, cluster.servers[2])
    (tmp_path / "has-acted").touch()
    time.sleep(2)
    cluster.hosts.join(2)
    cluster.servers[2] = cluster.hosts.serve_ssh(commands, 2, cluster.folder)
    done = commands.finish(process)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^host2 is lost: (ssh|Connection|Timeout|client_loop)\b", done.stderr, re.MULTILINE), done.stderr
    assert found.result["weights_sha256"] == whole.result["weights_sha256"]
    assert len([*read_attempts(found.path)]) > 2


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


@pytest.mark.fault("one of three hosts that ssh has reached is cut off, and two are enough", outcome="survived")
def test_the_run_continues_on_the_machines_that_are_left(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    write_files(tmp_path, SLOW)
    options = (*LONG, "launcher.min_nodes=2", "launcher.max_restarts=2")
    process = cluster.start(*options, "max_steps=120", names="host1,host2,host3")
    wait_until(lambda: newest_step(tmp_path) >= 20, process)
    cluster.hosts.cut(3)
    (tmp_path / "has-acted").touch()
    done = commands.finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    found = only_run(tmp_path)
    attempts = [*read_attempts(found.path)]
    assert [each.world_size for each in attempts] == [3, 2]
    before = run_undisturbed(tmp_path, 3, *LONG, f"max_steps={attempts[1].first_step}")
    whole = run(tmp_path / "whole", 2, f"resume={before.path}", "max_steps=120")
    assert found.result["weights_sha256"] == whole.result["weights_sha256"]
    cluster.hosts.kill(commands, cluster.servers[3])


@pytest.mark.fault("kill -9 of a rank, and power failure of a host that ssh has reached", outcome="went_on")
def test_the_other_ranks_continue_in_place(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    """The command waits for the lost machine, with room for a restart, and ends without it."""
    write_files(tmp_path, SLOW)
    words = (*LONG, "precision=fp64", "max_steps=120", "log_every=1")
    whole = run_undisturbed(tmp_path, 1, *words)
    process = cluster.start(*words, "elastic_every_steps=2", "launcher.max_restarts=1")
    wait_until(lambda: newest_step(tmp_path) >= 20, process)
    log = only_run(tmp_path).path / "log.txt"
    os.kill(youngest_rank(cluster.living(2), "runner.launchers.agent"), signal.SIGKILL)
    wait_until(lambda: "joined: 2 ranks continued after step" in log.read_text(), process)
    alone = ": 1 rank continued after step"
    before = log.read_text().count(alone)
    cluster.hosts.lose(2, commands, cluster.servers[2])
    wait_until(lambda: log.read_text().count(alone) > before, process)
    (tmp_path / "has-acted").touch()
    done = commands.finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming" not in done.stdout
    check_equal(only_run(tmp_path), whole)


@pytest.mark.fault("power failure of a host and kill -9 of the command of a sweep by ssh", outcome="survived")
def test_a_sweep_survives_a_lost_machine_and_its_command(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    write_files(tmp_path, SLOW)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    jobs = (*JOB, "max_steps=40", "run_id=grid", "seed=range(12)")
    undisturbed = commands.fork("-m", *[word for word in jobs if word not in SLOWLY], "outputs=whole")
    env = f"hydra.launcher.env={{TMPDIR:{scratch}}}"
    process = cluster.start_sweep(*jobs, env, names="host1,host2,host3")
    sweep = tmp_path / "outputs" / "run" / "grid"

    def wait_for(*numbers: int) -> None:
        saved = [sweep / f"{number}-seed-{number}" / "checkpoints" / "step_20" for number in numbers]
        wait_until(lambda: all(path.exists() for path in saved), process)

    wait_for(0, 1, 2)
    cluster.hosts.kill(commands, cluster.servers[2])
    wait_for(3, 4)
    process.kill()
    assert "host2 is lost: " in commands.finish(process).stdout
    (tmp_path / "has-acted").touch()
    done = commands.finish(cluster.start_sweep("resume=last", env, names="host1,host3"))
    assert done.returncode == 0, done.stdout + done.stderr
    whole = commands.finish(undisturbed).stdout
    assert table_of(done.stdout) == table_of(whole) and "12 of 12 jobs finished" in done.stdout
    numbers = {job.number: job.num_starts for job in read_ledger(sweep)}
    assert sorted(numbers) == [*range(12)] and sum(numbers.values()) == 15, numbers
    for job in read_ledger(sweep):
        attempts = [*read_attempts(job.directory)]
        assert [each.state for each in attempts].count("finished") == 1, attempts
        assert all((each.first_step or 0) >= 20 for each in attempts[1:]), attempts
        twin = tmp_path / "whole" / "run" / "grid" / job.directory.name
        assert result_of(job.directory)["weights_sha256"] == result_of(twin)["weights_sha256"]
    cluster.wait_until_idle()
    assert not [path for path in scratch.iterdir() if not path.name.startswith("torchinductor_")]  # torch's cache
    assert not [*sweep.rglob("holder-*")] and not [*tmp_path.rglob(".shared-*")]


def table_of(output: str) -> list[str]:
    """Return the words of the table of jobs that a sweep prints at its end."""
    return re.split(r"\njob +state ", output)[-1].split("\n\n")[0].split()


def result_of(run: Path) -> dict[str, object]:
    return dict(json.loads((run / "result.json").read_text()))
