"""What the user is told at the end of a sweep."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from runner.runs.console import draw_table, width_of_terminal
from runner.runs.ledger import DONE, JobRecord
from runner.runs.monitor import shown
from runner.runs.records import read_jobs
from runner.runs.report.render import closing
from runner.runs.report.statistics import monitors_of
from runner.sweeps.queue_state import read_standing

MAX_METRICS = 3  # columns of the table


def conclude(directory: Path) -> bool:
    """Tell the user what became of the jobs. Returns whether any is not done."""
    jobs = read_standing(directory)
    left_out: list[str] = []
    runs = read_jobs(directory, "run", read_standing, left_out)
    known = {name for job in jobs for name in job.metrics}
    print(f"\n{table(jobs, shown(monitors_of(runs), known)[:MAX_METRICS])}\n", flush=True)
    if report := closing(runs):
        print(f"{report}\n", flush=True)
    for line in left_out:
        print(line, flush=True)
    for job in jobs:
        if job.state == "failed":
            print(f"{job.label} failed: {job.directory / 'log.txt'}", flush=True)
    done = [job for job in jobs if job.state in DONE]
    pruned = sum(job.state == "pruned" for job in done)
    what = f"finished or pruned ({pruned})" if pruned else "finished"
    print(f"{len(done)} of {len(jobs)} jobs {what}: {directory}", flush=True)
    return len(done) < len(jobs)


def table(jobs: Sequence[JobRecord], metrics: Sequence[str] = ()) -> str:
    """What became of each job, a line each, with these of its metrics."""
    lines = Table("job", "state", *metrics, "why", box=None, pad_edge=False)
    for job in jobs:
        why = (job.error or "").strip().splitlines() or [""]
        numbers = [f"{job.metrics[key]:.4f}" if key in job.metrics else "" for key in metrics]
        lines.add_row(job.label, job.state, *numbers, why[-1 if job.state == "failed" else 0])
    return draw_table(lines, width_of_terminal())
