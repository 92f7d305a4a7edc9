"""Runs and sweeps on a Ray cluster: reservations, lost nodes, and what is left on the nodes."""

import json
import os
import re
import select
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from commands import Commands, newest_step, wait_until
from custom_files import SLOW, SLOWLY, write_files
from machine_runs import JOB, LONG, TINY, check_end_with_command, check_equal, run_undisturbed
from namespaces import why_not
from ray_cluster import ENV, HEAD, RayCluster
from worlds import only_run, run

from runner.records.attempts import read_attempts
from runner.records.ledger import read_ledger

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")


class Cluster:
    """A cluster of three nodes, and the commands of one test."""

    def __init__(self, nodes: RayCluster, commands: Commands):
        self.nodes, self.commands = nodes, commands

    def start(self, *args: str) -> Popen[str]:
        return self.nodes.runner(self.commands, "launcher=ray", *args)

    def start_sweep(self, *args: str) -> Popen[str]:
        address = f"hydra.launcher.address={self.nodes.address}"
        return self.nodes.runner(self.commands, "-m", "hydra/launcher=ray", address, *args)

    def wait_until_idle(self) -> None:
        wait_until(lambda: not self.nodes.busy())


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    if reason := why_not():
        pytest.skip(reason)
    cluster = RayCluster(Commands(tmp_path_factory.mktemp("ray")), 3)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(nodes: RayCluster, commands: Commands) -> Cluster:
    nodes.restore()
    return Cluster(nodes, commands)


@pytest.mark.thorough
def test_two_nodes_produce_the_weights_of_one_machine(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    here = run(tmp_path / "here", 4, *TINY)
    done = commands.finish(cluster.start(*TINY, "launcher.nodes=2", "launcher.wait=true"))
    assert done.returncode == 0, done.stderr
    assert "4 processes (ray)" in done.stdout and "finished: val/accuracy" in done.stdout
    result = only_run(tmp_path).result
    assert result["weights_sha256"] == here.result["weights_sha256"]
    assert len(set(result["hosts"])) == 2 and "host1" not in result["hosts"]
    cluster.wait_until_idle()


@pytest.mark.thorough
@pytest.mark.fault("a Ray cluster that is too small, in use, or does not respond", outcome="refused")
@pytest.mark.fault("a node of Ray without the runner", outcome="refused")
def test_what_the_cluster_lacks_is_refused_or_waited_for(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    lacks = """\
        import sys


        class Lacking:
            def find_spec(self, name, path=None, target=None):
                if name == "runner":
                    raise ModuleNotFoundError("No module named 'runner'")


        sys.meta_path.insert(0, Lacking())
        """
    write_files(tmp_path, {"mine/sitecustomize.py": lacks})
    waiting = cluster.start(*TINY, "launcher.nodes=4", "launcher.wait=true")
    server = cluster.nodes.hosts.python(commands, HEAD, "-m", "http.server", "8265")
    has = "host1: CPU 0; host2: CPU 2; host3: CPU 2; host4: CPU 2"
    cases = {
        ("launcher.nodes=4",): f"launcher.nodes=4 with CPU 2 each: 3 nodes of the Ray cluster have that ({has})",
        ("launcher.gpus_per_node=2",): "launcher.nodes=1 with CPU 2, GPU 2 each: 0 nodes of the Ray cluster have that",
        ("launcher.labels={zone:far}",): (
            "launcher.nodes=1 with CPU 2 and launcher.labels={zone:far}: not free (in the whole cluster: CPU "
        ),
        ("model.hidden=0",): "model.hidden",
        ("launcher.address=10.213.7.1:1",): "launcher.address=10.213.7.1:1: no Ray cluster responds there",
        ("launcher.address=10.213.7.1:8265",): (
            "launcher.address=10.213.7.1:8265: no Ray cluster responds there (no response within 5 s)"
        ),
        (f"launcher.env={{PYTHONPATH:{tmp_path / 'mine'}}}",): "No module named 'runner'",
    }
    started = {cluster.start(*TINY, *args): message for args, message in cases.items()}
    for process, message in started.items():
        done = commands.finish(process)
        assert done.returncode == 2, done.stdout + done.stderr
        assert len(done.stderr.strip().splitlines()) <= 3
        assert message in done.stderr, done.stderr
    commands.kill(server)
    wait_until(lambda: bool(select.select([waiting.stderr], [], [], 0)[0]), waiting)
    os.killpg(waiting.pid, signal.SIGINT)
    done = commands.finish(waiting)
    assert done.returncode == 143
    assert done.stderr.startswith("waiting for launcher.nodes=4 with CPU 2; free in the whole cluster: CPU ")
    assert not (tmp_path / "outputs").exists() or not any((tmp_path / "outputs").rglob("result.json"))
    cluster.wait_until_idle()


@pytest.mark.thorough
@pytest.mark.fault("Ctrl-C of a run on nodes of Ray", outcome="survived")
@pytest.mark.fault("kill -9 of a command whose run is on nodes of Ray", outcome="survived")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_ranks_save_and_end_with_the_command(
    number: signal.Signals, cluster: Cluster, commands: Commands, tmp_path: Path
) -> None:
    write_files(tmp_path, SLOW)
    process = cluster.start(*LONG, "max_steps=100000", "launcher.nodes=2", "launcher.nproc_per_node=1")
    check_end_with_command(process, number, commands, tmp_path, cluster.wait_until_idle)


@pytest.mark.thorough
@pytest.mark.fault("kill -9 of all processes of the Ray node of rank 0", outcome="survived")
def test_a_lost_node_is_replaced(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    write_files(tmp_path, SLOW)
    whole = run_undisturbed(tmp_path, 2, *LONG, "max_steps=120")
    two = ("launcher.nodes=2", "launcher.nproc_per_node=1", "launcher.max_restarts=2")
    process = cluster.start(*LONG, *two, "max_steps=120")
    wait_until(lambda: newest_step(tmp_path) >= 20, process)
    host = int(only_run(tmp_path).result["hosts"][0].removeprefix("host"))
    cluster.nodes.lose(host)
    (tmp_path / "has-acted").touch()
    done = commands.finish(process)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^host{host} is lost: ", done.stderr, re.MULTILINE), done.stderr
    found = only_run(tmp_path)
    assert found.result["weights_sha256"] == whole.result["weights_sha256"]
    assert f"host{host}" not in found.result["hosts"] and len([*read_attempts(found.path)]) > 1


@pytest.mark.thorough
@pytest.mark.fault("kill -9 of all processes of a Ray node, and others are enough", outcome="went_on")
def test_the_run_continues_on_the_nodes_that_are_left(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    write_files(tmp_path, SLOW)
    options = ("launcher.nodes=1:2", "launcher.nproc_per_node=1", "launcher.max_restarts=2", "max_steps=200")
    process = cluster.start(*LONG, *options)
    wait_until(lambda: newest_step(tmp_path) >= 20, process)
    cluster.nodes.lose(int(only_run(tmp_path).result["hosts"][0].removeprefix("host")))
    (tmp_path / "has-acted").touch()
    done = commands.finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    assert only_run(tmp_path).result["world_size"] == 1


@pytest.mark.soak
@pytest.mark.fault("kill -9 of all processes of a Ray node, whose ranks start on another one", outcome="went_on")
def test_a_lost_node_is_replaced_in_place(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    """The ranks of the new node join a minute after the loss."""
    write_files(tmp_path, SLOW)
    words = (*LONG, "precision=fp64", "max_steps=600", "log_every=1")
    whole = run_undisturbed(tmp_path, 1, *words)
    options = ("launcher.nodes=2", "launcher.nproc_per_node=1", "launcher.max_restarts=1", "elastic_every_steps=2")
    process = cluster.start(*words, *options)
    wait_until(lambda: newest_step(tmp_path) >= 20, process)
    found = only_run(tmp_path)
    cluster.nodes.lose(int(found.result["hosts"][0].removeprefix("host")))
    for event in (": 1 rank continued after step", "1 joined: 2 ranks continued after step"):
        wait_until(lambda: event in (found.path / "log.txt").read_text(), process)  # noqa: B023
    (tmp_path / "has-acted").touch()
    done = commands.finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming" not in done.stdout
    check_equal(found, whole)


@pytest.mark.thorough
@pytest.mark.fault("kill -9 of all processes of a Ray node on which a sweep runs", outcome="survived")
@pytest.mark.fault("kill -9 of a command whose sweep is on nodes of Ray", outcome="survived")
def test_a_sweep_survives_the_loss_of_a_node_and_of_its_command(
    cluster: Cluster, commands: Commands, here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path, SLOW)
    words = (*JOB, "max_steps=40", "seed=range(7)")
    assert here("-m", *[word for word in words if word not in SLOWLY], "run_id=whole") == 0
    whole, sweep = tmp_path / "outputs" / "run" / "whole", tmp_path / "outputs" / "run" / "grid"
    process = cluster.start_sweep(*words, "run_id=grid", "hydra.launcher.nodes=1:3", "hydra.launcher.slots=1")
    lost = sweep / "1-seed-1"
    wait_until(lambda: (lost / "checkpoints" / "step_20").exists(), process)
    cluster.nodes.lose(int(result_of(lost)["hosts"][0].removeprefix("host")))
    wait_until(lambda: sum(job.state == "finished" for job in read_ledger(sweep)) >= 3, process)
    os.killpg(process.pid, signal.SIGKILL)
    assert " is lost: " in commands.finish(process).stdout
    cluster.wait_until_idle()
    (tmp_path / "has-acted").touch()
    done = commands.finish(cluster.start_sweep("resume=last"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert table_of(done.stdout) == table_of(capsys.readouterr().out) and "7 of 7 jobs finished" in done.stdout
    for job in read_ledger(sweep):
        ended = [attempt.state for attempt in read_attempts(job.directory)]
        assert ended.count("finished") == 1 and ended[-1] == "finished" and len(ended) == job.num_starts
        assert result_of(job.directory)["weights_sha256"] == result_of(whole / job.label)["weights_sha256"]
    cluster.wait_until_idle()
    cluster.nodes.restore()  # waits until nothing is reserved


@pytest.mark.thorough
def test_a_signal_ends_the_check_of_the_nodes(cluster: Cluster, commands: Commands, tmp_path: Path) -> None:
    waits = """\
        import sys
        import time
        from pathlib import Path

        if "runner.launchers.host_facts" in sys.orig_argv:
            Path("waits").touch()
            deadline = time.monotonic() + 300
            while not Path("released").exists() and time.monotonic() < deadline:
                time.sleep(0.1)
        """
    write_files(tmp_path, {"mine/sitecustomize.py": waits})
    process = cluster.start(*TINY, f"launcher.env={{PYTHONPATH:{tmp_path / 'mine'}}}")
    wait_until((tmp_path / "waits").exists, process)
    process.send_signal(signal.SIGTERM)
    assert commands.finish(process, timeout_s=60).returncode == 143  # long before the check would end by itself
    (tmp_path / "released").touch()
    cluster.wait_until_idle()


@pytest.mark.thorough
def test_a_process_runs_one_sweep_after_another_each_on_a_ray_of_its_own(
    nodes: RayCluster, commands: Commands, tmp_path: Path
) -> None:
    words = [*(word for word in TINY if word != "parallel=ddp"), "max_steps=2", "seed=0,1"]
    ray = ["hydra/launcher=ray", "hydra.launcher.address=local"]
    optuna = ["hydra/sweeper=optuna", "hydra.sweeper.n_jobs=2", "hydra.sweeper.n_trials=2"]
    calls = [f"runner.sweep({[*words, *ray, *sweeper]})" for sweeper in ([], optuna)]
    script = f"import runner; assert {{run.state for run in {' + '.join(calls)}}} == {{'finished'}}"
    process = commands.start("-c", script, env={**ENV, "RAY_TMPDIR": str(nodes.temporary / "local")})
    done = commands.finish(process)
    assert done.returncode == 0, done.stdout + done.stderr


def result_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "result.json").read_text()))


def table_of(output: str) -> list[str]:
    """Return the lines of the table of jobs that a sweep prints at its end."""
    lines = output.splitlines()
    first = next(number for number, line in enumerate(lines) if re.match("job +state ", line))
    return lines[first : lines.index("", first)]
