"""hydra/sweeper/pruner=asha: trials pause at rungs, and the best ones continue from their checkpoints."""

import copy
import functools
import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Commands
from custom_files import write_files
from worlds import Run, jobs_of, only_run

from runner.records import ledger
from runner.records.ledger import JobRecord, read_ledger
from runner.sweeps import study
from runner.sweeps.rungs import Rungs
from runner.sweeps.study_options import PausedAsPruned, TrialPruner

optuna: Any = pytest.importorskip("optuna", reason="needs the extra optuna")

Here = Callable[..., int]  # the fixture of conftest.py
TOY = ("model=toy", "data=toy", "epochs=1", "eval_every_steps=4", "backend=gloo", "logger=none", "threads=1")
ASHA = (
    *("hydra/sweeper=optuna", "hydra/sweeper/pruner=asha", "hydra.sweeper.pruner.min_resource=4"),
    *("hydra.sweeper.pruner.reduction_factor=2", "hydra.sweeper.sampler.seed=1", "hydra.sweeper.n_trials=4"),
    *("hydra.sweeper.sampler.n_startup_trials=3", "optimizer.lr=tag(log,interval(0.0001,0.3))"),
)


def decisions(sweep: Path) -> list[tuple[int, int | str]]:
    """Return the new jobs and the promotions in their order: each number with its swept value or its next rung."""
    lines = [json.loads(line) for line in (sweep / "ledger.jsonl").read_text().splitlines()]
    return [
        (line["number"], line["overrides"][-1] if "label" in line else line["rung"])
        for line in lines
        if line.keys() & {"label", "rung"}
    ]


def outcomes(sweep: Path) -> list[tuple[str, str, int, int, str]]:
    results = [(job, Run(job.directory).result) for job in read_ledger(sweep)]
    return [(job.label, job.state, job.rung, result["step"], result["weights_sha256"]) for job, result in results]


def test_the_best_jobs_of_each_rung_are_promoted_from_the_top() -> None:
    rungs = Rungs(min_resource=4, reduction_factor=2)
    curves = {0: {4: 0.5}, 1: {4: 0.3, 8: 0.2}, 2: {4: 0.3}, 3: {4: float("nan")}, 4: {4: 0.4, 8: 0.1}, 5: {}}
    curves |= {6: {4: 0.9}, 7: {5: 0.8}}
    paused = {0: 0, 1: 1, 2: 0, 3: 0, 4: 1, 6: 0}
    # Seven jobs have reached rung 0, of which the best three are 1, 2 and 4; the better one of two at rung 1 continues.
    assert rungs.choose(curves, paused, maximizes=False) == [(4, 2), (2, 1)]
    # The best three are 6, 7, which has failed, and 0.
    assert rungs.choose(curves, paused, maximizes=True) == [(1, 2), (6, 1), (0, 1)]
    # A job that was promoted to rung 1 and has paused without a value there is not promoted again.
    assert rungs.choose(curves, {**paused, 2: 1}, maximizes=False) == [(4, 2)]
    # All values but one are not finite: at most that one is promoted.
    diverged = {job: {4: float("nan") if job else 1.0} for job in range(4)}
    assert rungs.choose(diverged, dict.fromkeys(diverged, 0), maximizes=True) == [(0, 1)]
    # Rare evaluations: the first one has reached the rungs at 4, 8 and 16.
    rare = {0: {20: 0.1}, 1: {20: 0.2}}
    assert rungs.choose(rare, {0: 0, 1: 0}, maximizes=False) == [(0, 3)]
    assert rungs.choose({}, {}, maximizes=False) == []


def test_a_job_is_paused_only_if_the_ledger_says_so(tmp_path: Path) -> None:
    job = JobRecord(0, "0-a", ["a=1"], tmp_path / "0-a")
    job.directory.mkdir()
    (job.directory / "result.json").write_text('{"state": "paused", "step": 4}')
    ledger.write_lines(tmp_path, job.line())
    for state, expected in [("running", "lost"), ("paused", "paused")]:
        ledger.write_state(tmp_path, 0, state)
        assert read_ledger(tmp_path)[0].state == expected
    ledger.write_lines(tmp_path, ledger.promotion(0, rung=2))
    (promoted,) = read_ledger(tmp_path)
    assert (promoted.state, promoted.rung, promoted.is_due) == ("waiting", 2, True)
    for state, expected in [("running", "lost"), ("failed", "failed"), ("preempted", "preempted")]:
        ledger.write_state(tmp_path, 0, state)
        assert (read_ledger(tmp_path)[0].state, read_ledger(tmp_path)[0].rung) == (expected, 2)
    (job.directory / "result.json").write_text('{"state": "finished", "step": 16}')
    assert read_ledger(tmp_path)[0].state == "finished"


def test_the_sampler_learns_from_paused_trials_which_can_still_finish() -> None:
    storage = optuna.storages.InMemoryStorage()
    real = optuna.create_study(storage=storage, study_name="both")
    paused, new = real.ask(), real.ask()
    paused.report(0.5, 4)
    seen = optuna.load_study(study_name="both", storage=PausedAsPruned(storage))
    assert [trial.state.name for trial in seen.trials] == ["PRUNED", "RUNNING"]
    assert seen.get_trials(states=[optuna.trial.TrialState.PRUNED])[0].intermediate_values == {4: 0.5}
    real.tell(paused, 0.1)
    assert [trial.state.name for trial in seen.trials] == ["COMPLETE", "RUNNING"]
    assert seen.ask().number == new.number + 1
    assert len(copy.deepcopy(PausedAsPruned(storage)).get_all_trials(real._study_id)) == 3


@pytest.mark.thorough
def test_trials_pause_and_the_best_ones_finish_as_without_a_pause(
    here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("-m", *TOY, *ASHA) == 0
    sweep = only_run(tmp_path).path
    jobs = jobs_of(tmp_path)
    num_finished = sum(job.state == "finished" for job in jobs)
    assert f"4 of 4 jobs finished or paused ({4 - num_finished}): {sweep}" in capsys.readouterr().out
    assert [job.state for job in jobs if job.state != "paused"] == ["finished"] * num_finished and num_finished
    steps = [Run(job.directory).result["step"] for job in jobs]
    assert steps == [min(4 * 2**job.rung, 16) for job in jobs] and sum(steps) < 4 * 16
    assert [job.num_starts for job in jobs] == [1 + job.rung for job in jobs]
    # At most half of the jobs at each rung were promoted, and the best one was.
    reached = [[job for job in jobs if job.rung >= rung] for rung in range(3)]
    assert all(len(above) <= len(below) for below, above in itertools.pairwise(reached))
    losses = {job.number: Run(job.directory).values("val/loss") for job in jobs}
    assert min(jobs, key=lambda job: losses[job.number][4]).rung > 0

    best = next(job for job in jobs if job.state == "finished")
    assert (
        here(*TOY, f"optimizer.lr={dict(each.split('=') for each in best.overrides)['optimizer.lr']}", "name=plain")
        == 0
    )
    plain = only_run(tmp_path, "plain")
    assert plain.result["weights_sha256"] == Run(best.directory).result["weights_sha256"]
    assert plain.values("val/loss") == losses[best.number]

    before = decisions(sweep)
    assert here("-m", "resume=last") == 0  # nothing is left
    assert decisions(sweep) == before and jobs_of(tmp_path)[0].num_starts == jobs[0].num_starts
    removed = next(job for job in jobs if job.state == "paused").directory.rename(tmp_path / "removed")
    assert here("-m", "resume=last") == 1  # which keeps the value of the trial, and does not train it again
    assert decisions(sweep) == before and [job.num_starts for job in jobs_of(tmp_path)] == [1 + j.rung for j in jobs]
    removed.rename(next(job.directory for job in jobs_of(tmp_path) if job.state == "removed"))
    assert here("-m", "resume=last", "hydra.sweeper.n_trials=6") == 0
    assert decisions(sweep)[: len(before)] == before and len(jobs_of(tmp_path)) == 6
    # A paused trial may be trained to its end as a single run; its study then knows its value.
    paused = next(job for job in jobs_of(tmp_path) if job.state == "paused")
    assert here(f"resume={paused.directory}") == 0
    assert here("-m", "resume=last") == 0
    finished = next(job for job in jobs_of(tmp_path) if job.number == paused.number)
    assert (finished.state, finished.rung) == ("finished", paused.rung)
    journal = optuna.storages.journal.JournalFileBackend(str(sweep / "study.journal"))
    trials = optuna.load_study(study_name=sweep.name, storage=optuna.storages.JournalStorage(journal)).trials
    states = {"finished": "COMPLETE", "paused": "RUNNING"}
    assert [trial.state.name for trial in trials] == [states[job.state] for job in jobs_of(tmp_path)]
    assert trials[finished.number].value == finished.metrics["val/loss"]


def kill_at_times(number: int) -> None:
    """Kill this process after its first proposal, and then, in turn, at other times.

    Those are before it records its third pause, after its eighth write, and in a promoted trial.
    """
    real_write, real_report = ledger.write_lines, TrialPruner.__call__
    num_writes, num_pauses = itertools.count(1), itertools.count(1)

    def write(directory: Path, *lines: dict[str, Any]) -> None:
        pauses = any(line.get("state") == "paused" for line in lines)
        if number == 0 and any("label" in line for line in lines):  # the study already has the trials
            os.kill(os.getpid(), signal.SIGKILL)
        if number % 3 == 0 and pauses and next(num_pauses) == 3:  # result.json has been written
            os.kill(os.getpid(), signal.SIGKILL)
        real_write(directory, *lines)
        if number % 3 == 1 and next(num_writes) == 8:
            os.kill(os.getpid(), signal.SIGKILL)

    def report(pruner: TrialPruner, step: int, metrics: dict[str, float]) -> bool:
        ends = real_report(pruner, step, metrics)
        if number % 3 == 2 and step > 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return ends

    ledger.write_lines = study.write_lines = write
    TrialPruner.__call__ = report  # type: ignore[method-assign]


@pytest.mark.thorough
def test_a_sweep_that_is_killed_often_decides_as_one_in_slots(commands: Commands, tmp_path: Path) -> None:
    arguments = ("-m", *TOY, *ASHA, "hydra.sweeper.n_jobs=2")
    slots = commands.start("-m", "runner", *arguments, "hydra/launcher=slots", "hydra.launcher.slots=2", "name=slots")

    statuses = []
    while not statuses or statuses[-1] == -signal.SIGKILL:
        number = len(statuses)
        words = ("-m", "resume=last") if number else arguments
        done = commands.finish(commands.fork(*words, prepare=functools.partial(kill_at_times, number)))
        statuses.append(done.returncode)
        assert number < 20
    assert statuses == [-signal.SIGKILL] * (len(statuses) - 1) + [0] and len(statuses) > 3, done.stdout + done.stderr
    done = commands.finish(slots)
    assert done.returncode == 0, done.stdout + done.stderr
    killed, undisturbed = only_run(tmp_path).path, only_run(tmp_path, "slots").path
    assert decisions(killed) == decisions(undisturbed)
    assert outcomes(killed) == outcomes(undisturbed)
    assert {job.state for job in read_ledger(killed)} == {"finished", "paused"}


EXITS = """
import os
from pathlib import Path

from runner import Callback


class Exits(Callback):
    def __init__(self):
        if len(list(Path().glob("outputs/run/*/*/checkpoints"))) == 2:  # in the promoted trial
            os._exit(0)
"""


@pytest.mark.thorough
def test_a_promoted_trial_that_exits_before_it_continues_has_not_paused_again(here: Here, tmp_path: Path) -> None:
    write_files(tmp_path / "mine", {"exits.py": EXITS, "callbacks/exits.yaml": "exits: {_target_: exits.Exits}\n"})
    two = [word.replace("n_trials=4", "n_trials=2") for word in ASHA]
    slots = ("hydra/launcher=slots", "hydra.launcher.slots=1")
    assert here("--config-dir", "mine", "-m", "callbacks=exits", *TOY, *two, *slots) == 1
    promoted, paused = sorted(jobs_of(tmp_path), key=lambda job: -job.rung)
    assert (promoted.state, promoted.error, paused.state) == ("failed", "exit status 0", "paused")


@pytest.mark.thorough
def test_two_ranks_pause_at_the_same_step(commands: Commands, tmp_path: Path) -> None:
    arguments = ("-m", *TOY, "parallel=ddp", *ASHA)
    done = commands.forked_world(2, *arguments)
    assert [each.returncode for each in done] == [0, 0], done[0].stdout + done[0].stderr
    for job in jobs_of(tmp_path):
        result = Run(job.directory).result
        assert (result["state"], result["world_size"]) == (job.state, 2)
        assert result["step"] == min(4 * 2**job.rung, 16) and job.num_starts == 1 + job.rung
    assert {job.state for job in jobs_of(tmp_path)} == {"finished", "paused"}
