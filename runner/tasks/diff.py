"""task=diff: whether two runs agree up to rounding, and otherwise the first step at which they differ."""

from pathlib import Path
from tempfile import TemporaryDirectory

from runner.checkpoints.layout import list_checkpoints, step_of
from runner.config.command import composing, prepare
from runner.config.diagnostics.type_hints import show
from runner.config.pointers import pointer_to, quote
from runner.config.recorded_code import RECORDED
from runner.config.request import Request
from runner.distributed.environment import RankInfo
from runner.errors import InputError, JobFailed, quantity
from runner.jobs.task import LaunchingTask
from runner.launchers.launch import launch
from runner.optimization.parameter_patterns import counted
from runner.records.logged_numbers import (
    NumberComparison,
    compare_numbers,
    default_tolerance,
    describe_other_samples,
)
from runner.records.run_directory import CHECKPOINTS
from runner.records.run_record import find_run
from runner.records.settings import to_text
from runner.tasks.rerun import possible_causes
from runner.tasks.trace import TRACE, find_difference

NO_CHECKPOINTS = ("checkpoint.every_epochs=1000000", "checkpoint.every_steps=null", "checkpoint.every_seconds=null")
LARGE = 0.01  # a relative difference that is remarked upon even if rounding explains it


class Diff(LaunchingTask):
    """Compares the runs `run=` (A) and `diff.with=` (B): configuration, code, versions and logged numbers."""

    section = "diff"
    reads_run = True

    def launch_jobs(self, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Print the comparison, and return its numbers. Raise JobFailed if the runs differ."""
        config, options = request.config, request.config.diff
        if options.trace and rank_info.world_size > 1:
            raise InputError("diff.trace=true starts the ranks of both runs itself; run task=diff in one process")
        runs = Path(str(config.run)), Path(str(options.other))
        tolerance = options.tolerance
        precisions = [to_text(find_run(run).settings.get("precision", "fp32")) for run in runs]
        numbers = compare_numbers(
            runs, default_tolerance(precisions) if tolerance is None else tolerance, grows=tolerance is None
        )
        if not numbers.num_steps:
            raise InputError(f"diff.with={runs[1]} has no logged step in common with run={runs[0]}; choose other runs")
        if rank_info.rank == 0:
            for name, run, precision in zip("AB", runs, precisions, strict=True):
                record = find_run(run)
                world = f"world_size {record.world_size}, parallel={record.parallel}, {precision}"
                end = "" if record.state == "finished" else f", {record.state} at step {record.step}"
                print(f"{name}        {run} ({world}{end})")
            causes = [*possible_causes(*runs), *describe_other_samples(runs)]
            for line in causes or ["nothing: commit, versions, machine and configuration are the same"]:
                print(f"differs  {line}")
            print(f"numbers  {describe(numbers)}", flush=True)
            if options.trace and numbers.first_unexplained is None:
                print("trace    not needed, because the logged numbers agree")
        if numbers.first_unexplained is not None:
            if options.trace:
                for line in trace(request, runs, numbers, rank_info):
                    print(f"trace    {line}", flush=True)
            raise JobFailed("the runs differ")
        return {"diff/num_steps": float(numbers.num_steps), "diff/largest": numbers.largest.relative}


def describe(numbers: NumberComparison) -> str:
    """Return whether the logged numbers agree, and otherwise the first step at which they differ."""
    if (difference := numbers.first_unexplained) is not None:
        return (
            f"differ at {difference}: a relative difference of {difference.relative:.1e}, of which rounding explains "
            f"{numbers.allowed:.1e}"
        )
    largest, steps = numbers.largest, quantity(numbers.num_steps, "step")
    if largest.relative == 0.0:
        return f"are equal in {steps}"
    text = f"agree to {largest.relative:.1e} in {steps}"
    if largest.relative < LARGE:
        return text
    return (
        f"{text}: {largest.metric} at step {largest.step} differs most; the difference grew from step to step, as "
        "rounding errors do; with precision=fp64 such errors stay small"
    )


def trace(request: Request, runs: tuple[Path, Path], numbers: NumberComparison, rank_info: RankInfo) -> list[str]:
    """Repeat both runs in worlds of their sizes, and return lines about the first tensor that differs.

    The recorded steps begin with the last one at which the logged numbers agree, and end with the first one at which
    they differ.
    """
    assert numbers.first_unexplained is not None
    first, last = max(numbers.agreed, 1), numbers.first_unexplained.step
    saved = [{step_of(path) for path in list_checkpoints(run / CHECKPOINTS)} for run in runs]
    checkpoint = max((step for step in saved[0] & saved[1] if step < first), default=0)
    start = f"the checkpoints step_{checkpoint}" if checkpoint else "the start"
    steps = f"steps {first} to {last}" if first < last else f"step {last}"
    lines = [f"{steps}, repeated from {start}"]
    config, config_dirs = request.config, request.command.config_dirs
    with TemporaryDirectory(prefix="runner-diff-") as folder:
        directories = list[Path]()
        for name, run in zip("AB", runs, strict=True):
            task = ("task=trace", f"task.first={first}", f"task.last={last}", f"task.checkpoint={checkpoint}")
            world = ("launcher=spawn", f"launcher.nproc_per_node={find_run(run).world_size}")
            # compile=true would not call the hooks of modules, and a replay would record a step twice.
            without = ("compile=false", "logger=none", "replay_every_steps=null", "profile=false", *NO_CHECKPOINTS)
            where = (pointer_to(run, "run"), f"outputs={quote(folder)}", f"name={name}", f"trust={show(config.trust)}")
            overrides = [*task, f"code={config.code or RECORDED}", *world, *without, *where]
            with composing(overrides, [*config_dirs], multirun=False) as arguments:
                launch(prepare(arguments, rank_info, ()), rank_info)
            directories += Path(folder, name).glob(f"*/{TRACE}")
        found, skipped = find_difference((directories[0], directories[1]), range(first, last + 1), numbers.allowed)
    agree = "all recorded outputs and gradients agree"
    if describe_other_samples(runs):
        agree += " if both runs read the current data"
    lines += [found or agree]
    return [*lines, *([f"not compared: {counted(skipped, 8)}"] if skipped else [])]
