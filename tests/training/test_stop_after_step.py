"""A callback of one rank that stops the run in the middle of an epoch: all ranks stop after this step."""

from collections.abc import Callable
from pathlib import Path

import pytest
from custom_files import write_files
from ranks import RankError
from worlds import Run, run

STEP = 6  # of 4 steps an epoch
FILES = {
    "stopping.py": """\
        import os
        import signal

        from runner import Callback


        class StopAt(Callback):
            may_stop = True
            stops_as = "finished"

            def __init__(self, step: int = 6, on_rank: int = 0, signal_in: int = 0):
                self.step, self.on_rank, self.signal_in = step, on_rank, signal_in

            def on_start(self, run):
                self.rank = run.rank
                self.decide(run.first_step)

            def after_step(self, now):
                if now.step == self.signal_in:
                    os.kill(os.getpid(), signal.SIGUSR1)
                self.decide(now.step)

            def decide(self, step):
                self.wants_to_stop = self.rank == self.on_rank and step >= self.step
                self.stop_reason = f"step {step} is enough"
        """,
    "callbacks/stop.yaml": "stop: {_target_: stopping.StopAt, step: 6, on_rank: 0, signal_in: 0}\n",
}
SMALL = ("model=mlp", "model.hidden=[8,8]", "data=toy", "epochs=2", "batch_size=256", "precision=fp64", "logger=none")


@pytest.fixture
def stopping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, ...]]:
    """Return the overrides that select the callback, with options."""
    write_files(tmp_path / "mine", FILES)
    monkeypatch.syspath_prepend(tmp_path / "mine")

    def words(**options: object) -> tuple[str, ...]:
        chosen = (f"--config-dir={tmp_path / 'mine'}", "callbacks=stop")
        return (*chosen, *(f"callbacks.stop.{key}={value}" for key, value in options.items()))

    return words


@pytest.mark.parametrize(
    ("mode", "world_size"), [("none", 1), ("ddp", 2), ("pipeline", 2), pytest.param("ps", 2, marks=pytest.mark.soak)]
)
def test_all_ranks_stop_after_the_step_in_which_one_wants_to(
    mode: str, world_size: int, tmp_path: Path, stopping: Callable[..., tuple[str, ...]]
) -> None:
    """The run evaluates and saves its last step, and can be resumed to its end like any other."""
    overrides = (*SMALL, f"parallel={mode}")
    whole = run(tmp_path / "whole", world_size, *overrides)
    stopped = run(tmp_path / "stopped", world_size, *overrides, *stopping(on_rank=world_size - 1))
    assert (stopped.result["state"], stopped.result["step"]) == ("finished", STEP)
    assert stopped.result["stopped"] == "step 6 is enough"  # the reason of the last rank
    assert [*stopped.values("val/loss")] == [4, STEP] and [*stopped.losses] == [*range(1, STEP + 1)]
    assert stopped.losses == {step: loss for step, loss in whole.losses.items() if step <= STEP}
    resumed = run(tmp_path / "stopped", world_size, f"resume={stopped.path}", "callbacks.stop.step=99")
    assert resumed.result["step"] == 8 and resumed.losses == whole.losses
    assert resumed.result["weights_sha256"] == whole.result["weights_sha256"]


@pytest.mark.parametrize("signal_in", [2, STEP - 1])
def test_a_preempted_run_stops_at_the_same_step_after_it_is_resumed(
    signal_in: int, tmp_path: Path, stopping: Callable[..., tuple[str, ...]]
) -> None:
    """A signal preempts the run after the next step, which may be the one after which the callback stops the run."""
    overrides = (*SMALL, "parallel=ddp")
    whole = run(tmp_path / "whole", 2, *overrides, *stopping())
    with pytest.raises(RankError, match="Preempted"):
        run(tmp_path / "cut", 2, *overrides, *stopping(signal_in=signal_in))
    (path,) = (tmp_path / "cut" / "run").iterdir()
    assert (Run(path).result["state"], Run(path).result["step"]) == ("preempted", signal_in + 1)
    resumed = run(tmp_path / "cut", 2, f"resume={path}", "callbacks.stop.signal_in=0")
    assert (resumed.result["state"], resumed.result["step"]) == ("finished", STEP)
    assert resumed.result["weights_sha256"] == whole.result["weights_sha256"]
    assert resumed.values("val/loss") == whole.values("val/loss")
