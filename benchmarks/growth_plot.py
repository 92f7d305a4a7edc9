"""The measurements of growth.py as a plot: seconds against size, one panel per axis."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from growth_table import AXES, FIGURES, SHARED, Cell, figures_of, fitted
from matplotlib.figure import Figure  # not pyplot, which keeps every figure and looks for a display

NAMES = {figure: name.rpartition(",")[0] for figure, (name, _) in FIGURES.items()} | {SHARED: "step x cores / ranks"}


def draw(cells: Sequence[Cell], cores: int, path: Path) -> None:
    """Draw the best round of each cell with a bar to the median, and the formula, dotted where it is extrapolated."""
    axes = [axis for axis in AXES.values() if any(cell.axis == axis.name for cell in cells)]
    figure = Figure(figsize=(4.4 * len(axes), 4.4), layout="constrained")
    panels = figure.subplots(1, len(axes), squeeze=False)[0]
    colors = {name: f"C{number}" for number, name in enumerate(NAMES)}
    for axis, panel in zip(axes, panels, strict=True):
        rows = [cell for cell in cells if cell.axis == axis.name and cell.logged + cell.silent]
        for name in figures_of(axis):
            known = [(cell.size, values) for cell in rows if (values := cell.values(name, cores))]
            sizes, bests = [size for size, _ in known], [min(values) for _, values in known]
            bars = [[0.0] * len(known), [statistics.median(values) - min(values) for _, values in known]]
            panel.errorbar(sizes, bests, bars, fmt="o", color=colors[name], markersize=4, capsize=2, label=NAMES[name])
            if (line := fitted(rows, axis, name, cores)) is not None:
                first, last = min(size for size in sizes if size >= axis.fitted_from), max(sizes)
                for start, end, style in ((first, last, "-"), (last, axis.beyond, ":")):
                    between = [start * (end / start) ** (part / 50) for part in range(51)]
                    height = [line.at(axis.term(size)) for size in between]
                    panel.plot(between, height, style, color=colors[name], linewidth=1)
        panel.set(title=f"against {axis.name}", xlabel=axis.name, xscale="log", yscale="log")
    panels[0].set_ylabel("seconds")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
