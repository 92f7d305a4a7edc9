"""A report as text: for the terminal, as Markdown, and as CSV."""

import dataclasses
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from runner.errors import InputError, printable
from runner.records.attempts import error_line
from runner.records.compared_runs import finished_runs, varied_keys
from runner.records.interruptions import read_interruptions
from runner.records.monitor import LOSS, evaluation_metrics
from runner.records.report.statistics import Mean, ReportRow, Summary, summarize
from runner.records.run_record import RunRecord
from runner.records.tables import Cells, csv_table, format_number, markdown_table, text_table, without_empty_columns

SPEED = "samples_per_second"
OTHER_METRICS = ("train/loss", SPEED, "mfu", "goodput")  # shown after those of evaluations
MAX_METRICS = 4  # of evaluations
MAX_HOLES = 6  # configurations that are named


def command_of(job: RunRecord, without: Sequence[str] = ()) -> str:
    """Return the shell command that runs the job again, without the overrides of the keys in `without`."""
    runner = ["python", "-m", "runner"]
    launcher = str(job.settings.get("launcher._target_", ""))
    if job.world_size > 1 and launcher.endswith(".Env"):  # other launchers start the ranks
        runner = ["torchrun", "--nproc-per-node", str(job.world_size), "-m", "runner"]
    config_dirs = [f"--config-dir={path}" for path in job.config_dirs]
    overrides = [override for override in job.overrides if override.lstrip("+").partition("=")[0] not in without]
    return shlex.join([*runner, *config_dirs, *overrides])


def table(report: Summary) -> Cells:
    """Return the header and the rows, sorted from the best."""
    metrics = _metrics(report)
    cells = [[*(report.keys or ["run"]), *metrics, "n", "unfinished", "code"]]
    has_codes = len({job.code_hash for job in report.finished}) > 1
    for row in report.rows:
        numbers = [_describe(name, row.means[name]) if name in row.means else "" for name in metrics]
        code = ", ".join(dict.fromkeys(job.code_hash or "none" for job in row.finished)) if has_codes else ""
        cells.append([*(row.values.values() or [row.name]), *numbers, str(len(row.finished)), _states(row), code])
    return without_empty_columns(cells)


def _describe(name: str, mean: Mean) -> str:
    return str(mean.rounded() if name == SPEED else mean)


def effects(report: Summary) -> Cells:
    """Return the effect of each key: the mean over the configurations with each of its values."""
    cells = [["key", "value", f"mean {report.metric}", "configurations"]]
    for key, values in report.effects.items():
        cells += [[key, value, format_number(mean.value), str(mean.count)] for value, mean in values]
    return cells


def failures(report: Summary) -> Cells:
    """Return a table of the unfinished jobs, each with the line that names its error."""
    cells = [["job", "state", "why"]]
    return cells + [[job.label, job.state, error_line(job.error or "") or ""] for job in report.unfinished]


def interruptions(report: Summary) -> Cells:
    """Return a table of what interrupted the jobs, and of the seconds that it cost."""
    cells = [["job", "step", "interruption", "seconds lost"]]
    for job in report.jobs:
        with suppress(InputError):  # an unreadable file
            found = read_interruptions(job.directory)
            cells += [[job.label, str(each.step), each.cause, f"{each.lost_s:.2f}"] for each in found]
    return cells


def best(report: Summary) -> list[str]:
    """Return a line about the best configuration and a line with its command; no lines if no job has the metric."""
    row = report.best
    if row is None or report.metric is None:
        return []
    seeds = f" over {len(row.finished)} {_averaged(report.over)}" if len(row.finished) > 1 else ""
    values = {job: job.measured[report.metric] for job in row.finished if report.metric in job.measured}
    job = (max if report.direction == "max" else min)(values, key=values.__getitem__)
    return [
        f"best {row.name}: {report.metric} {row.means[report.metric]}{seeds}",
        f"  {command_of(job, without=report.over if seeds else ())}",
    ]


def _averaged(over: Sequence[str]) -> str:
    """Return what the runs of one row are called."""
    if not over:
        return "equal runs"
    return "seeds" if list(over) == ["seed"] else f"runs that differ in {', '.join(over)}"


def holes(report: Summary) -> list[str]:
    """Return a line about the missing configurations of a grid and a line with the command that adds them."""
    if not report.missing:
        return []
    shown = "; ".join(report.missing[:MAX_HOLES]) + ("; ..." if len(report.missing) > MAX_HOLES else "")
    sweep = report.jobs[0].directory.parent
    command = shlex.join(["python", "-m", "runner", "-m", f"resume={sweep}", *report.fill])
    return [f"{len(report.missing)} missing of the grid: {shown}", f"  {command}"]


def closing(jobs: list[RunRecord], over: Sequence[str] = ("seed",)) -> str:
    """Return the comparison of a sweep's finished jobs, to print below its table of jobs; empty for fewer than two.

    over: as for `summarize`; keys that do not vary are ignored.
    """
    if len(finished_runs(jobs)) < 2:
        return ""
    varied = varied_keys(jobs)
    report = summarize(jobs, over=[key for key in over if key in varied] or ["seed"])
    return as_text(dataclasses.replace(report, jobs=report.finished, rows=[row for row in report.rows if row.means]))


def as_text(report: Summary) -> str:
    """Return the report for the terminal."""
    parts = [text_table(table(report))]
    parts += [printable("\n".join(lines)) for lines in (best(report), holes(report)) if lines]
    if any(len(values) > 1 for values in report.effects.values()) and len(report.rows) > 2:
        parts.append(text_table(effects(report)))
    if report.unfinished:
        parts.append(text_table(failures(report)))
    if len(interrupted := interruptions(report)) > 1:
        parts.append(text_table(interrupted))
    return "\n\n".join(parts)


def as_markdown(report: Summary, title: str, plots: Sequence[str]) -> str:
    """Return the complete report. `plots` are file names in the same directory."""
    parts = [f"# {title}"]
    if report.metric:
        order = {"max": "largest", "min": "smallest", None: ""}[report.direction]
        is_sorted = f"Sorted by {report.metric}, {order} first. " if order else ""
        parts.append(f"{is_sorted}Values are mean ± standard deviation over n runs.")
    parts.append(markdown_table(table(report)))
    for lines in filter(None, (best(report), holes(report))):
        parts += [f"{lines[0][0].upper()}{lines[0][1:]}", f"```sh\n{lines[1].strip()}\n```"]
    if report.effects:
        parts += ["## Effect of each key", markdown_table(effects(report))]
    if report.unfinished:
        parts += ["## Unfinished jobs", markdown_table(failures(report))]
    if len(interrupted := interruptions(report)) > 1:
        parts += ["## Interruptions", markdown_table(interrupted)]
    parts += [f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in plots]
    return printable("\n\n".join(parts)) + "\n"


def as_csv(report: Summary) -> str:
    """Return a row for each configuration: values, number of jobs, and the mean and deviation of each metric."""
    metrics = sorted({name for row in report.rows for name in row.means})
    columns = [column for name in metrics for column in (name, f"{name} deviation")]
    rows: list[list[Any]] = [[*report.keys, "jobs", "finished", *columns, "directories"]]
    for row in report.rows:
        means = [row.means.get(name) for name in metrics]
        numbers = [value for mean in means for value in ((mean.value, mean.deviation) if mean else (None, None))]
        directories = " ".join(str(job.directory) for job in row.jobs)
        rows.append([*row.values.values(), len(row.jobs), len(row.finished), *numbers, directories])
    return printable(csv_table(rows))


def _metrics(report: Summary) -> list[str]:
    known = {name for row in report.rows for name in row.means}
    chosen = [report.metric] if report.metric else []
    monitors = [monitor.name for monitor in report.monitors]
    others = list(dict.fromkeys([*monitors, LOSS, *evaluation_metrics(sorted(known))]))[:MAX_METRICS]
    names = dict.fromkeys([*chosen, *sorted(others), *OTHER_METRICS])
    return [name for name in names if name in known or name in chosen]


def _states(row: ReportRow) -> str:
    """Return the states of the unfinished jobs, each with the number of jobs."""
    states = [job.state for job in row.jobs if job.state != "finished"]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
