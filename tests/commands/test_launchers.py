"""Launchers on one machine: identical weights, and no process that outlives its parent or a Ctrl-C."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Commands, free_port, newest_step, ranks_of, wait_until
from custom_files import SLOW, SLOWLY, write_files
from worlds import only_run, run

from runner.checkpoints.layout import list_checkpoints
from runner.process import socket_paths
from runner.records.attempts import read_attempts
from runner.records.interruptions import read_interruptions

TINY = ("model=mlp", "parallel=ddp", "threads=1", "logger=none")
LONG = (*TINY, *SLOWLY, "epochs=100000", "log_every=100")
MODULES = {"torchrun": "torch.distributed.run", "launch": "torch.distributed.launch"}
CHOSEN = {"spawn": ("launcher=spawn",), "agent": ("launcher=torchrun",)}
soak = pytest.mark.soak
FOUND = {"torchrun": "torchrun", "launch": "torchrun", "spawn": "spawn", "agent": "torchrun"}


def start(commands: Commands, way: str, *args: str, num_ranks: int = 2) -> "subprocess.Popen[str]":
    if way in MODULES:
        where = (f"--nproc-per-node={num_ranks}", f"--master-port={free_port()}")
        return commands.start("-m", MODULES[way], *where, "-m", "runner", *args)
    return commands.start("-m", "runner", *args, *CHOSEN[way], f"launcher.nproc_per_node={num_ranks}")


@pytest.mark.parametrize(
    ("way", "num_ranks"),
    [
        pytest.param("torchrun", 2, marks=pytest.mark.thorough),
        pytest.param("spawn", 2, marks=pytest.mark.thorough),
        pytest.param("agent", 4, marks=pytest.mark.thorough),
        *(
            pytest.param(*case, marks=soak)
            for case in (("torchrun", 1), ("launch", 2), *((way, 4) for way in FOUND if way != "agent"))
        ),
    ],
)
def test_every_launcher_produces_the_same_weights(way: str, num_ranks: int, commands: Commands, tmp_path: Path) -> None:
    here = run(tmp_path / "here", num_ranks, *TINY, "epochs=1", "backend=gloo")
    done = commands.finish(start(commands, way, *TINY, "epochs=1", num_ranks=num_ranks))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"process{'es' if num_ranks > 1 else ''} ({FOUND[way]})" in done.stdout
    one = only_run(tmp_path)
    assert one.result["weights_sha256"] == here.result["weights_sha256"]
    assert one.result["world_size"] == num_ranks
    assert done.stdout == (one.path / "log.txt").read_text()


@pytest.mark.thorough
def test_simultaneous_runs_use_different_ports_and_directories(commands: Commands, tmp_path: Path) -> None:
    together = [start(commands, way, *TINY, "epochs=1") for way in ("agent", "spawn")]
    done = [commands.finish(process) for process in together]
    assert [each.returncode for each in done] == [0, 0], "".join(each.stderr for each in done)
    assert len(list((tmp_path / "outputs" / "run").iterdir())) == 2


@pytest.mark.fault("kill -9 of the agent", outcome="refused")
@pytest.mark.thorough
@pytest.mark.parametrize("way", ["torchrun", "agent", pytest.param("spawn", marks=soak)])
def test_ranks_save_and_exit_after_their_parent_was_killed(
    way: str, commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They exit once they have saved, not after the grace period, which is longer here than the test waits."""
    write_files(
        tmp_path, {"site/sitecustomize.py": "import runner.distributed.failures.signals as s; s.PARENT_GRACE_S = 600.0"}
    )
    monkeypatch.setenv("PYTHONPATH", commands.with_path(tmp_path / "site")["PYTHONPATH"])
    process = start_and_wait(commands, way, tmp_path, "loader.num_workers=2")
    process.kill()
    wait_until(lambda: commands.living(process) == [])
    one = only_run(tmp_path)
    assert one.result["error"] is None
    assert one.result["state"] == "preempted"
    log = (one.path / "log.txt").read_text()
    # The rank that notices it first stops the others.
    assert re.search(r"(the process that started this rank has exited|a signal to another rank): saved after step", log)
    # A checkpoint whose writing failed with the store of that process is written again at the end.
    assert list_checkpoints(one.path / "checkpoints")[-1].name == f"step_{one.result['step']}"


@pytest.mark.fault("rank 0 stopped by SIGSTOP", outcome="refused")
@pytest.mark.leaves_tmp  # rank 0's temporary directory of the best checkpoint
@pytest.mark.thorough
@pytest.mark.parametrize("way", ["hand", "agent", *(pytest.param(way, marks=soak) for way in ("spawn", "torchrun"))])
def test_a_stopped_rank_0_is_named_and_all_ranks_exit(way: str, commands: Commands, tmp_path: Path) -> None:
    """Started by hand, rank 0 serves the ranks' store itself, which then does not respond."""
    args = (*LONG, "backend.timeout_s=20", "checkpoint.every_epochs=100000")
    write_files(tmp_path, SLOW)
    if way == "hand":
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        started = [commands.fork(*args, env={**world, "RANK": str(rank)}) for rank in range(2)]
    else:
        started = [start(commands, way, *args)]
    wait_until(lambda: any("epoch " in log.read_text() for log in tmp_path.glob("outputs/run/*/log.txt")), started[0])
    (holder,) = tmp_path.glob("outputs/run/*/holder-*.json")
    os.kill(json.loads(holder.read_text())["pid"], signal.SIGSTOP)
    ended = [commands.finish(process) for process in started]
    assert [each.returncode for each in ended] == ([-signal.SIGKILL, 1] if way == "hand" else [1])
    output = [line for line in ended[-1].stderr.splitlines() if line.startswith("no response from rank 0 on ")]
    assert len(output) == 1, ended[-1].stderr
    assert " within backend.timeout_s=20: in " in output[0] and ", stopped by a signal" in output[0]
    result = only_run(tmp_path).result
    assert result["state"] == "failed" and output[0] in result["error"]
    assert all(commands.living(process) == [] for process in started)


def start_and_wait(commands: Commands, way: str, tmp_path: Path, *args: str) -> "subprocess.Popen[str]":
    """Start the command, and wait until its ranks have saved a checkpoint."""
    write_files(tmp_path, SLOW)
    process = start(commands, way, *LONG, *args)
    wait_until(lambda: newest_step(tmp_path) > 0, process)
    return process


@pytest.mark.fault("kill -9 of a rank that is restarted", outcome="survived")
@pytest.mark.thorough
@pytest.mark.parametrize("way", ["agent", pytest.param("spawn", marks=soak)])
def test_a_killed_rank_is_replaced_and_the_run_continues_in_its_directory(
    way: str, commands: Commands, tmp_path: Path
) -> None:
    long = (*TINY, "epochs=10", "eval_every=10")
    whole = run(tmp_path / "here", 2, *long, "backend=gloo")
    write_files(tmp_path, SLOW)
    process = start(commands, way, *long, *SLOWLY, "loader.num_workers=2", "launcher.max_restarts=1")
    wait_until(lambda: newest_step(tmp_path) > 0, process)
    os.kill(ranks_of(commands, process)[-1], signal.SIGKILL)
    (tmp_path / "has-acted").touch()
    done = commands.finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    one = only_run(tmp_path)
    assert done.stdout.count("resuming after step") == 1
    assert one.result["weights_sha256"] == whole.result["weights_sha256"]
    assert [attempt.continues for attempt in read_attempts(one.path)] == [False, True]
    assert len([*read_interruptions(one.path)]) == 1


@pytest.mark.fault(
    "kill -9 of ranks, of which the launcher replaces the first while the others continue", outcome="went_on"
)
@pytest.mark.thorough
def test_others_continue_without_a_killed_rank(commands: Commands, tmp_path: Path) -> None:
    long = (*TINY, "epochs=10", "eval_every=10", "precision=fp64")
    whole = run(tmp_path / "here", 2, *long, "backend=gloo")
    write_files(tmp_path, SLOW)
    elastic = ("elastic_every_steps=5", "loader.num_workers=2", "launcher.max_restarts=1")
    process = start(commands, "spawn", *long, *SLOWLY, *elastic)

    def log() -> str:
        return "".join(path.read_text() for path in tmp_path.glob("outputs/run/*/log.txt"))

    wait_until(lambda: newest_step(tmp_path) > 0, process)
    os.kill(ranks_of(commands, process)[-1], signal.SIGKILL)
    wait_until(lambda: "2 ranks continued after step" in log(), process)
    os.kill(ranks_of(commands, process)[-1], signal.SIGKILL)
    wait_until(lambda: "1 rank continued after step" in log(), process)
    (tmp_path / "has-acted").touch()
    done = commands.finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    one = only_run(tmp_path)
    assert "resuming" not in done.stdout
    for name, weight in whole.weights.items():
        assert (one.weights[name] - weight).abs().max() <= 1e-9 * weight.abs().max(), name
    assert one.losses == pytest.approx(whole.losses, rel=1e-9)
    attempts = [*read_attempts(one.path)]
    assert [attempt.state for attempt in attempts][-1] == "finished"
    assert {attempt.state for attempt in attempts[:-1]} == {"regrouped"}
    assert "lost rank 1 on" in (attempts[-1].reason or "")
    assert sum("lost rank 1 on" in found.cause for found in read_interruptions(one.path)) == 2


@pytest.mark.fault("kill -9 of a rank after its code was changed: its replacement is refused", outcome="went_on")
@pytest.mark.thorough
def test_a_rank_is_not_replaced_by_one_with_other_code(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of the agent's file that the refused process creates
    write_files(tmp_path, SLOW)
    elastic = ("epochs=10", "eval_every=10", "elastic_every_steps=5", "launcher.max_restarts=2")
    process = start(commands, "spawn", *TINY, *SLOWLY, *elastic)
    wait_until(lambda: newest_step(tmp_path) > 0, process)
    code = tmp_path / "mine" / "slow.py"
    code.write_text(f"{code.read_text()}\n# changed\n")
    os.kill(ranks_of(commands, process)[-1], signal.SIGKILL)
    wait_until(lambda: any(tmp_path.glob("*/*-refused")), process)
    (tmp_path / "has-acted").touch()
    done = commands.finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "has other code than rank 0 (slow); copy the same code to all machines" in done.stderr
    assert "this process does not join the run, which continues without it" in done.stderr
    assert only_run(tmp_path).result["world_size"] == 1


@pytest.mark.fault("kill -9 of a rank that is not restarted", outcome="refused")
@pytest.mark.thorough
def test_a_killed_rank_that_is_not_replaced_is_reported_once(commands: Commands, tmp_path: Path) -> None:
    process = start_and_wait(commands, "agent", tmp_path, "loader.num_workers=2")
    os.kill(ranks_of(commands, process)[-1], signal.SIGKILL)
    done = commands.finish(process)
    assert done.returncode == 1
    assert done.stderr.count("rank 1 on") == 1 and "died: SIGKILL" in done.stderr, done.stderr
    wait_until(lambda: commands.living(process) == [])


SLURM = (
    "launcher=slurm", "launcher.nodes=2", "launcher.time='1:00:00'", "launcher.exclusive=true",
    "launcher.sbatch={constraint:h100,overcommit:true}", "launcher.modules=[cuda/12]",
    "launcher.setup=['ulimit -n 4096']", "launcher.env={NAME:'$HOME/a \"b'}",
    "launcher.prefix='apptainer exec --bind $SCRATCH:/scratch i.sif'",
)  # fmt: skip
SCRIPT = (
    "#SBATCH --nodes=2", "#SBATCH --time=1:00:00", "#SBATCH --exclusive", "#SBATCH --constraint=h100",
    "#SBATCH --overcommit", "module load cuda/12", 'NAME="$HOME/a \\"b" && export NAME',
    "ulimit -n 4096",
)  # fmt: skip


def test_without_slurm_sbatch_is_named_and_dry_run_prints_the_script(
    here: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bash = shutil.which("bash")
    assert bash
    monkeypatch.setenv("PATH", "/nowhere")
    assert here(*TINY, "launcher=slurm") == 2
    missed = "launcher=slurm needs sbatch, which is not on this machine; launcher.dry_run=true"
    assert capfd.readouterr().err.startswith(missed)
    assert here(*TINY, *SLURM, "launcher.dry_run=true") == 0
    shown = capfd.readouterr().out
    assert [line for line in SCRIPT if f"{line}\n" not in shown] == [], shown
    inside = '    exec apptainer exec --bind $SCRATCH:/scratch i.sif env RUNNER_DIRECTORY="$RUNNER_DIRECTORY" '
    assert inside in shown and ' NAME="$NAME" ' in shown
    (args,) = (line for line in shown.splitlines() if line.startswith("overrides=("))
    assert "launcher.dry_run" not in args and "launcher=slurm launcher.nodes=2" in args
    assert "127.0.0.1" not in shown and "cpus-per-task" not in shown
    subprocess.run([bash, "-n"], input=shown, text=True, check=True, timeout=120)
    assert not (tmp_path / "outputs").exists()


@pytest.mark.fault("a TMPDIR that is too long for the paths of sockets", outcome="survived")
@pytest.mark.parametrize(
    "args",
    [("loader.num_workers=1",), pytest.param(("launcher=spawn", "parallel=ddp"), marks=pytest.mark.thorough)],
    ids=["worker", "spawn"],
)
def test_a_command_works_with_a_long_tmpdir(args: tuple[str, ...], commands: Commands, tmp_path: Path) -> None:
    """Batch systems set it to a directory of the job. multiprocessing creates its sockets there."""
    write_files(tmp_path, MANAGER)
    long = tmp_path / ("job-" * 20) / ("node-" * 20)
    long.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="pymp", dir="/tmp") as short:  # a forked command does not remove its own

        def prepare() -> None:
            tempfile.tempdir = str(long)  # found before the command was forked
            socket_paths.SHORT = (short,)

        args = ("--config-dir=mine", "callbacks=manager", "model=mlp", "max_steps=2", "logger=none", *args)
        done = commands.forked(*args, env={"TMPDIR": str(long)}, prepare=prepare, timeout_s=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from the manager" in done.stdout
    assert not [*long.glob("pymp-*")]


# A callback whose process listens at a socket.
MANAGER = {
    "mine/manager.py": """\
        import multiprocessing

        from runner import Callback


        class Manager(Callback):
            def on_start(self, run):
                with multiprocessing.get_context("fork").Manager() as manager:
                    print(manager.list(["from the manager"])[0], flush=True)
        """,
    "mine/callbacks/manager.yaml": """\
        manager:
          _target_: manager.Manager
        """,
}
