"""task=diff: whether two runs agree up to rounding, and otherwise where they part."""

from pathlib import Path

from runner.config.recorded import read_config
from runner.config.schema import Config
from runner.distributed.environment import RankInfo
from runner.errors import InputError, JobFailed
from runner.jobs.task import LaunchingTask
from runner.records.logged_numbers import NumberComparison, compare_numbers, default_tolerance
from runner.records.result import read_result
from runner.records.run_directory import Request
from runner.tasks.rerun import differences

LARGE = 0.01  # a relative difference that needs a remark even if rounding explains it


class Diff(LaunchingTask):
    """Compares config.run, here A, with config.diff.other, B: configuration, code, versions and logged numbers."""

    section = "diff"
    reads_run = True

    def launch_jobs(self, config: Config, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Print the comparison, and return its numbers. Nothing is written.

        Raises InputError for runs that cannot be compared, and JobFailed if the runs differ.
        """
        runs = Path(str(config.run)), Path(str(config.diff.other))
        tolerance = config.diff.tolerance
        precisions = [read_config(run).precision for run in runs]
        numbers = compare_numbers(
            runs, default_tolerance(precisions) if tolerance is None else tolerance, grows=tolerance is None
        )
        if not numbers.num_steps:
            raise InputError(f"diff.with={runs[1]} has no logged step in common with run={runs[0]}; choose other runs")
        if rank_info.rank == 0:
            for name, run, precision in zip("AB", runs, precisions, strict=True):
                result = read_result(run) or {}
                world = f"world_size {result.get('world_size')}, parallel={result.get('parallel')}, {precision}"
                print(f"{name}        {run} ({world})")
            for line in differences(*runs) or ["nothing: commit, versions, machine and configuration are the same"]:
                print(f"differs  {line}")
            print(f"numbers  {describe(numbers)}", flush=True)
        if numbers.parting is not None:
            raise JobFailed("the runs differ")
        return {"diff/num_steps": float(numbers.num_steps), "diff/largest": numbers.largest.relative}


def describe(numbers: NumberComparison) -> str:
    """Return whether the logged numbers agree, and otherwise the step at which they part."""
    if (parting := numbers.parting) is not None:
        return (
            f"part at {parting}: a relative difference of {parting.relative:.1e}, of which rounding explains "
            f"{numbers.allowed:.1e}"
        )
    largest = numbers.largest
    if largest.relative == 0.0:
        return f"are equal in {numbers.num_steps} steps"
    text = f"agree to {largest.relative:.1e} in {numbers.num_steps} steps"
    if largest.relative < LARGE:
        return text
    return (
        f"{text}: {largest.metric} at step {largest.step} differs most; the difference grew from step to step, as "
        "rounding errors do; with precision=fp64 such errors stay small"
    )
