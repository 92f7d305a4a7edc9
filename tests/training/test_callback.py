"""Custom callbacks: when and with which arguments they are called, their errors, and that training stays the same."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import pytest
import torch
from custom_files import write_files
from mode_cases import tier
from ranks import RankError, run_ranks
from worlds import MODES, Run, run

from runner.checkpoints.layout import TrainState
from runner.training.callbacks.contract import Callback, Callbacks, Progress, RunInfo

END = Progress(TrainState(step=1, epoch=1, step_in_epoch=0, batch_size=1))
SMALL = ("model=toy", "data=toy", "epochs=2", "batch_size=256", "logger=none")  # 4 steps an epoch

WATCH = """
import json
import os
import random
from pathlib import Path

import torch

from runner import Callback


class Watch(Callback):
    def __init__(
        self, folder: str, fails_in: str = "", on_rank: int = 0, stops_at: int = 0, stops_as: str = "pruned"
    ):
        self.stops_as = stops_as
        self.folder, self.fails_in, self.on_rank, self.stops_at = Path(folder), fails_in, on_rank, stops_at
        self.may_stop = stops_at > 0

    def on_start(self, run):
        self.rank = run.rank
        self.note("on_start", world_size=run.world_size, num_steps=run.num_steps, first_step=run.first_step)

    def after_step(self, now):
        self.note("after_step", step=now.step, epoch=now.epoch, metrics=dict(now.metrics))

    def after_evaluation(self, now):
        self.note("after_evaluation", step=now.step, epoch=now.epoch, metrics=dict(now.metrics))
        self.wants_to_stop = self.rank == self.on_rank and now.step == self.stops_at
        self.stop_reason = f"enough of rank {self.rank}"

    def after_epoch(self, now):
        self.note("after_epoch", step=now.step)

    def after_checkpoint(self, now, path):
        self.note("after_checkpoint", step=now.step, name=path.name, complete=(path / "manifest.json").exists())

    def on_end(self, now, outcome):
        self.note("on_end", step=now.step, outcome=outcome)

    def note(self, method, **facts):
        torch.rand(3), random.random()
        with (self.folder / f"{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps({"called": method, **facts}) + "\\n")
        if method == self.fails_in and self.rank == self.on_rank:
            raise RuntimeError("the printer is on fire")


class Scaled(torch.nn.MSELoss):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, outputs, targets):
        return super().forward(outputs * self.scale, targets)


class Copy(Callback):
    def __init__(self, folder: str):
        self.folder = Path(folder)

    def on_start(self, run):
        self.run = run

    def after_step(self, now):
        model = self.run.copy_model()
        assert (model is None) == (self.run.rank > 0)
        if model is not None:
            assert not model.training
            torch.save(model.state_dict(), self.folder / "copy.pt")
            for parameter in model.parameters():  # it is the callback's own
                parameter.data.zero_()
"""


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, ...]]:
    """Return the overrides that select the callback, with options."""
    mine = tmp_path / "mine"
    (mine / "callbacks").mkdir(parents=True)
    (mine / "watching.py").write_text(WATCH)
    (mine / "callbacks" / "watch.yaml").write_text(
        f"watch: {{_target_: watching.Watch, folder: '{tmp_path}', fails_in: '', "
        "on_rank: 0, stops_at: 0, stops_as: pruned}\n"
    )
    monkeypatch.syspath_prepend(mine)
    monkeypatch.delitem(sys.modules, "watching", raising=False)

    def words(**options: object) -> tuple[str, ...]:
        search = f"hydra.searchpath=['file://{mine}']"
        return (search, "callbacks=watch", *(f"callbacks.watch.{key}={value}" for key, value in options.items()))

    return words


class Forks(Callback):
    def __init__(self, error: BaseException):
        self.error = error

    def after_step(self, now: Progress) -> None:
        if os.fork() == 0:
            raise self.error


@pytest.mark.fault("a callback that forks a process", outcome="went_on")
def test_a_process_that_a_callback_forks_does_not_continue_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def call(rank: int, world_size: int) -> None:
        for error, status in ((ArithmeticError(), 1), (SystemExit(3), 3), (SystemExit("text"), 1), (SystemExit(), 0)):
            Callbacks([("forks", Forks(error))]).call("after_step", END)
            with (tmp_path / "continued").open("a") as file:
                file.write("once\n")
            assert os.waitstatus_to_exitcode(os.wait()[1]) == status

    run_ranks(call, 1, forms_group=False)
    assert (tmp_path / "continued").read_text() == 4 * "once\n"
    assert "\ntext\n" in capfd.readouterr().err


def calls(folder: Path, rank: int = 0) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()]


def test_callbacks_are_called_on_every_rank_with_the_metrics(
    tmp_path: Path, watch: Callable[..., tuple[str, ...]]
) -> None:
    """A resumed run starts with its first step."""
    made = run(tmp_path / "outputs", 2, *SMALL, "parallel=ddp", "log_every=2", *watch())
    for rank in range(2):
        called = calls(tmp_path, rank)
        epoch = ["after_step"] * 4 + ["after_evaluation"]
        expected = ["on_start", *epoch, "after_checkpoint", "after_epoch", *epoch, "after_checkpoint", "on_end"]
        # The callback that saves checkpoints comes last, so its on_end is called first.
        assert [call["called"] for call in called] == expected
        assert called[0] == {"called": "on_start", "world_size": 2, "num_steps": 8, "first_step": 0}
        steps = [call for call in called if call["called"] == "after_step"]
        assert [(call["step"], call["epoch"]) for call in steps] == [(n, 1 + n // 5) for n in range(1, 9)]
        assert [bool(call["metrics"]) for call in steps] == [False, True] * 4  # a step is measured where it is logged
        losses = {call["step"]: call["metrics"]["train/loss"] for call in steps if call["metrics"]}  # type: ignore[index]
        assert losses == made.losses
        evaluated = [call["metrics"] for call in called if call["called"] == "after_evaluation"]
        assert [metrics["val/loss"] for metrics in evaluated] == [  # type: ignore[index]
            line["val/loss"] for line in made.lines if "val/loss" in line
        ]
        saved = [(call["name"], call["complete"]) for call in called if call["called"] == "after_checkpoint"]
        assert [name for name, _ in saved] == ["step_4", "step_8"]
        assert rank > 0 or all(complete for _, complete in saved)
        assert called[-1] == {"called": "on_end", "step": 8, "outcome": "finished"}
    (tmp_path / "0.jsonl").unlink()
    run(tmp_path / "outputs", 1, f"resume={made.path}", "epochs=3", "parallel=none", watch()[0])
    first, *later = calls(tmp_path)
    assert (first["first_step"], first["num_steps"]) == (8, 12)
    assert [call["step"] for call in later if call["called"] == "after_step"] == [9, 10, 11, 12]


def test_a_callback_does_not_change_the_training(tmp_path: Path, watch: Callable[..., tuple[str, ...]]) -> None:
    words = ("model=net", "data=digits", "max_steps=3", "logger=none", "parallel=ddp")  # which has dropout
    alone = run(tmp_path / "alone", 2, *words)
    watched = run(tmp_path / "watched", 2, *words, *watch())
    assert watched.result["weights_sha256"] == alone.result["weights_sha256"]
    assert watched.result["metrics"] == alone.result["metrics"]


@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=tier(m == "fsdp", m in ("tp", "pipeline", "ps"))) for m in MODES]
)
def test_copy_model_returns_the_whole_present_model(
    mode: str, tmp_path: Path, watch: Callable[..., tuple[str, ...]]
) -> None:
    """Changing the copy does not change the run. Within a round of local_sgd, it has the average of the weights."""
    world_size = 1 if mode in ("none", "dp") else 2
    words = ("model=mlp", "data=toy", "max_steps=3", "logger=none", f"parallel={mode}", "precision=fp64")
    copying = (watch()[0], "+callbacks.copy._target_=watching.Copy", f"+callbacks.copy.folder='{tmp_path}'")
    alone = run(tmp_path / "alone", world_size, *words)
    watched = run(tmp_path / "watched", world_size, *words, *copying)
    assert watched.result["weights_sha256"] == alone.result["weights_sha256"]
    copied = torch.load(tmp_path / "copy.pt", weights_only=True)
    assert copied.keys() == watched.weights.keys()
    assert all(torch.equal(copied[name], tensor) for name, tensor in watched.weights.items())


def test_copy_model_excludes_the_parameters_of_the_loss(tmp_path: Path, watch: Callable[..., tuple[str, ...]]) -> None:
    """The loss is trained with the model, and its weights are saved with the model's."""
    words = (*SMALL, "model=linear", "+callbacks.copy._target_=watching.Copy", f"+callbacks.copy.folder='{tmp_path}'")
    made = run(tmp_path / "outputs", 1, *words, watch()[0], "loss=mse", "loss._target_=watching.Scaled")
    assert set(made.weights) == {"loss.scale", *torch.load(tmp_path / "copy.pt", weights_only=True)}


@pytest.mark.parametrize("method", ["on_start", "on_end"])
def test_an_exception_fails_the_run_and_names_the_callback(
    method: str, tmp_path: Path, watch: Callable[..., tuple[str, ...]]
) -> None:
    with pytest.raises(RankError, match="the printer is on fire"):
        run(tmp_path / "outputs", 1, *SMALL, *watch(fails_in=method))
    (path,) = (tmp_path / "outputs" / "run").iterdir()
    result = Run(path).result
    assert result["state"] == "failed"
    assert f"raised by the callback watch in {method}\nTraceback" in result["error"]
    assert result["error"].splitlines()[-1] == "RuntimeError: the printer is on fire"  # which tables of jobs show
    if method != "on_end":
        assert calls(tmp_path)[-1]["outcome"] == "failed"  # on_end is called nevertheless


def test_an_exception_on_one_rank_ends_all_ranks(tmp_path: Path, watch: Callable[..., tuple[str, ...]]) -> None:
    with pytest.raises(RankError):
        run(tmp_path / "outputs", 2, *SMALL, "parallel=ddp", *watch(fails_in="after_step", on_rank=1))
    (path,) = (tmp_path / "outputs" / "run").iterdir()
    error = Run(path).result["error"]
    assert "rank 1 on" in error
    assert "raised by the callback watch in after_step" in error


@pytest.mark.parametrize("state", ["pruned", "paused", "finished"])
def test_a_callback_of_one_rank_stops_all_ranks_after_a_checkpoint(
    state: str, tmp_path: Path, watch: Callable[..., tuple[str, ...]]
) -> None:
    words = watch(stops_at=8, on_rank=1, stops_as=state)
    made = run(tmp_path / "outputs", 2, *SMALL, "epochs=5", "parallel=ddp", *words)
    assert (made.result["state"], made.result["step"]) == (state, 8)
    assert made.result["stopped"] == "enough of rank 1"
    assert made.result["weights_sha256"]
    assert [calls(tmp_path, rank)[-1]["outcome"] for rank in range(2)] == [state, state]
    epochs = [call["step"] for call in calls(tmp_path, 0) if call["called"] == "after_epoch"]
    assert epochs == [4]  # a resumed run calls it


COUNTED = """
import os
import signal

from runner import Callback
from runner.checkpoints.saved_state import LocalState


class Counted(Callback):
    may_stop = True
    stops_as = "paused"

    def __init__(self):
        self.ends, self.evaluations, self.epochs = os.environ["ENDS"], 0, 0

    def on_start(self, run):
        self.log = run.log

    def after_step(self, now):
        if self.ends == "signal" and now.step == 3:  # the run ends after step 4, before its evaluation
            os.kill(os.getpid(), signal.SIGTERM)
        if self.ends == "crash" and now.step == 5:
            raise ArithmeticError("the newest checkpoint is that of the evaluation after step 4")

    def after_evaluation(self, now):
        if self.ends == "crash in evaluation" and now.step == 8:
            raise ArithmeticError("the metrics of the evaluation are logged")
        self.evaluations += 1
        self.log(now, {"mine/evaluations": self.evaluations})
        self.wants_to_stop = self.ends == "pause" and now.step == 4

    def after_epoch(self, now):
        self.epochs += 1
        self.log(now, {"mine/epochs": self.epochs})

    def state(self, model):
        return LocalState(facts={"evaluations": self.evaluations, "epochs": self.epochs})

    def load_state(self, saved):
        self.evaluations, self.epochs = saved.facts["evaluations"], saved.facts["epochs"]
"""


@pytest.mark.parametrize("saves", ["after the evaluation", "before the evaluation"])
@pytest.mark.parametrize("ends", ["pause", "signal", "crash", "crash in evaluation", "finished"])
def test_each_evaluation_and_epoch_of_an_interrupted_run_calls_the_callbacks_once(
    ends: str, saves: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its metrics are logged once, too, and equal those of an uninterrupted run."""
    (tmp_path / "counted.py").write_text(COUNTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "counted", raising=False)
    monkeypatch.setenv("ENDS", ends)
    words = [word for word in SMALL if word != "epochs=2"] + ["+callbacks.count._target_=counted.Counted"]
    if saves == "before the evaluation":
        words.append("checkpoint.every_steps=4")
    with pytest.raises(RankError) if ends not in ("pause", "finished") else nullcontext():
        run(tmp_path / "outputs", 1, *words, f"epochs={1 if ends == 'finished' else 3}")
    (path,) = (tmp_path / "outputs" / "run").iterdir()
    monkeypatch.setenv("ENDS", "")
    resumed = run(tmp_path / "outputs", 1, f"resume={path}", "epochs=3")
    again = run(tmp_path / "outputs", 1, f"resume={path}")  # after the last step
    undisturbed = run(tmp_path / "undisturbed", 1, *words, "epochs=3")
    for each in (resumed, again):
        assert logged(each) == logged(undisturbed)
        assert each.result["metrics"] == pytest.approx(undisturbed.result["metrics"], nan_ok=True)
    assert [*resumed.values("mine/evaluations").values()] == [1, 2, 3]
    assert [*resumed.values("mine/epochs").values()] == [1, 2]  # not after the last one


def logged(run: Run) -> list[dict[str, object]]:
    """Return the lines of metrics.jsonl without times and checksums, which a resumed run computes again."""
    return [{k: v for k, v in line.items() if not k.startswith("perf/") and "checksums" not in k} for line in run.lines]


def test_is_due_is_read_before_each_step_and_never_before_on_start_or_in_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(
        tmp_path / "mine",
        {
            "asked.py": """\
                from pathlib import Path

                from runner import Callback


                class Asked(Callback):
                    def __init__(self, path: str):
                        self.path, self.count = Path(path), 0

                    def note(self, text):
                        with self.path.open("a") as file:
                            file.write(text + ",")

                    @property
                    def is_due(self):
                        self.count += 1
                        self.note("is_due")
                        return self.count == 2

                    def on_start(self, run):
                        self.note("on_start")

                    def after_step(self, now):
                        self.note("after_step")

                    def when_due(self, now):
                        self.note(f"when_due {now.step}")

                    def after_evaluation(self, now):
                        self.note("after_evaluation")
                """,
            "callbacks/asked.yaml": f"asked: {{_target_: asked.Asked, path: '{tmp_path / 'calls'}'}}\n",
        },
    )
    monkeypatch.syspath_prepend(tmp_path / "mine")
    run(tmp_path, 1, f"--config-dir={tmp_path / 'mine'}", *SMALL, "callbacks=asked", "max_steps=3")
    steps = "is_due,after_step,is_due,after_step,when_due 2,is_due,after_step"
    assert (tmp_path / "calls").read_text() == f"on_start,{steps},after_evaluation,"


def test_on_end_is_called_on_all_callbacks_although_one_raises() -> None:
    """Also if a second Ctrl-C is received while one of them saves."""
    told: list[str] = []

    class Tell(Callback):
        def __init__(self, name: str, error: BaseException | None = None):
            self.name, self.error = name, error

        def on_end(self, now: Progress, outcome: str) -> None:
            told.append(f"{self.name} {outcome}")
            if self.error:
                raise self.error

    for error in (KeyboardInterrupt(), OSError("no room")):
        told.clear()
        callbacks = Callbacks([("bar", Tell("bar")), ("mine", Tell("mine")), ("saving", Tell("saving", error))])
        callbacks.on_start(cast("RunInfo", None))
        with pytest.raises(type(error)):
            callbacks.on_end(END, "finished")
        assert told == ["saving finished", "mine failed", "bar failed"]


LOG = """
from runner import Callback


class Norm(Callback):
    def on_start(self, run):
        self.run = run

    def after_evaluation(self, now):
        self.run.log(now, {"mine/number": now.step / 2 + self.run.rank})
"""


def test_a_callback_logs_custom_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of rank 0 are in metrics.jsonl and TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "own_log.py").write_text(LOG)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [word for word in SMALL if word != "logger=none"]
    one = run(tmp_path / "out", 2, *words, "parallel=ddp", "+callbacks.norm._target_=own_log.Norm")
    assert [(line["step"], line["mine/number"]) for line in one.lines if "mine/number" in line] == [(4, 2), (8, 4)]
    events = EventAccumulator(str(one.path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("mine/number")] == [(4, 2), (8, 4)]
