"""TensorBoard in a real browser on a real sweep: the pages show what the runs have recorded.

DASHBOARD_SCREENSHOTS=1 saves the pages to docs/images, for README and docs.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser import expect, keep, needs_browser, page_of
from commands import Commands
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = [pytest.mark.thorough, needs_browser]


@dataclass
class Dashboard:
    """TensorBoard's page for one sweep."""

    page: Any
    sweep: Path

    @property
    def jobs(self) -> list[Path]:
        return sorted(path for path in self.sweep.iterdir() if path.is_dir())

    def open(self, tab: str) -> Any:
        self.page.goto("about:blank")  # a new fragment would not reload the page
        self.page.goto(f"/{tab}")
        return self.page


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run four jobs."""
    commands = Commands(tmp_path_factory.mktemp("dashboard"))
    args = ("model=mlp", "data.sample_shape=[1,8,8]", "epochs=3")
    done = commands.forked("-m", *args, "optimizer.lr=0.1,0.01", "seed=0,1")
    assert done.returncode == 0, done.stderr
    (path,) = (commands.folder / "outputs" / "run").iterdir()
    return path


@pytest.fixture(scope="module")
def dashboard(sweep: Path) -> Iterator[Dashboard]:
    args = ("-m", "tensorboard.main", "--logdir", str(sweep))
    with page_of(Commands(sweep.parent), *args, width=1200) as page:
        page.route("**/data/environment*", hide_folder)
        yield Dashboard(page, sweep)


def hide_folder(route: Any) -> None:
    """Hide the path of the directory that TensorBoard reads, for the screenshots."""
    answer = route.fetch()
    route.fulfill(response=answer, json=answer.json() | {"data_location": ""})


def result(job: Path) -> dict[str, Any]:
    return json.loads((job / "result.json").read_text())


def test_losses_of_training_and_validation_share_a_chart(dashboard: Dashboard) -> None:
    page = dashboard.open("#custom_scalars")
    expect(page.get_by_text("train against val")).to_be_visible()
    expect(page.get_by_text("Matches (8)")).to_be_visible()  # two losses of four runs
    charts = page.locator("tf-custom-scalar-multi-line-chart-card")
    expect(charts.first.locator(".plot.line-plot").first).to_be_attached()
    keep(dashboard.page, "custom_scalars")


def test_predictions_are_shown_as_they_were_logged(dashboard: Dashboard) -> None:
    page = dashboard.open("#images")
    loaders = page.locator("tf-image-loader")
    expect(loaders).to_have_count(8)  # a confusion matrix and samples of four runs
    expect(page.locator("tf-image-loader img")).to_have_count(8)
    shown = set()
    for loader in loaders.all():
        name, tag = (loader.locator(f".heading-label.{part}").inner_text() for part in ("run", "name"))
        expect(loader.locator(".heading-label", has_text="step")).to_have_text(re.compile(r"\s*step\s*69\s*"))
        source = loader.locator("img").get_attribute("src")
        pixels = loader.locator("img").evaluate("image => image.decode().then(() => image.naturalWidth)")
        content = page.request.get(f"/{source}").body()
        events = EventAccumulator(str(dashboard.sweep / name), size_guidance={"images": 0})
        events.Reload()
        assert content == events.Images(tag)[-1].encoded_image_string and pixels > 100
        shown.add((name, tag))
    assert shown == {(job.name, tag) for job in dashboard.jobs for tag in ("val/confusion", "val/predictions")}
    keep(dashboard.page, "predictions")


def test_hparams_has_a_row_per_job_with_its_values(dashboard: Dashboard) -> None:
    page = dashboard.open("#hparams")
    grid = page.locator("tf-hparams-table-view vaadin-grid")
    expect(grid.get_by_text("0-lr-0.1_seed-0 in")).to_be_visible()
    read = """grid => [...grid.shadowRoot.querySelectorAll('thead tr, tbody#items tr')].map(
        row => [...row.querySelectorAll('slot')].map(
            slot => slot.assignedNodes().map(node => node.textContent.trim()).join('')))"""
    lines = [line for line in grid.evaluate(read) if any(line)]
    header, rows = lines[0], lines[1:]
    assert header[0] == "Trial ID" and {"optimizer.lr", "seed"} <= set(header)
    assert not {"epochs", "model", "checkpoint.keep"} & set(header)  # they do not vary
    found = {line[0].split(" in ")[0]: dict(zip(header, line, strict=False)) for line in rows}
    assert set(found) == {job.name for job in dashboard.jobs}
    for job in dashboard.jobs:
        row, metrics = found[job.name], result(job)["metrics"]
        assert f"lr-{float(row['optimizer.lr']):g}_seed-{float(row['seed']):g}" in job.name
        for metric in ("val/accuracy", "val/loss", "train/loss"):
            assert float(row[metric]) == pytest.approx(metrics[metric], rel=1e-4), (job.name, metric)
    page.get_by_text("Parallel Coordinates View").click()
    lines_drawn = page.locator("tf-hparams-parallel-coords-plot svg path[d]")
    expect(lines_drawn.first).to_be_attached()
    assert sum("L" in (path.get_attribute("d") or "") for path in lines_drawn.all()) >= 4
    keep(dashboard.page, "hparams")
