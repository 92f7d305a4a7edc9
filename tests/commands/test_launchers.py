"""Launchers on one machine: the same numbers by each, and no process that outlives its parent or a Ctrl-C."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from commands import Commands, free_port, is_loopback, listening, wait_until
from worlds import MODES, Run, configure, run

from runner.distributed.environment import RankInfo
from runner.errors import InputError, JobFailed, Preempted
from runner.launchers.launch import launch
from runner.launchers.rank_process import conclude
from runner.launchers.slurm.launcher import Slurm
from runner.launchers.spawn import Spawn
from runner.launchers.torchrun import Torchrun
from runner.training.trainer import Trainer

TINY = ("model=mlp", "parallel=ddp", "threads=1", "logger=none")
LONG = (*TINY, "epochs=100000", "log_every=100")
MODULES = {"torchrun": "torch.distributed.run", "launch": "torch.distributed.launch"}
CHOSEN = {"spawn": ("launcher=spawn",), "agent": ("launcher=torchrun",)}
FOUND = {"torchrun": "torchrun", "launch": "torch.distributed.launch", "spawn": "spawn", "agent": "torchrun"}


def start(commands: Commands, way: str, *words: str, num_ranks: int = 2) -> "subprocess.Popen[str]":
    if way in MODULES:
        where = (f"--nproc-per-node={num_ranks}", f"--master-port={free_port()}")
        return commands.start("-m", MODULES[way], *where, "-m", "runner", *words)
    return commands.start("-m", "runner", *words, *CHOSEN[way], f"launcher.nproc_per_node={num_ranks}")


@pytest.mark.parametrize(
    ("way", "num_ranks"), [("torchrun", 1), ("launch", 1), ("launch", 2), *((way, 4) for way in FOUND)]
)
def test_the_same_weights_by_every_launcher(way: str, num_ranks: int, commands: Commands, tmp_path: Path) -> None:
    here = run(tmp_path / "here", num_ranks, *TINY, "epochs=1", "backend=gloo")
    done = commands.finish(start(commands, way, *TINY, "epochs=1", num_ranks=num_ranks))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"process{'es' if num_ranks > 1 else ''} ({FOUND[way]})" in done.stdout
    (path,) = (tmp_path / "outputs" / "run").iterdir()
    assert Run(path).result["weights_sha256"] == here.result["weights_sha256"]


def test_runs_at_once_share_neither_port_nor_directory(commands: Commands, tmp_path: Path) -> None:
    together = [start(commands, way, *TINY, "epochs=1") for way in ("agent", "agent", "spawn")]
    done = [commands.finish(process) for process in together]
    assert [each.returncode for each in done] == [0, 0, 0], "".join(each.stderr for each in done)
    assert len(list((tmp_path / "outputs" / "run").iterdir())) == 3


@pytest.mark.parametrize("way", ["spawn", "agent"])
def test_ctrl_c_saves_and_leaves_no_process(way: str, commands: Commands, tmp_path: Path) -> None:
    process = begun(commands, way, tmp_path)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of them
    done = commands.finish(process)
    assert done.returncode == 143, done.stderr
    assert "SIGINT: saved after step" in done.stdout or "SIGTERM: saved after step" in done.stdout
    wait_until(lambda: commands.living(process) == [])


@pytest.mark.parametrize("way", ["torchrun", "spawn", "agent"])
def test_ranks_end_with_a_parent_that_was_killed(way: str, commands: Commands, tmp_path: Path) -> None:
    process = begun(commands, way, tmp_path)
    process.kill()
    wait_until(lambda: commands.living(process) == [])


def begun(commands: Commands, way: str, tmp_path: Path) -> "subprocess.Popen[str]":
    """The command once its ranks are in the middle of training."""
    process = start(commands, way, *LONG)
    wait_until(lambda: any(tmp_path.glob("outputs/run/*/checkpoints/step_*")), process)
    return process


def test_a_killed_rank_is_replaced_and_the_run_goes_on_in_its_directory(commands: Commands, tmp_path: Path) -> None:
    long = (*TINY, "epochs=30", "eval_every=30")
    whole = run(tmp_path / "here", 2, *long, "backend=gloo")
    process = start(commands, "agent", *long, "launcher.max_restarts=1")
    wait_until(lambda: any(tmp_path.glob("outputs/run/*/checkpoints/step_*")), process)
    os.kill(rank_1(commands, process), signal.SIGKILL)
    done = commands.finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "outputs" / "run").iterdir()
    assert done.stdout.count("going on after step") == 1
    assert Run(path).result["weights_sha256"] == whole.result["weights_sha256"]


def test_a_killed_rank_is_told_once_where_it_is_not_replaced(commands: Commands, tmp_path: Path) -> None:
    process = begun(commands, "agent", tmp_path)
    os.kill(rank_1(commands, process), signal.SIGKILL)
    done = commands.finish(process)
    assert done.returncode == 1
    assert done.stderr.count("rank 1 on") == 1 and "died: SIGKILL" in done.stderr, done.stderr
    wait_until(lambda: commands.living(process) == [])


def rank_1(commands: Commands, process: "subprocess.Popen[str]") -> int:
    """The process of rank 1: the younger one of those that the fork server made."""
    parents = {
        pid: int(Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[1]) for pid in commands.living(process)
    }
    (server,) = [pid for pid, parent in parents.items() if parent == process.pid and pid in parents.values()]
    return max(pid for pid, parent in parents.items() if parent == server)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("none", "dp")])
def test_every_mode_listens_on_the_loopback_alone(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer.step

    def note(self: Trainer, *args: Any) -> dict[str, float]:
        with (tmp_path / f"rank-{self.world.rank}").open("a") as file:
            file.write("\n".join([*listening([os.getpid()]), ""]))
        return step(self, *args)

    monkeypatch.setattr(Trainer, "step", note)
    run(tmp_path / "outputs", 2, *TINY[:1], *TINY[2:], f"parallel={mode}", "max_steps=3", "batch_size=200")
    for rank in range(2):
        addresses = (tmp_path / f"rank-{rank}").read_text().split()
        assert addresses and all(map(is_loopback, addresses)), (mode, addresses)


def test_ranks_that_a_signal_ended_before_they_heard_it_have_not_failed() -> None:
    with pytest.raises(Preempted, match="SIGTERM"):
        conclude(None, "rank 0 on here died: SIGTERM", ["SIGTERM"])
    with pytest.raises(JobFailed, match="died: SIGKILL"):
        conclude(None, "rank 0 on here died: SIGKILL", [])


@pytest.mark.parametrize("kind", [Spawn, Torchrun, Slurm])
def test_a_launcher_inside_a_world_is_refused(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    name = kind.__name__.lower()
    config, request = configure(*TINY, f"launcher={name}")
    rank_info = RankInfo(1, 1, 2, 2, found="torchrun")
    with pytest.raises(InputError, match=f"launcher={name} starts processes itself, but torchrun has started this one"):
        launch(config, request, rank_info)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (Spawn, {"nproc_per_node": 0}, "launcher.nproc_per_node=0 must be at least 1"),
        (Spawn, {"nodes": 2}, "launcher.nodes=2 needs launcher.master_addr"),
        (Spawn, {"nodes": 2, "node_rank": 2, "master_addr": "a"}, "launcher.node_rank=2 must be at least 0 and below"),
        (Spawn, {"master_addr": "a"}, "launcher.master_addr=a has an effect on several nodes"),
        (Spawn, {"join_timeout_s": 0}, "launcher.join_timeout_s=0 must be above 0"),
        (Torchrun, {"nodes": "2:1"}, "launcher.nodes=2:1 must be a number of at least 1, or MIN:MAX"),
        (Torchrun, {"nodes": "1:2"}, "launcher.nodes=1:2 needs launcher.rdzv_endpoint=HOST:PORT"),
        (Torchrun, {"nodes": 2, "rdzv_endpoint": "a"}, "launcher.rdzv_endpoint=a must be HOST:PORT"),
        (Torchrun, {"rdzv_endpoint": "a:1"}, "launcher.rdzv_endpoint=a:1 has an effect on several nodes"),
        (Torchrun, {"max_restarts": -1}, "launcher.max_restarts=-1 must be at least 0"),
        (Slurm, {"nodes": 0}, "launcher.nodes=0 must be at least 1"),
        (Slurm, {"gpus_per_node": 2, "nproc_per_node": 4}, "launcher.nproc_per_node=4 needs a GPU each"),
        (Slurm, {"sbatch": {"job_name": "x"}}, "launcher.sbatch.job_name: the launcher sets it itself"),
        (Slurm, {"conda": "a", "venv": "b"}, "one environment at a time"),
    ],
)
def test_options_that_cannot_be_are_refused(kind: type, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        kind(**options)
    assert said in str(caught.value)


def test_slurm_is_missed_by_name_and_its_script_is_shown_without_it(commands: Commands, tmp_path: Path) -> None:
    env = {"PATH": "/nowhere"}
    done = commands.finish(commands.start("-m", "runner", *TINY, "launcher=slurm", env=env))
    assert done.returncode == 2
    assert done.stderr.startswith("launcher=slurm needs sbatch, which is not on this machine; launcher.dry_run=true")
    asked = ("launcher=slurm", "launcher.nodes=2", "launcher.dry_run=true", "launcher.time='1:00:00'")
    asked += (
        "launcher.sbatch={constraint:h100,overcommit:true}",
        "launcher.modules=[cuda/12]",
        "launcher.exclusive=true",
    )
    asked += (
        "launcher.setup=['ulimit -n 4096']",
        "launcher.env={NAME:'$HOME/a \"b'}",
        "launcher.prefix='apptainer exec --bind $SCRATCH:/scratch i.sif'",
    )
    shown = commands.finish(commands.start("-m", "runner", *TINY, *asked, env=env))
    assert shown.returncode == 0, shown.stderr
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --time=1:00:00",
        "#SBATCH --exclusive",
        "#SBATCH --constraint=h100",
        "#SBATCH --overcommit",
        "module load cuda/12 || exit 1",
        'export NAME="$HOME/a \\"b"',
        "ulimit -n 4096",
    ):
        assert f"{line}\n" in shown.stdout, shown.stdout
    inside = '    exec apptainer exec --bind $SCRATCH:/scratch i.sif env RUNNER_DIRECTORY="$RUNNER_DIRECTORY" '
    assert inside in shown.stdout and ' NAME="$NAME" ' in shown.stdout
    (words,) = (line for line in shown.stdout.splitlines() if line.startswith("overrides=("))
    assert "launcher.dry_run" not in words and "launcher=slurm launcher.nodes=2" in words
    assert "127.0.0.1" not in shown.stdout and "cpus-per-task" not in shown.stdout
    subprocess.run(["bash", "-n"], input=shown.stdout, text=True, check=True, timeout=120)
    assert not (tmp_path / "outputs").exists()
