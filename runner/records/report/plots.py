"""A report as plots: the metric by each key, and the learning curves."""

import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.records.monitor import LOSS
from runner.records.report.statistics import Mean, ReportRow, Summary
from runner.records.run_files import write_atomically
from runner.records.tables import as_number

MAX_CURVES = 10  # of the best configurations; matplotlib has ten distinct colors


def draw(report: Summary, directory: Path) -> list[str]:
    """Write the plots for which the jobs have data, and return their names."""
    names = []
    for name, plot in {"metric_by_key.png": _metric_by_key, "learning_curves.png": _learning_curves}.items():
        figure = plot(report)
        if figure is None:
            (directory / name).unlink(missing_ok=True)  # of an earlier report
            continue
        figure.savefig(image := io.BytesIO(), dpi=100)
        write_atomically(directory / name, image.getvalue())
        names.append(name)
    return names


def new_figure(num_panels: int) -> tuple[Any, Sequence[Any]]:
    """Return a figure and its axes, side by side."""
    from matplotlib.figure import Figure  # not pyplot, which keeps every figure and looks for a display

    figure = Figure(figsize=(4.5 * num_panels, 4), layout="constrained")
    return figure, figure.subplots(1, num_panels, squeeze=False)[0]


def _metric_by_key(report: Summary) -> Any:
    rows = [row for row in report.rows if report.metric in row.means]
    if not rows or not report.keys or report.metric is None:
        return None
    figure, panels = new_figure(len(report.keys))
    for key, panel in zip(report.keys, panels, strict=True):
        by_value: dict[Any, list[Mean]] = {}
        is_numeric = all(as_number(row.values[key]) is not None for row in rows)
        for row in rows:
            value = as_number(row.values[key]) if is_numeric else row.values[key]
            by_value.setdefault(value, []).append(row.means[report.metric])
        by_value = dict(sorted(by_value.items()))
        points = [(value, mean.value, mean.deviation or 0.0) for value, means in by_value.items() for mean in means]
        panel.errorbar(*zip(*points, strict=True), fmt="oC0", alpha=0.5, capsize=3)
        averages = [statistics.fmean(mean.value for mean in means) for means in by_value.values()]
        panel.plot([*by_value], averages, "-k", linewidth=1, label="mean")
        panel.set(xlabel=key, ylabel=report.metric)
        if not is_numeric:
            panel.tick_params("x", labelrotation=30)
        elif min(by_value) > 0 and max(by_value) >= 30 * min(by_value):
            panel.set_xscale("log")
    panels[0].legend()
    return figure


def _learning_curves(report: Summary) -> Any:
    rows = [row for row in report.rows if row.finished][:MAX_CURVES]
    monitors = [monitor.name for monitor in report.monitors]
    wanted = dict.fromkeys(name for name in ("train/loss", report.metric, *monitors, LOSS) if name)
    curves = [[job.curves(*wanted) for job in row.finished] for row in rows]
    shown = [name for name in wanted if any(job[name] for row in curves for job in row)][:2]
    if not shown:
        return None
    figure, panels = new_figure(len(shown))
    for name, panel in zip(shown, panels, strict=True):
        for row, jobs in zip(rows, curves, strict=True):
            _draw_band(panel, row, [job[name] for job in jobs if job[name]])
        panel.set(xlabel="step", ylabel=name)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    return figure


def _draw_band(panel: Any, row: ReportRow, curves: list[dict[int, float]]) -> None:
    """Draw the mean over the jobs of a row, and a band of one standard deviation."""
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    if not steps:
        return
    columns = [[curve[step] for curve in curves] for step in steps]
    means = [statistics.fmean(column) for column in columns]
    (line,) = panel.plot(steps, means, "-" if len(steps) > 1 else "o", linewidth=1.2, label=row.name)
    if len(curves) > 1:
        off = [statistics.stdev(column) for column in columns]
        low, high = ([m + sign * o for m, o in zip(means, off, strict=True)] for sign in (-1, 1))
        panel.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
