"""Sweeps: resuming, adding jobs, isolation of the jobs from each other, slots, and Hydra's other launchers."""

import itertools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Commands, wait_until
from custom_files import write_files
from worlds import jobs_of, only_run

from runner.launchers.agent import confine
from runner.records.ledger import JobRecord, read_ledger
from runner.records.run_record import RunRecord
from runner.sweeps.run_sweep import job_table, print_summary
from runner.sweeps.sweep import Sweep

TOY = ("model=toy", "data=toy", "epochs=1", "backend=gloo", "logger=none", "threads=1")
# A custom model that draws from global generators, changes a global setting, and fails or blocks on request.
MODULE = """\
import os
import random
import time
from pathlib import Path

import numpy
import torch
from runner.api.run_commands import run_command
from runner.shipped.models.toy import Toy

RANK = os.environ.get("RANK", "0")


class Model(Toy):
    def __init__(self, sample_shape, num_outputs, fails=False, sleeps_s=0.0, job=""):
        super().__init__(sample_shape, num_outputs)
        self.fails, self.sleeps_s, self.job, self.calls = fails, sleeps_s, job, 0
        if job == "third" and not list(Path().glob("cores-third-*")):  # both slots are in use
            for sweep in Path().glob("outputs/run/sweep-*"):
                run_command(["stop", f"{sweep}/3"])
        if job and job != "stopped":
            print("built", job)
            Path(f"cores-{job}-{os.getpid()}").write_text(",".join(map(str, sorted(os.sched_getaffinity(0)))))
        self.noise = random.random() + numpy.random.random()
        self.default_dtype = torch.get_default_dtype()

    def forward(self, samples):
        self.calls += self.training
        if self.job == "third":
            os._exit(0)
        if self.job == "stopped" and self.calls == 3 and RANK == "0" and not Path("stopped").exists():
            Path("stopped").touch()
            for job in Path().glob("outputs/run/sweep-*/0-*"):
                run_command(["stop", str(job.with_name("2"))])
                run_command(["stop", str(job)])
        while self.job == "first" and not list(Path().glob("cores-third-*")):
            time.sleep(0.02)
        if self.training:
            time.sleep(self.sleeps_s)
            while self.sleeps_s and len([*Path().glob("outputs/run/*/*/checkpoints")]) > 3 and not Path("go").exists():
                time.sleep(self.sleeps_s)
        if self.fails and self.calls == 3 and os.environ.get("RANK", "1") == "1":
            torch.set_default_dtype(torch.float64)
            raise ArithmeticError("failed on rank 1")
        return super().forward(samples) + 0.01 * self.noise
"""
OPTIONS = """\
_target_: custom.Model
sample_shape: ${data.sample_shape}
num_outputs: ${data.num_outputs}
fails: false
sleeps_s: 0.0
job: ""
"""
CUSTOM = ("--config-dir", "mine", *TOY[1:], "model=custom")

Here = Callable[..., int]  # the fixture of conftest.py


@pytest.fixture
def custom(tmp_path: Path) -> Path:
    """Return the working directory, in which `mine` has the custom model."""
    write_files(tmp_path / "mine", {"custom.py": MODULE, "model/custom.yaml": OPTIONS})
    return tmp_path


def result_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "result.json").read_text())


def modification_times(job: JobRecord) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in (job.directory, *job.directory.rglob("*"))}


def test_a_resumed_sweep_runs_unfinished_and_new_jobs(here: Here, tmp_path: Path) -> None:
    assert here("-m", *TOY, "optimizer.lr=0.1,0.01") == 0
    before = jobs_of(tmp_path)
    assert [job.label for job in before] == ["0-lr-0.1", "1-lr-0.01"]
    untouched = modification_times(before[0])
    # As if the machine had failed in the second job, before its first checkpoint.
    result = result_of(before[1].directory)
    shutil.rmtree(before[1].directory / "checkpoints")
    (before[1].directory / "result.json").write_text(json.dumps(result | {"state": "running"}))
    ledger = only_run(tmp_path).path / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))

    assert here("-m", "resume=last", "seed=0,1") == 0
    after = jobs_of(tmp_path)
    assert [job.label for job in after] == ["0-lr-0.1", "1-lr-0.01", "2-lr-0.1_seed-1", "3-lr-0.01_seed-1"]
    assert [(job.state, job.num_starts) for job in after] == [("finished", count) for count in (1, 2, 1, 1)]
    assert modification_times(after[0]) == untouched
    assert result_of(after[1].directory)["weights_sha256"] == result["weights_sha256"]

    untouched = {job.number: modification_times(job) for job in after}
    assert here("-m", f"resume={only_run(tmp_path).path}") == 0
    assert {job.number: modification_times(job) for job in jobs_of(tmp_path)} == untouched


def test_jobs_with_equal_values_run_once_and_names_keep_what_was_typed(
    here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swept = (*TOY, "max_steps=1", "name=1e5,x,1e5", "optimizer.lr=0.1,1e-1", "seed=1,'1'")
    assert here("-m", *swept, "backend.timeout_s='60'") == 0
    jobs = read_ledger(only_run(tmp_path, "1e5").path)
    assert [(job.label, job.state) for job in jobs] == [("0-name-1e5", "finished"), ("1-name-x", "finished")]
    assert "equal values: 10 of 12 jobs would repeat another one, and run only once\n" in capsys.readouterr().out
    assert [result_of(job.directory)["seed"] for job in jobs] == [1, 1]


@pytest.mark.thorough
def test_shared_values_cannot_change_when_a_sweep_is_resumed(
    here: Here, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert here("-m", *TOY, "seed=0,1") == 0
    before = (only_run(tmp_path).path / "ledger.jsonl").read_text()
    capfd.readouterr()
    assert here("-m", "resume=last", "epochs=2", "optimizer.lr=0.5", "model=linear") == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "values that its jobs share have changed: " in error
    for text in ("models.linear.Linear)", "optimizer.lr (0.05, now 0.5)", "epochs (1, now 2)"):
        assert text in error
    assert here(f"resume={only_run(tmp_path).path}") == 2
    assert "is a sweep; add -m" in capfd.readouterr().err
    assert here("-m", f"resume={jobs_of(tmp_path)[0].directory}") == 2
    assert "is no sweep directory (it has no ledger.jsonl)" in capfd.readouterr().err
    assert (only_run(tmp_path).path / "ledger.jsonl").read_text() == before


@pytest.mark.thorough
def test_values_of_zipped_keys_change_together(here: Here, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of a group as well, and with a key that the default option of the group lacks (betas)."""
    swept = (*TOY, "max_steps=1", "optimizer=adam,adamw", "batch_size=64,128", "seed=range(2)")
    swept = (*swept, "optimizer.betas=[0.5,0.9]")
    assert here("-m", *swept, "hydra.sweeper.zip=[optimizer,batch_size]") == 0
    jobs = jobs_of(tmp_path)
    assert [(job.state, job.overrides[-4:-1]) for job in jobs] == [
        ("finished", [f"optimizer={name}", f"batch_size={size}", f"seed={seed}"])
        for name, size in (("adam", 64), ("adamw", 128))
        for seed in (0, 1)
    ]
    for zipped, message in (
        ("[optimizer]", "must name at least two keys"),
        ("[[optimizer,seed],[seed,batch_size]]", "each only once"),
        ("[optimizer,batch_siz]", "batch_siz has no values; did you mean batch_size?"),
        ("[optimizer,epochs]", "optimizer has 2, epochs has 1"),
    ):
        assert here("-m", *swept, f"hydra.sweeper.zip={zipped}") == 2
        assert message in capfd.readouterr().err


@pytest.mark.thorough
def test_a_removed_job_is_named_and_runs_again(here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that was resumed by itself has its new metrics in the table of jobs and in the comparison."""
    assert here("-m", *TOY, "seed=0,1,2") == 0
    removed, longer, _ = [job.directory for job in jobs_of(tmp_path)]
    shutil.rmtree(removed)
    assert here(f"resume={longer}", "epochs=2") == 0
    assert here("task=report", "run=last") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-3] for line in lines if line.endswith("1 removed")] == ["1"]  # n of the two with epochs=1
    assert any(line.split()[:2] == [removed.name, "removed"] and "runs it again" in line for line in lines)
    assert print_summary(removed.parent)
    assert "2 of 3 jobs finished" in capsys.readouterr().out

    loss = f"{result_of(longer)['metrics']['val/loss']:.4f}"
    assert here("-m", "resume=last") == 0
    output = capsys.readouterr().out
    assert "2 jobs are done, 1 unfinished, 0 new" in output
    (row,) = (line for line in output.splitlines() if line.startswith(longer.name))
    assert loss in row.split() and loss in output.partition(row)[2]
    assert [(job.state, job.num_starts) for job in jobs_of(tmp_path)] == [("finished", count) for count in (2, 1, 1)]
    # As if the job had been resumed by itself once more, and stopped.
    (longer / "result.json").write_text(json.dumps(result_of(longer) | {"state": "preempted"}))
    assert [job.state for job in jobs_of(tmp_path)] == ["finished", "preempted", "finished"]


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.thorough), pytest.param(2, marks=pytest.mark.soak)]
)
def test_one_job_of_a_serial_sweep_is_stopped(ranks: int, commands: Commands, custom: Path) -> None:
    """The first job stops itself and the last one in its third step, by `runs stop`; the sweep runs the second one."""
    arguments = ("-m", *CUSTOM, "model.job=stopped,other,last", *["parallel=ddp"] * (ranks > 1))
    first, *_ = done = commands.forked_world(ranks, *arguments)
    assert [each.returncode for each in done] == [1] * ranks, first.stdout + first.stderr
    jobs = [(job.state, job.num_starts) for job in jobs_of(custom)]
    assert jobs == [("preempted", 1), ("finished", 1), ("preempted", 0)]
    assert list(jobs_of(custom)[0].directory.glob("checkpoints/step_[34]")) != []
    assert "1 of 3 jobs finished" in first.stdout and "2-job-last was stopped before it started" in first.stdout
    done = commands.forked_world(ranks, "-m", "resume=last")
    assert [each.returncode for each in done] == [0] * ranks, done[0].stdout + done[0].stderr
    assert [(job.state, job.num_starts) for job in jobs_of(custom)] == [("finished", n) for n in (2, 1, 1)]
    one, other, _ = (result_of(job.directory) for job in jobs_of(custom))
    assert one["step"] == other["step"] and one["weights_sha256"] == other["weights_sha256"]


@pytest.mark.parametrize("launcher", [(), ("hydra/launcher=slots", "hydra.launcher.slots=1")])
def test_no_job_starts_after_one_has_failed_if_that_stops_the_sweep(
    launcher: tuple[str, ...], here: Here, custom: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    zipped = ("hydra.sweeper.zip=[model.fails,seed]", "model.fails=false,true,false", "seed=0,1,2")
    assert here("-m", *CUSTOM, *launcher, *zipped, "sweep.stop_on_failure=true") == 1
    assert [job.state for job in jobs_of(custom)] == ["finished", "failed", "waiting"]
    assert "was not started, because 1-" in capfd.readouterr().out
    assert here("-m", "resume=last", "sweep.stop_on_failure=false") == 1
    assert [job.state for job in jobs_of(custom)] == ["finished", "failed", "finished"]
    assert [job.num_starts for job in jobs_of(custom)] == [1, 2, 1]


@pytest.mark.fault("kill -9 of a sweep", outcome="survived")
@pytest.mark.thorough
def test_a_sweep_that_is_killed_twice_runs_each_job_to_its_end_once(commands: Commands, custom: Path) -> None:
    arguments = ("-m", *CUSTOM, "model.sleeps_s=0.03", "checkpoint.every_steps=1", "seed=range(4)")
    process = commands.fork(*arguments)
    wait_until(lambda: list(custom.glob("outputs/run/*/ledger.jsonl")) != [], process)
    for kills in (1, 2):
        wait_until(lambda kills=kills: len([j for j in jobs_of(custom) if j.state == "finished"]) >= kills, process)
        time.sleep(random.uniform(0, 0.5))
        process.send_signal(signal.SIGSTOP)  # the process keeps its lock of the sweep
        if kills == 1:
            second = commands.forked("-m", "resume=last")
            assert second.returncode == 2 and f"locked by process {process.pid} on " in second.stderr
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        if kills == 2:
            (custom / "go").touch()  # the last job waits for it
        process = commands.fork("-m", "resume=last")
    finished = commands.finish(process)
    assert finished.returncode == 0, finished.stderr
    jobs = jobs_of(custom)
    assert [(job.label, job.state) for job in jobs] == [(f"{n}-seed-{n}", "finished") for n in range(4)]
    lines = [json.loads(line) for line in (only_run(custom).path / "ledger.jsonl").read_text().splitlines()]
    finished = [line["number"] for line in lines if line.get("state") == "finished"]
    assert finished == sorted(set(finished))  # a kill may have prevented a line, but not the run's result.json


@pytest.mark.fault("one rank raises, in a job of a sweep", outcome="refused")
@pytest.mark.thorough
def test_a_failure_on_one_rank_fails_only_its_job(commands: Commands, custom: Path) -> None:
    """The second of four jobs in one world raises on rank 1; the weights of the others are those of a single run."""
    zipped = ("hydra.sweeper.zip=[model.fails,seed,log_every]", "model.fails=false,true,false,false")
    zipped += ("seed=1,0,0,1", "log_every=1,1,1,2")  # equal jobs would run once
    done, other = commands.forked_world(2, "-m", *CUSTOM, "parallel=ddp", *zipped)
    assert (done.returncode, other.returncode) == (1, 1)
    jobs = jobs_of(custom)
    assert [job.state for job in jobs] == ["finished", "failed", "finished", "finished"]
    assert "3 of 4 jobs finished" in done.stdout
    assert f"{jobs[1].label} failed: {jobs[1].directory / 'log.txt'}\n" in done.stdout
    assert "ArithmeticError: failed on rank 1" in (jobs[1].directory / "log.txt").read_text()
    hashes = [result_of(job.directory).get("weights_sha256") for job in jobs]
    alone = commands.forked_world(2, *CUSTOM, "parallel=ddp", "name=alone", "seed=1")
    assert [each.returncode for each in alone] == [0, 0], alone[0].stderr
    (single,) = (custom / "outputs" / "alone").iterdir()
    assert hashes[0] == hashes[3] == result_of(single)["weights_sha256"] != hashes[2]


@pytest.mark.fault("a job in a slot that calls os._exit(0)", outcome="refused")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two slots need two cores")
@pytest.mark.thorough
def test_slots_have_one_job_at_a_time_and_jobs_start_as_soon_as_slots_are_free(
    commands: Commands, custom: Path
) -> None:
    """The first job ends only after the start of the third, which stops the next one and exits before its run ends.

    The last job has two ranks.
    """
    swept = (
        "model.job=first,second,third,skipped,last",
        "launcher=env,env,env,env,spawn",
        "hydra.sweeper.zip=[model.job,launcher]",
    )
    arguments = [override for override in CUSTOM if not override.startswith("threads=")]
    process = commands.start("-m", "runner", "-m", *arguments, "parallel=allreduce", "hydra/launcher=slots", *swept)
    done = commands.finish(process)
    assert done.returncode == 1, done.stdout + done.stderr
    jobs = jobs_of(custom)
    skipped = jobs.pop(3)
    assert (skipped.state, skipped.error) == ("preempted", "stopped before it started")
    assert [job.state for job in jobs] == ["finished", "finished", "failed", "finished"]
    assert jobs[2].error == "exit status 0"
    assert [job.slots for job in jobs] == [[0], [1], [1], [0, 1]]
    for job, name in ((jobs[0], "first"), (jobs[3], "last")):  # the terminal shows no output of a job in a slot
        assert (job.directory / "log.txt").read_text().splitlines().count(f"built {name}") == 1
    spans = [(job.start or 0, job.end or 0) for job in jobs]
    assert sorted(spans) == spans  # the jobs started in their order
    for (first, a), (second, b) in itertools.combinations(zip(jobs, spans, strict=True), 2):
        if max(a[0], b[0]) < min(a[1], b[1]):
            assert not set(first.slots) & set(second.slots)
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    cores_of_slot = [cores[:half], cores[half : 2 * half]]
    for job, name in zip(jobs, ("first", "second", "third", "last"), strict=True):
        expected = ",".join(map(str, sorted(core for slot in job.slots for core in cores_of_slot[slot])))
        found = [path.read_text() for path in custom.glob(f"cores-{name}-*")]
        assert found == [expected] * len(job.slots)


@pytest.mark.fault("kill -9 of a sweep", outcome="survived")
@pytest.mark.thorough
def test_a_sweep_in_slots_is_stopped_by_a_signal_and_resumed(commands: Commands, custom: Path) -> None:
    arguments = ("-m", *CUSTOM, "model.sleeps_s=0.5", "seed=range(3)", "hydra/launcher=slots", "hydra.launcher.slots=1")
    process = commands.start("-m", "runner", *arguments)
    wait_until(lambda: list(custom.glob("outputs/run/*/0-*/metrics.jsonl")) != [], process)
    process.send_signal(signal.SIGINT)
    assert commands.finish(process).returncode == 143
    wait_until(lambda: commands.living(process) == [])
    assert [job.state for job in jobs_of(custom)] == ["preempted", "waiting", "waiting"]

    process = commands.start("-m", "runner", "-m", "resume=last")  # hydra/launcher=slots is recorded
    wait_until(lambda: jobs_of(custom)[0].num_starts == 2, process)
    wait_until(lambda: len(commands.living(process)) > 1, process)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    wait_until(lambda: commands.living(process) == [])


@pytest.mark.parametrize(("visible", "expected"), [("", "1,2"), ("4,5,7", "5,7")])
def test_a_slot_sees_only_its_gpus(visible: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, cores: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    confine([0], [1, 2])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_the_joblib_launcher_runs_the_same_jobs(commands: Commands, custom: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs hydra-joblib-launcher")
    done = commands.runner(
        "-m", *CUSTOM, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=0,1", "model.fails=true,false"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    jobs = jobs_of(custom)
    assert [job.state for job in jobs] == ["failed", "finished"] * 2
    assert "2 of 4 jobs finished" in done.stdout


def test_cross_validation_ends_with_means_over_the_folds(
    here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "".join(f"{number % 7},{number % 5},{number % 2}\n" for number in range(10))
    (tmp_path / "table.csv").write_text(f"a,b,label\n{lines}")
    data = ("model=linear", "data=table", "data.files.train=table.csv", "data.sample_shape=[2]", "data.num_outputs=2")
    folds = ("val_fraction=0.33", "val_fold=range(3)", "optimizer.lr=0.1,0.2", "report.over=[val_fold]")
    assert here("-m", *data, *TOY[2:], *folds) == 0
    table = capsys.readouterr().out.partition("optimizer.lr")[2]
    assert table.count("±") >= 4 and "over 3 runs that differ in val_fold" in table
    assert here("task=report", "run=last") == 0
    assert "over 3 runs that differ in val_fold" in capsys.readouterr().out
    jobs = [job for job in jobs_of(tmp_path) if "optimizer.lr=0.1" in job.overrides]
    assert here("-m", "name=folds", "task=predict", f"run={','.join(str(job.directory) for job in jobs)}") == 0
    files = list((tmp_path / "outputs" / "folds").glob("sweep-*/*/predictions.csv"))
    rows = [row.split(",")[0] for file in files for row in file.read_text().splitlines()[1:]]
    assert sorted(map(int, rows)) == list(range(10))
    capsys.readouterr()
    fifth, no_effect = ("val_fraction=0.2",), "no effect without task=report"
    for words, message in {
        (*fifth, "report.over=[val_flod]"): "the jobs do not differ in val_flod; did you mean val_fold",
        (*fifth, "report.metric=val/loss"): f"report.metric: {no_effect}",
        (
            "val_fraction=0.4",
        ): "val_fold=0 must be below the number of folds, which must be whole and is 1 / val_fraction",
        (): "val_fold=0 has no effect without val_fraction; add val_fraction=0.2",
    }.items():
        assert here("-m", *data, *TOY[2:], "val_fold=0,1", *words) == 2
        assert message in capsys.readouterr().err


def test_slots_are_refused_inside_a_world(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    assert here("-m", *TOY, "hydra/launcher=slots", "seed=0,1") == 2
    assert "hydra/launcher=slots starts jobs itself" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_jobs_shows_brackets_in_errors(tmp_path: Path) -> None:
    error = "Traceback\nRuntimeError: [/__w/gloo/pair.cc:547] Timed out [optimizer.lr]"
    lines = job_table([RunRecord(tmp_path / "0-seed-0", "failed", error=error)]).splitlines()
    assert lines[1].split(maxsplit=2)[:2] == ["0-seed-0", "failed"]
    assert lines[1].rstrip().endswith("RuntimeError: [/__w/gloo/pair.cc:547] Timed out [optimizer.lr]")


@pytest.mark.fault("a ledger that loses its jobs", outcome="refused")
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_sweep_whose_ledger_lacks_jobs_does_not_succeed(
    kept: int, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finish = Sweep.write_outcome

    def lose(self: Sweep, job: JobRecord, metrics: dict[str, float]) -> str:
        state = finish(self, job, metrics)
        ledger = job.directory.parent / "ledger.jsonl"
        lines = ledger.read_text().splitlines(keepends=True)
        jobs = [line for line in lines if '"label"' in line]
        ledger.write_text("".join(line for line in lines if line not in jobs[kept:]))
        return state

    monkeypatch.setattr(Sweep, "write_outcome", lose)
    assert here("-m", *TOY, "max_steps=1", "seed=0,1,2") == 1
    lost = f"ledger.jsonl has lost {3 - kept} job{'s' * (kept < 2)} of the sweep, such as {kept}-seed-{kept}"
    assert lost in capsys.readouterr().err


def test_the_standard_input_of_a_job_in_a_slot_is_empty(commands: Commands, tmp_path: Path) -> None:
    """The pipe from the sweep carries signals, which user code must not read."""
    reads = """\
        import os

        from runner import Callback


        class Reads(Callback):
            def on_start(self, run):
                assert os.read(0, 1) == b""
        """
    write_files(tmp_path, {"mine/reads.py": reads})
    words = ("--config-dir=mine", "+callbacks.reads._target_=reads.Reads", "hydra/launcher=slots", "seed=0,1")
    done = commands.forked("-m", *TOY, *words)
    assert done.returncode == 0, done.stdout + done.stderr
