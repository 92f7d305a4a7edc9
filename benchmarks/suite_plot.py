"""The suite's measurements as a plot: samples per second against ranks, one panel per workload."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure  # not pyplot, which keeps every figure and looks for a display
from suite_table import Cell


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Draw the median of each cell, with bars from its slowest to its fastest round."""
    works = list(dict.fromkeys(cell.work for cell in cells))
    peers = list(dict.fromkeys(cell.peer for cell in cells))
    figure = Figure(figsize=(3.6 * len(works), 4.2), layout="constrained")
    panels = figure.subplots(1, len(works), squeeze=False)[0]
    for work, panel in zip(works, panels, strict=True):
        ranks = sorted({cell.num_ranks for cell in cells if cell.work == work})
        for number, peer in enumerate(peers):
            rows = [cell for cell in cells if (cell.work, cell.peer) == (work, peer) and cell.rounds]
            rates = [cell.values("samples_per_second") for cell in rows]
            middles = [statistics.median(values) for values in rates]
            bars = [
                [middle - min(values) for middle, values in zip(middles, rates, strict=True)],
                [max(values) - middle for middle, values in zip(middles, rates, strict=True)],
            ]
            aside = 0.06 * (number - (len(peers) - 1) / 2)  # so that the bars do not overlap
            places = [ranks.index(cell.num_ranks) + aside for cell in rows]
            panel.errorbar(places, middles, bars, fmt="o-", color=f"C{number}", markersize=4, capsize=2, label=peer)
        panel.set(title=work, xlabel="ranks", xlim=(-0.5, len(ranks) - 0.5), ylim=(0, None))
        panel.set_xticks(range(len(ranks)), [str(number) for number in ranks])
    panels[0].set_ylabel("samples per second")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
