"""The command `runs watch`: a table of the jobs of a sweep, or of the runs below a directory, while they run."""

import math
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from rich.live import Live
from rich.text import Text

from runner.errors import InputError, printable
from runner.records.console import is_terminal
from runner.records.ledger import DONE, is_sweep, read_ledger
from runner.records.listing import ORDERS, Row, describe_age, list_rows
from runner.records.record_files import parse_metrics, read_last_metrics
from runner.records.result import RUNNING, read_result
from runner.records.run_lock import living_owner
from runner.records.start_time import MAX_TIME
from runner.records.tables import format_number, text_table, without_empty_columns

INTERVAL_S = 2.0
MAX_STEPS = 2**37  # the number of steps of a stream without a length is larger, and is not shown


def watch(folder: Path) -> int:
    """Print the table until no run is in progress, and return 0 if all of the runs are done, otherwise 1.

    On a terminal the table is redrawn; otherwise it is printed each time that a state changes. For a directory that is
    not a sweep, only the runs that are in progress are watched.
    """
    is_live, watched, states, is_over = is_terminal(), {folder}, None, False
    with Live(auto_refresh=False) if is_live else nullcontext() as live:
        while True:
            start, skipped = time.monotonic(), list[str]()
            rows = list_rows(folder, expands_jobs=True, skipped=skipped)
            locked = {path for path in {folder, *(row.path.parent for row in rows)} if living_owner(path)}
            active = {row.path for row in rows if row.state in (RUNNING, "queued")}
            active |= {row.path for row in rows if row.state == "waiting" and row.path.parent in locked}
            watched |= active
            shown = [row for row in rows if is_sweep(folder) or row.path in watched]
            shown.sort(key=ORDERS["state"])
            before, states = states, [(row.path, row.state) for row in shown]
            if live:
                live.update(Text(_describe(shown)), refresh=True)
            elif states != before:
                print(f"{_describe(shown)}\n", flush=True)
            in_progress = bool(active or locked) or _is_in_queue([row.path for row in shown if row.state not in DONE])
            if is_over and not in_progress:
                break
            if is_over := not in_progress:
                continue  # read the files again, because the last run may have ended after its row was read
            time.sleep(max(INTERVAL_S, 4 * (time.monotonic() - start)))  # a large directory takes seconds to read
    for line in skipped:
        print(printable(line), flush=True)
    return 0 if all(row.state in DONE for row in shown) else 1


def _is_in_queue(paths: Sequence[Path]) -> bool:
    """Return True if a run or job is in a queue, as between its preemption and the end of its requeued job."""
    from runner.launchers.slurm.queue import find_ended, last_job

    try:
        runs = {job for path in paths if (job := last_job(path))}
        sweeps = {path.parent for path in paths if is_sweep(path.parent)}
        jobs = [job for sweep in sweeps for job in read_ledger(sweep) if job.queued_as and job.directory in paths]
        if not jobs:
            return bool(runs - find_ended([*runs]))
        from runner.sweeps import queues  # imports torch

        return bool(runs - find_ended([*runs]) or {job.queued_as for job in jobs} - queues.find_ended(jobs))
    except (OSError, InputError):  # a queue cannot be queried on this machine
        return False


def _describe(rows: Sequence[Row]) -> str:
    if not rows:
        return "no run is in progress"
    cells = [["name", "state", "step", "monitor", "best", "time left"]]
    for row in rows:
        monitor = row.monitor.name if row.monitor else ""
        step, left = _progress(row)
        cells.append(
            [row.name, row.state, step, monitor, format_number(row.best) if math.isfinite(row.best) else "", left]
        )
    return f"{sum(row.state in DONE for row in rows)} of {len(rows)} done\n{text_table(without_empty_columns(cells))}"


def _progress(row: Row) -> tuple[str, str]:
    """Return the current step of the run with the number of all steps, and the estimated time left."""
    facts, lines = parse_metrics(read_result(row.path) or {}), []
    if row.state == RUNNING:
        with suppress(OSError):
            lines = read_last_metrics(row.path)
    step, num_steps = lines[-1]["step"] if lines else facts.get("step", 0), facts.get("num_steps", math.nan)
    times = [seconds for line in lines if math.isfinite(seconds := line.get("perf/step_time_s", math.nan))]
    left_s = statistics.fmean(times[-10:]) * (num_steps - step) if times else math.nan
    done = f"{step}/{num_steps}" if num_steps < MAX_STEPS else str(step or "")
    return done, describe_age(left_s) if left_s < MAX_TIME else ""
