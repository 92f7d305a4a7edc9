"""elastic_every_steps on several machines: lost ranks, lost machines, machines that return or are cut off."""

import inspect
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest
from commands import Commands, newest_step, ranks_of, wait_until
from custom_files import SLOW, SLOWLY, write_files
from namespaces import Hosts, why_not
from sample_log import SampleLog, samples_of
from worlds import Run, only_run, run

from runner.records.attempts import read_attempts
from runner.records.run_files import read_checksums

PORT = 29400
EXACT = 1e-9
MODES = ("ddp", "allreduce")
JOB = (
    "model=mlp", "threads=1", "logger=none", "precision=fp64", "epochs=20", "eval_every=10",
    "max_steps=250", "log_every=1", "ema.decay=0.9", "clip_grad_norm=1",
)  # fmt: skip
ELASTIC = (
    *JOB, *SLOWLY, "elastic_every_steps=5", "backend.timeout_s=6", "checkpoint.every_steps=20", "launcher=torchrun",
)  # fmt: skip
CONTINUES = "this process does not join the run, which continues without it"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    hosts = Hosts(3)
    write_files(tmp_path, SLOW)
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the undisturbed run of one process."""
    logged = "+callbacks.log._target_=sample_log.SampleLog"
    return run(tmp_path_factory.mktemp("whole"), 1, *JOB, "backend=gloo", logged)


def start(hosts: Hosts, commands: Commands, host: int, store_on: int, *words: str) -> Popen[str]:
    if not any(word.startswith("parallel=") for word in words):
        words = (*words, "parallel=ddp")
    if not any(word.startswith("launcher.max_restarts=") for word in words):
        words = (*words, "launcher.max_restarts=3")
    endpoint = f"launcher.rdzv_endpoint={Hosts.address(store_on)}:{PORT}"
    return hosts.runner(commands, host, *ELASTIC, endpoint, *words)


def log(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("outputs/run/*/log.txt"))


def wait_for_log(folder: Path, text: str, *processes: Popen[str]) -> None:
    wait_until(lambda: text in log(folder) or any(process.poll() is not None for process in processes), timeout_s=120)
    assert text in log(folder), log(folder) + "".join(p.communicate()[1] for p in processes if p.poll() is not None)


def finish(commands: Commands, folder: Path, *processes: Popen[str]) -> Run:
    """Let the run end, and return it, after all of these commands have exited with status 0."""
    (folder / "has-acted").touch()
    ended = [commands.finish(process) for process in processes]
    output = "".join(each.stdout + each.stderr for each in ended)
    assert [each.returncode for each in ended] == [0] * len(ended), output
    assert "resuming" not in output, "no checkpoint is read"
    return only_run(folder)


def assert_equal(one: Run, whole: Run) -> None:
    """Compare weights, logged losses and the samples of the first steps, up to rounding in float64."""
    assert one.result["state"] == "finished"
    for name, weight in whole.weights.items():
        assert (one.weights[name] - weight).abs().max() <= EXACT * weight.abs().max(), name
    assert [line["step"] for line in one.lines] == [line["step"] for line in whole.lines]
    assert one.losses == pytest.approx(whole.losses, rel=EXACT)
    for found, expected in zip(read_checksums(one.path), read_checksums(whole.path), strict=True):
        assert found == pytest.approx(expected, rel=EXACT)
    assert {attempt.state for attempt in read_attempts(one.path)} <= {"regrouped", "finished", "killed"}


@pytest.mark.thorough
@pytest.mark.fault("kill -9 of a rank on any of several machines", outcome="went_on")
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_is_replaced_by_its_machine(
    killed: int, hosts: Hosts, commands: Commands, tmp_path: Path, whole: Run
) -> None:
    """The machines have one rank each; the other one continues, and serves the store or not."""
    nodes = ("launcher.nodes=2", "launcher.nproc_per_node=1")
    both = [start(hosts, commands, host, 1, *nodes) for host in (1, 2)]
    wait_until(lambda: newest_step(tmp_path) > 0, both[0])
    os.kill(ranks_of(commands, both[killed])[-1], signal.SIGKILL)
    wait_for_log(tmp_path, f"lost rank {killed} on host{killed + 1}", *both)
    wait_for_log(tmp_path, "2 ranks continued after step", *both)
    one = finish(commands, tmp_path, *both)
    assert_equal(one, whole)


FAILING = {
    "mine/failing.py": """\
        from pathlib import Path

        from runner import Callback


        class Failing(Callback):
            def after_step(self, now):
                if Path("fails").exists():
                    raise ValueError("wrong")
        """,
}


@pytest.mark.thorough
@pytest.mark.fault("kill -9 of the last rank of a machine, while others continue", outcome="went_on")
@pytest.mark.parametrize(("status", "store_on"), [(1, 1), (143, 2), (0, 1)])
def test_a_machine_without_ranks_ends_as_the_run_does(
    status: int, store_on: int, hosts: Hosts, commands: Commands, tmp_path: Path
) -> None:
    write_files(tmp_path, FAILING)
    words = ("launcher.nodes=2", "launcher.nproc_per_node=1", "launcher.max_restarts=0")
    words = (*words, "+callbacks.failing._target_=failing.Failing")
    both = [start(hosts, commands, host, store_on, *words) for host in (1, 2)]
    wait_until(lambda: newest_step(tmp_path) > 0, both[0])
    os.kill(ranks_of(commands, both[1])[-1], signal.SIGKILL)
    wait_for_log(tmp_path, "1 rank continued after step", *both)
    if status == 143:
        both[0].send_signal(signal.SIGTERM)
    else:
        (tmp_path / ("fails" if status else "has-acted")).touch()
    ended = [commands.finish(process) for process in both]
    assert [each.returncode for each in ended] == [status, status], ended


@pytest.mark.thorough
@pytest.mark.fault("the loss of a machine, which returns", outcome="went_on")
def test_a_lost_machine_returns(hosts: Hosts, commands: Commands, tmp_path: Path, whole: Run) -> None:
    """The store is on the third machine, and rank 0 on the first, which is lost."""
    nodes = ("launcher.nodes='1:3'", "launcher.nproc_per_node=1")
    all_three = [start(hosts, commands, host, 3, *nodes) for host in (1, 2, 3)]
    wait_until(lambda: newest_step(tmp_path) > 0, all_three[0])
    hosts.lose(1, commands, all_three[0])
    wait_for_log(tmp_path, "2 ranks continued after step", *all_three[1:])
    hosts.join(1)
    returned = start(hosts, commands, 1, 3, *nodes)
    wait_for_log(tmp_path, "3 ranks continued after step", *all_three[1:], returned)
    one = finish(commands, tmp_path, *all_three[1:], returned)
    assert_equal(one, whole)
    assert one.result["world_size"] == 3


@pytest.mark.thorough
@pytest.mark.fault("machines that are lost and join: 2, 1, 3, 2 machines in one run", outcome="went_on")
@pytest.mark.parametrize("mode", ["ddp", "zero"])
def test_machines_leave_and_join(mode: str, hosts: Hosts, commands: Commands, tmp_path: Path, whole: Run) -> None:
    """With zero, the machine that is left has the optimizer state of the lost one."""
    header = "import json\nfrom typing import Any\n\nfrom runner import Callback\n\n\n"
    write_files(tmp_path, {"mine/sampled.py": header + inspect.getsource(SampleLog)})
    logged = "+callbacks.log._target_=sampled.SampleLog"
    words = (
        "launcher.nodes='2:3'",
        "launcher.nproc_per_node=1",
        "launcher.join_timeout_s=20",
        f"parallel={mode}",
        logged,
    )
    first, second = (start(hosts, commands, host, 1, *words) for host in (1, 2))
    wait_until(lambda: newest_step(tmp_path) > 0, first)
    hosts.lose(2, commands, second)
    wait_for_log(tmp_path, "1 rank continued after step", first)
    hosts.join(2)
    second, third = (start(hosts, commands, host, 1, *words) for host in (2, 3))
    wait_for_log(tmp_path, "3 ranks continued after step", first, second, third)
    hosts.lose(3, commands, third)
    wait_until(lambda: log(tmp_path).count("lost rank") == 2, first)
    one = finish(commands, tmp_path, first, second)
    assert_equal(one, whole)
    assert one.result["world_size"] == 2
    read = {step: sorted({*map(tuple, pairs)}) for step, pairs in samples_of(one).items()}  # once more if done again
    assert read == {step: [*map(tuple, pairs)] for step, pairs in samples_of(whole).items()}


@pytest.mark.thorough
def test_a_machine_joins_a_run_of_one_rank(hosts: Hosts, commands: Commands, tmp_path: Path, whole: Run) -> None:
    nodes = ("launcher.nodes='1:2'", "launcher.join_timeout_s=2")
    first = start(hosts, commands, 1, 1, *nodes, "launcher.nproc_per_node=1")
    wait_until(lambda: newest_step(tmp_path) > 0, first)
    second = start(hosts, commands, 2, 1, *nodes, "launcher.nproc_per_node=2")
    wait_for_log(tmp_path, "3 ranks continued after step", first, second)
    one = finish(commands, tmp_path, first, second)
    assert_equal(one, whole)


@pytest.mark.thorough
@pytest.mark.fault("a machine that joins with another configuration or other code", outcome="went_on")
def test_a_machine_that_would_compute_something_else_is_refused(
    hosts: Hosts, commands: Commands, tmp_path: Path, whole: Run
) -> None:
    nodes = ("launcher.nodes='1:2'", "launcher.join_timeout_s=2")
    first = start(hosts, commands, 1, 1, *nodes, "launcher.nproc_per_node=1")
    wait_until(lambda: newest_step(tmp_path) > 0, first)
    wrong = commands.finish(start(hosts, commands, 2, 1, *nodes, "launcher.nproc_per_node=2", "optimizer.lr=0.7"))
    code = tmp_path / "mine" / "slow.py"
    original = code.read_text()
    code.write_text(f"{original}\n# changed\n")
    changed = commands.finish(start(hosts, commands, 2, 1, *nodes, "launcher.nproc_per_node=1"))
    code.write_text(original)
    for refused, message in (
        (wrong, "optimizer.lr=0.7 on host2, but 0.05 on rank 0; start all ranks with the same arguments"),
        (changed, "host2 has other code than rank 0 (slow); copy the same code to all machines"),
    ):
        assert refused.returncode == 2, refused.stderr
        assert refused.stderr.splitlines()[-2:] == [message, CONTINUES], refused.stderr
    right = start(hosts, commands, 2, 1, *nodes, "launcher.nproc_per_node=1")
    wait_for_log(tmp_path, "2 ranks continued after step", first, right)
    one = finish(commands, tmp_path, first, right)
    assert_equal(one, whole)


@pytest.mark.thorough
@pytest.mark.leaves_tmp
@pytest.mark.fault("the loss of the machine that serves the store of an elastic run", outcome="refused")
def test_the_machine_of_the_store_is_lost(hosts: Hosts, commands: Commands, tmp_path: Path, whole: Run) -> None:
    nodes = ("launcher.nodes=2", "launcher.nproc_per_node=1")
    first, second = (start(hosts, commands, host, 1, *nodes) for host in (1, 2))
    wait_until(lambda: newest_step(tmp_path) > 0, first)
    hosts.lose(1, commands, first)
    ended = commands.finish(second)
    path = only_run(tmp_path).path
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "the rendezvous of the nodes, is lost: it does not respond" in ended.stderr
    assert f"resume={path}" in ended.stderr
    assert only_run(tmp_path).result["state"] == "running", "another machine might continue the run"
    hosts.join(1)
    both = [start(hosts, commands, host, 1, *nodes, f"resume={path}") for host in (1, 2)]
    (tmp_path / "has-acted").touch()
    assert [commands.finish(process).returncode for process in both] == [0, 0]
    assert_equal(Run(path), whole)


@pytest.mark.thorough
@pytest.mark.leaves_tmp
@pytest.mark.fault("a machine that is cut off, and returns before or after its ranks have ended", outcome="went_on")
@pytest.mark.parametrize("returns_after_s", [9, 60])
def test_a_machine_is_cut_off(
    returns_after_s: int, hosts: Hosts, commands: Commands, tmp_path: Path, whole: Run
) -> None:
    """Rank 0 is on the first machine, which is cut off and keeps the shared directory; the store is on the second."""
    nodes = ("launcher.nodes='1:2'", "launcher.nproc_per_node=1", "launcher.join_timeout_s=40")
    both = [start(hosts, commands, host, 2, *nodes) for host in (1, 2)]
    wait_until(lambda: newest_step(tmp_path) > 0, both[0])
    hosts.cut(1)
    if returns_after_s > 30:
        ended = commands.finish(both[0])
        assert ended.returncode == 1
        assert "stops, and records nothing: the ranks' store at" in ended.stderr, ended.stderr
        wait_for_log(tmp_path, "1 rank continued after step", both[1])
        hosts.join(1)
        both[0] = start(hosts, commands, 1, 2, *nodes)
    else:
        time.sleep(returns_after_s)
        hosts.join(1)
        wait_for_log(tmp_path, "lost rank 0 on host1", both[1])  # a rank may have joined at once
    wait_for_log(tmp_path, "2 ranks continued after step", both[1])
    one = finish(commands, tmp_path, *both)
    assert_equal(one, whole)
    assert one.result["world_size"] == 2


@pytest.mark.soak
@pytest.mark.fault("kill -9 of random ranks on several machines at random moments", outcome="went_on")
@pytest.mark.parametrize("seed", range(20))
def test_random_kills_on_machines(seed: int, hosts: Hosts, commands: Commands, tmp_path: Path, whole: Run) -> None:
    """One of the kills may lose a whole machine, but not that of the store, the third."""
    draw = random.Random(seed)
    nodes = ("launcher.nodes='1:3'", f"launcher.nproc_per_node={draw.choice((1, 2))}", f"parallel={draw.choice(MODES)}")
    agents = [start(hosts, commands, host, 3, *nodes) for host in (1, 2, 3)]
    wait_until(lambda: newest_step(tmp_path) > 0, agents[0])
    for number in range(3):
        time.sleep(draw.uniform(0, 2))
        victim = draw.choice(agents[:-1])
        if number == 1 and draw.random() < 0.5:
            hosts.kill(commands, victim)
            agents.remove(victim)
        else:
            wait_until(lambda: bool(ranks_of(commands, victim)), victim)  # noqa: B023
            os.kill(draw.choice(ranks_of(commands, victim)), signal.SIGKILL)
    one = finish(commands, tmp_path, *agents)
    assert_equal(one, whole)
