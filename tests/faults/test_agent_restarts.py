"""kill -9 of a random rank at a random step under the elastic agent: one restart, and the same run."""

import random
from pathlib import Path

import pytest
from commands import Commands
from custom_files import write_files
from fault_rig import OVERRIDES, STEPS, assert_same
from worlds import Run, run

MODES = ("allreduce", "ddp", "fsdp", "pipeline", "ps", "tp", "zero")
DIES = {
    "dies.py": """
        import os, signal
        from runner import Callback

        class Dies(Callback):
            def __init__(self, rank: int, step: int):
                self.rank, self.step = rank, step

            def after_step(self, now):
                if now.step == self.step and int(os.environ["RANK"]) == self.rank and not os.path.exists("died"):
                    open("died", "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
    """,
    "callbacks/dies.yaml": "dies: {_target_: dies.Dies, rank: 0, step: 1}\n",
}
AGENT = ("launcher=torchrun", "launcher.nproc_per_node=2", "launcher.max_restarts=3", "backend=gloo", "threads=1")


@pytest.mark.fault("kill -9 of a rank that is restarted", outcome="survived")
@pytest.mark.soak  # of ddp once in CI: commands/test_launchers.py
@pytest.mark.parametrize("seed", range(3))  # at many steps: faults/test_killed_ranks.py
@pytest.mark.parametrize("mode", MODES)
def test_one_restart_is_the_same_run(mode: str, seed: int, commands: Commands, tmp_path: Path) -> None:
    draw = random.Random(f"agent {mode} {seed}")
    rank, step = draw.randrange(2), draw.randrange(8, STEPS)
    args = (*OVERRIDES, f"parallel={mode}")
    whole = run(tmp_path / "whole", 2, *args, "backend=gloo")
    write_files(tmp_path / "mine", DIES)
    dies = ("--config-dir", "mine", "callbacks=dies", f"callbacks.dies.rank={rank}", f"callbacks.dies.step={step}")
    done = commands.runner(*args, *AGENT, *dies)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "died").exists()
    (path,) = (tmp_path / "outputs" / "run").iterdir()
    assert (path / "log.txt").read_text().count("resuming after step") == 1
    assert_same(Run(path), whole)
