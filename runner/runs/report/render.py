"""A report as text: for the terminal, as Markdown, as CSV."""

import csv
import dataclasses
import io
import math
import shlex
from collections.abc import Sequence

from rich.table import Table

from runner.runs.console import draw_table, width_of_terminal
from runner.runs.monitor import LOSS, evaluated
from runner.runs.records import RunRecord, ran
from runner.runs.report.statistics import Row, Summary, as_number, show, summarize

BESIDES = ("train/loss", "samples_per_second")  # shown beside the chosen metric and some others of an evaluation
MAX_METRICS = 4
MAX_ROWS = 30  # on the terminal

Cells = list[list[str]]


def command_of(job: RunRecord) -> str:
    """What starts the job again, to be copied into a shell."""
    runner = ["python", "-m", "runner"]
    if job.world_size > 1 and not job.starts_processes:
        runner = ["torchrun", "--nproc-per-node", str(job.world_size), "-m", "runner"]
    folders = [f"--config-dir={folder}" for folder in job.config_dirs]
    return shlex.join([*runner, *folders, *job.typed])


def table(report: Summary) -> Cells:
    """Header and rows, best first."""
    metrics = _metrics(report)
    cells = [[*(report.keys or ["run"]), *metrics, "n", "unfinished"]]
    for row in report.rows:
        numbers = [str(row.means[name]) if name in row.means else "" for name in metrics]
        cells.append([*(row.values.values() or [row.name]), *numbers, str(len(row.finished)), _states(row)])
    return _without_empty_columns(cells)


def effects(report: Summary) -> Cells:
    """What each key did: the mean over the configurations that have the value."""
    cells = [["key", "value", f"mean {report.metric}", "configurations"]]
    for key, values in report.effects.items():
        cells += [[key, value, show(mean.value), str(mean.count)] for value, mean in values]
    return cells


def failures(report: Summary) -> Cells:
    """Each job without a result, and why."""
    cells = [["job", "state", "why"]]
    return cells + [[job.label, job.state, reason(job.error)] for job in report.unfinished]


def reason(error: str) -> str:
    """The line of a traceback that says what was wrong."""
    lines = error.strip().splitlines()
    return lines[-1].strip() if lines else ""


def best(report: Summary) -> list[str]:
    """Which configuration, and the command for it; nothing where no job has the metric."""
    row = report.best
    if row is None or report.metric is None:
        return []
    seeds = f" over {len(row.finished)} seeds" if len(row.finished) > 1 else ""
    chosen = [job for job in row.finished if math.isfinite(job.metrics.get(report.metric, math.nan))]
    sign = 1 if report.descending else -1
    job = max(chosen, key=lambda job: sign * job.metrics[report.metric or ""])
    return [f"best {row.name}: {report.metric} {row.means[report.metric]}{seeds}", f"  {command_of(job)}"]


def closing(jobs: list[RunRecord]) -> str:
    """The end of a sweep whose jobs have been listed: how they compare, where there is something to compare."""
    if len(ran(jobs)) < 2:
        return ""
    report = summarize(jobs)
    return as_text(dataclasses.replace(report, jobs=report.finished, rows=[row for row in report.rows if row.means]))


def as_text(report: Summary) -> str:
    """For the terminal."""
    shown = dataclasses.replace(report, rows=report.rows[:MAX_ROWS])
    parts = [_text_table(table(shown))]
    if len(report.rows) > MAX_ROWS:
        parts[0] += f"\nand {len(report.rows) - MAX_ROWS} more, which task=report writes in report.md"
    if lines := best(report):
        parts.append("\n".join(lines))
    if any(len(values) > 1 for values in report.effects.values()) and len(report.rows) > 2:
        parts.append(_text_table(effects(report)))
    if report.unfinished:
        parts.append(_text_table(failures(report)))
    return "\n\n".join(parts)


def as_markdown(report: Summary, title: str, pictures: Sequence[str]) -> str:
    """The whole report, with the pictures that lie beside it."""
    order = "largest" if report.descending else "smallest"
    parts = [f"# {title}"]
    if report.metric:
        parts.append(f"Sorted by {report.metric}, the {order} first; mean ± standard deviation over n seeds.")
    parts.append(_markdown_table(table(report)))
    if lines := best(report):
        parts += [f"{lines[0][0].upper()}{lines[0][1:]}", f"```sh\n{lines[1].strip()}\n```"]
    if report.effects:
        parts += ["## What each key did", _markdown_table(effects(report))]
    if report.unfinished:
        parts += ["## Without a result", _markdown_table(failures(report))]
    parts += [f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in pictures]
    return "\n\n".join(parts) + "\n"


def as_csv(report: Summary) -> str:
    """A line per configuration: its keys, how many jobs, and of every metric the mean and the deviation."""
    metrics = sorted({name for row in report.rows for name in row.means})
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    columns = [column for name in metrics for column in (name, f"{name} deviation")]
    writer.writerow([*report.keys, "jobs", "finished", *columns, "directories"])
    for row in report.rows:
        numbers: list[float | None] = []
        for name in metrics:
            mean = row.means.get(name)
            numbers += [mean.value, mean.deviation] if mean else [None, None]
        folders = " ".join(str(job.directory) for job in row.jobs)
        writer.writerow([*row.values.values(), len(row.jobs), len(row.finished), *numbers, folders])
    return file.getvalue()


def _metrics(report: Summary) -> list[str]:
    known = {name for row in report.rows for name in row.means}
    chosen = [report.metric] if report.metric else []
    monitors = [monitor.name for monitor in report.monitors]
    others = list(dict.fromkeys([*monitors, LOSS, *evaluated(sorted(known))]))[:MAX_METRICS]
    return [name for name in dict.fromkeys([*chosen, *sorted(others), *BESIDES]) if name in known or name in chosen]


def _states(row: Row) -> str:
    """What became of the jobs that did not finish."""
    states = [job.state for job in row.jobs if job.state != "finished"]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def _without_empty_columns(cells: Cells) -> Cells:
    kept = [number for number in range(len(cells[0])) if any(line[number] for line in cells[1:])]
    return [[line[number] for number in kept] for line in cells]


def _text_table(cells: Cells) -> str:
    drawn = Table(box=None, pad_edge=False)
    for number, name in enumerate(cells[0]):
        column = [line[number] for line in cells[1:]]
        numeric = all(as_number(text.split(" ")[0].replace(",", "")) is not None for text in column if text)
        drawn.add_column(name, justify="right" if numeric and name else "left", overflow="fold")
    for line in cells[1:]:
        drawn.add_row(*line)
    return draw_table(drawn, width_of_terminal())


def _markdown_table(cells: Cells) -> str:
    lines = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines)
