"""The training loop: evaluation, preemption, checkpoints, precision and logged metrics."""

import inspect
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mode_cases import tier
from ranks import RankError
from worlds import Run, build_experiment, configure, run

from runner.checkpoints.layout import list_checkpoints
from runner.errors import InputError
from runner.training.components import RESERVED
from runner.training.trainer import Trainer

TINY = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=200", "logger=none")


def run_until_preempted(outputs: Path, world_size: int, *words: str) -> Path:
    """Run until a signal preempts the run. Return its directory."""
    with pytest.raises(RankError, match=r"Preempted"):
        run(outputs, world_size, *words)
    (path,) = (outputs / "run").iterdir()
    return path


def test_task_evaluate_repeats_the_metrics_of_training_on_any_number_of_ranks(tmp_path: Path) -> None:
    trained = run(tmp_path / "t", 1, *TINY, "precision=fp64", "epochs=2")
    expected = {key: value for key, value in trained.result["metrics"].items() if key.startswith("val/")}
    for world_size, parallel in ((1, "none"), (3, "ddp")):
        words = ("task=evaluate", f"run={trained.path}", f"parallel={parallel}", f"outputs={tmp_path / parallel}")
        evaluated = run(tmp_path / parallel, world_size, *words)
        assert evaluated.result["metrics"] == pytest.approx(expected, rel=1e-12)
        assert (evaluated.result["task"], evaluated.result["step"]) == ("evaluate", 16)


@pytest.mark.fault("a signal to one rank", outcome="survived")
@pytest.mark.parametrize(
    ("world_size", "after"), [*(pytest.param(size, 4, marks=pytest.mark.thorough) for size in (1, 2)), (2, 6)]
)
def test_a_signal_to_one_rank_stops_all_after_one_step(
    world_size: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the last step of an epoch, the eighth, whose evaluation the resumed run repeats."""

    from runner.training.trainer import Trainer

    step = Trainer.step

    def step_and_signal(self: Trainer, *args: object) -> dict[str, float]:
        if self.state.step == after and self.world.rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return step(self, *args)  # type: ignore[arg-type]

    words = (*TINY, "epochs=2", f"parallel={'none' if world_size == 1 else 'ddp'}", "optimizer=adamw")
    whole = run(tmp_path / "whole", world_size, *words)
    monkeypatch.setattr(Trainer, "step", step_and_signal)
    path = run_until_preempted(tmp_path / "cut", world_size, *words)
    monkeypatch.undo()
    resumed = run(tmp_path / "cut", world_size, f"resume={path}", f"outputs={tmp_path / 'cut'}")
    # The signal is received in one step, and the vote of the next step informs all ranks.
    assert "SIGUSR1" in (path / "log.txt").read_text() or world_size == 2
    assert f"saved after step {after + 2}" in (path / "log.txt").read_text()
    assert resumed.result["weights_sha256"] == whole.result["weights_sha256"]
    one, other = ([(line["step"], line.get("val/loss")) for line in each.lines] for each in (resumed, whole))
    assert one == other


@pytest.mark.fault("a signal in an evaluation", outcome="survived")
@pytest.mark.parametrize(
    ("parallel", "batch", "step"),
    [
        ("none", 6, 30),
        pytest.param("ddp", 2, 15, marks=pytest.mark.soak),
        pytest.param("fsdp", 6, 30, marks=pytest.mark.thorough),
        pytest.param("pipeline", 2, 15, marks=pytest.mark.thorough),
    ],
)
def test_a_signal_cancels_an_evaluation_and_the_resumed_run_repeats_it(
    parallel: str, batch: int, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal is received in the second of four batches, in an epoch's evaluation or in the last one."""

    import torch.distributed as dist

    from runner.input.batch import StepBatch
    from runner.input.loader import Loader

    world_size = 1 if parallel == "none" else 2
    steps, evaluated = Loader.steps, [0]

    def steps_and_signal(self: Loader, epoch: int, first_step: int = 0) -> Iterator[StepBatch]:
        for each in steps(self, epoch, first_step):
            evaluated[0] += not self.sampler.shuffle
            if evaluated[0] == batch and (world_size == 1 or dist.get_rank() == 1):
                os.kill(os.getpid(), signal.SIGUSR1)
            yield each

    words = (*TINY[:3], "batch_size=100", "log_every=5", "logger=none", "epochs=2", f"parallel={parallel}")
    whole = run(tmp_path / "whole", world_size, *words)
    monkeypatch.setattr(Loader, "steps", steps_and_signal)
    path = run_until_preempted(tmp_path / "cut", world_size, *words)
    monkeypatch.undo()
    cut = Run(path)
    assert f"saved after step {step}" in (path / "log.txt").read_text()
    assert cut.result["state"] == "preempted"
    assert max((line["step"] for line in cut.lines if "val/loss" in line), default=0) == step - 15
    resumed = run(tmp_path / "cut", world_size, f"resume={path}", f"outputs={tmp_path / 'cut'}")
    for key in ("weights_sha256", "step", "epoch", "state"):
        assert resumed.result[key] == whole.result[key]
    one, other = (
        [(line["step"], line.get("train/loss"), line.get("val/loss")) for line in each.lines]
        for each in (resumed, whole)
    )
    assert one == other and one[-1][0] == 30


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp64", marks=pytest.mark.thorough)])
def test_every_precision_learns(precision: str, tmp_path: Path) -> None:
    words = ("model.channels=[8,16]", "data.sample_shape=[1,8,8]", "logger=none", "epochs=4")
    done = run(tmp_path, 2, *words, f"precision={precision}", "parallel=ddp")
    assert done.result["metrics"]["val/accuracy"] > 0.8
    dtype = torch.float64 if precision == "fp64" else torch.float32
    assert {tensor.dtype for tensor in done.weights.values() if tensor.is_floating_point()} == {dtype}


def test_checkpoints_are_saved_at_the_configured_steps_and_epochs(tmp_path: Path) -> None:
    words = (*TINY, "max_steps=20", "checkpoint.every_epochs=2", "checkpoint.every_steps=7", "checkpoint.keep=9")
    done = run(tmp_path, 1, *words, "checkpoint.keep_best=0")
    names = [path.name for path in list_checkpoints(done.path / "checkpoints")]
    assert names == ["step_7", "step_14", "step_16", "step_20"]


def test_metrics_are_logged_at_the_configured_steps(tmp_path: Path) -> None:
    done = run(tmp_path, 1, *TINY, "max_steps=20", "log_every=6", "eval_every=2")
    assert sorted(done.losses) == [6, 12, 18, 20]
    assert [line["step"] for line in done.lines if "val/loss" in line] == [16, 20]
    line = next(line for line in done.lines if "train/loss" in line)
    assert {"train/learning_rate", "perf/step_time_s"} <= line.keys()
    assert line["train/grad_norm"] > 0 and 0 <= line["perf/data_wait"] <= 1 and line["perf/memory_mib"] > 50


def test_clipping_bounds_the_step_and_not_the_logged_norm(tmp_path: Path) -> None:
    words = (*TINY, "max_steps=1", "optimizer.lr=1.0", "optimizer.momentum=0", "precision=fp64")
    free, clipped = run(tmp_path / "f", 1, *words), run(tmp_path / "c", 1, *words, "clip_grad_norm=0.01")
    assert free.lines[0]["train/grad_norm"] == clipped.lines[0]["train/grad_norm"] > 0.01
    start = configure(*words)[0]
    torch.manual_seed(start.seed)
    from runner.shipped.models.mlp import MLP

    before = MLP([1, 8, 8], 10, [16]).double().state_dict()
    moved = sum(((clipped.weights[name] - before[name]) ** 2).sum() for name in before) ** 0.5
    assert float(moved) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.thorough
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf Tensor"
)  # torch's own, compiling
def test_a_compiled_model_trains_to_the_same_losses(tmp_path: Path) -> None:
    words = (*TINY, "precision=fp64", "max_steps=3")
    plain, compiled = run(tmp_path / "p", 1, *words), run(tmp_path / "c", 1, *words, "compile=true")
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-9)
    assert compiled.weights.keys() == plain.weights.keys()


@pytest.mark.parametrize(("value", "mode"), [("true", None), ("max-autotune", "max-autotune")])
def test_the_model_is_compiled_in_the_chosen_mode(
    value: str, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = list[Any]()
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, mode: modes.append(mode))
    build_experiment(*TINY, f"compile={value}")
    assert modes == [mode]


@pytest.mark.fault("SIGTERM while a failure is reported", outcome="refused")
def test_a_failure_is_reported_although_the_launcher_terminates_this_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner.distributed.failures.shutdown import Shutdown
    from runner.parallel.replica import Replica

    report = Shutdown.report_failure

    def report_under_fire(self: Shutdown, *args: object) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return report(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Replica, "step", lambda *args, **options: 1 / 0)
    monkeypatch.setattr(Shutdown, "report_failure", report_under_fire)
    with pytest.raises(RankError, match="failed with status 1"):
        run(tmp_path, 1, *TINY)
    (path,) = (tmp_path / "run").iterdir()
    result = json.loads((path / "result.json").read_text())
    assert result["state"] == "failed" and "ZeroDivisionError" in result["error"]


def evaluated(run: Run) -> list[int]:
    return [line["step"] for line in run.lines if "val/loss" in line]


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (("eval_every=2",), [3, 6, 9, 12, 15, 16]),
        (("eval_every_steps=4",), [4, 8, 12, 16]),  # no second evaluation at the end of an epoch
    ],
)
def test_eval_every_steps_adds_evaluations_and_does_not_change_training(
    words: tuple[str, ...], steps: list[int], tmp_path: Path
) -> None:
    """These are in addition to the evaluations at the end of epochs, here of 8 steps."""
    often = run(tmp_path / "often", 1, *TINY, "epochs=2", "eval_every_steps=3", *words)
    assert evaluated(often) == steps
    assert often.result["weights_sha256"] == run(tmp_path / "else", 1, *TINY, "epochs=2").result["weights_sha256"]


def test_a_cancelled_evaluation_within_an_epoch_is_repeated_by_the_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal cancels the evaluation."""
    from runner.training import trainer

    evaluate = trainer.evaluate

    def signal_first(*args: object) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGUSR1)
        return evaluate(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer, "evaluate", signal_first)
    path = run_until_preempted(tmp_path, 1, *TINY, "epochs=2", "eval_every_steps=3")
    monkeypatch.undo()
    assert evaluated(Run(path)) == []
    assert evaluated(run(tmp_path, 1, f"resume={path}", f"outputs={tmp_path}")) == [3, 6, 8, 9, 12, 15, 16]


def test_eval_batches_limits_the_evaluation(tmp_path: Path) -> None:
    """The 360 validation samples are two batches of 200 and of 160."""
    trained = run(tmp_path, 2, *TINY, "max_steps=2", "precision=fp64", "parallel=ddp", "eval_batches=1")
    whole = run(tmp_path / "whole", 2, "task=evaluate", f"run={trained.path}", "eval_batches=null")
    first = run(tmp_path / "first", 2, "task=evaluate", f"run={trained.path}", "batch_size=100", "eval_batches=2")
    assert first.result["metrics"] == pytest.approx(
        {key: value for key, value in trained.result["metrics"].items() if key.startswith("val/")}, rel=1e-12
    )
    assert first.result["metrics"]["val/loss"] != pytest.approx(whole.result["metrics"]["val/loss"], rel=1e-6)


def test_resuming_beyond_the_end_of_a_shorter_epoch_starts_the_next_one(tmp_path: Path) -> None:
    """With debug=true an epoch has 3 steps, and the checkpoint was saved after 5 steps of an epoch."""
    stopped = run(tmp_path, 1, *TINY, "max_steps=5")
    words = (f"resume={stopped.path}", "debug=true", "max_steps=null", "epochs=3", "resume_force=true")
    resumed = run(tmp_path, 1, *words, timeout_s=60)
    assert (resumed.result["step"], resumed.result["epoch"]) == (9, 2)
    assert evaluated(resumed) == [5, 8, 9]


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(m, marks=tier(m == "ddp", m in ("ps", "local_sgd")))
        for m in ("ddp", "fsdp", "tp", "ps", "local_sgd")
    ],
)
def test_metrics_of_training_batches_are_exact_on_any_number_of_ranks(parallel: str, tmp_path: Path) -> None:
    """A step of all samples but one, with three micro-batches, and a step of that one."""
    options = (*TINY[:3], "batch_size=1436", "micro_batches=3", "train_metrics=true", "metrics=[accuracy,f1]")
    options = (*options, "logger=none", "max_steps=3", "precision=fp64", "optimizer.lr=1e-30")
    one = run(tmp_path / "one", 1, *options)
    if parallel == "ddp":
        evaluated = run(tmp_path / "evaluated", 1, "task=evaluate", f"run={one.path}", "split=train")
        expected = evaluated.result["metrics"]["train/accuracy"]
        measured = one.values("train/accuracy")
        assert measured[1] == pytest.approx(expected, abs=1.01 / 1437) and measured[2] in (0, 1)
    ranks = {"ps": 3}.get(parallel, 2)
    other = run(tmp_path / parallel, ranks, *options, f"parallel={parallel}")
    for name in ("train/accuracy", "train/f1"):
        assert len(one.values(name)) == 3 and other.values(name) == pytest.approx(one.values(name), rel=1e-12)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("parallel=pipeline", "train_metrics=true: parallel=pipeline has no outputs of a step; try"),
        ("metrics=none", "train_metrics=true has no effect without metrics; try metrics=auto"),
    ],
)
def test_train_metrics_are_refused_where_they_cannot_be_measured(option: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        build_experiment(*TINY, "train_metrics=true", option)


def test_names_that_the_loop_logs_are_reserved() -> None:
    """An objective that logs a value of the same name would overwrite it."""
    texts = [path.read_text() for path in Path(inspect.getfile(Trainer)).parent.rglob("*.py")]
    logged = {name for text in texts for name in re.findall(r"[\"']train/(\w+)", text)} - {"loss"}
    assert logged == set(RESERVED)
