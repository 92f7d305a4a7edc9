"""MLflow's page in a real browser on the store of real sweeps: runs, their states, metrics and images.

DASHBOARD_SCREENSHOTS=1 saves the page to docs/images, for docs/dashboards.md.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import expect, keep, needs_browser, page_of
from commands import Commands
from dashboards import StoredRun, read_mlflow

SMALL = ("logger=[tensorboard,mlflow]", "model=mlp", "data.sample_shape=[1,8,8]", "epochs=3")
ENDS = """
import os, signal
from runner import Callback

class Ends(Callback):
    def __init__(self, how: str):
        self.how = how

    def after_step(self, now):
        if now.step == 5 and self.how == "raise":
            raise RuntimeError("no more")
        if now.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
"""

pytestmark = [pytest.mark.thorough, needs_browser]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a sweep of two jobs, and a sweep of a job that fails and one that is stopped."""
    commands = Commands(tmp_path_factory.mktemp("mlflow"))
    (commands.folder / "mine" / "callbacks").mkdir(parents=True)
    (commands.folder / "mine" / "ends.py").write_text(ENDS)
    (commands.folder / "mine" / "callbacks" / "ends.yaml").write_text("ends: {_target_: ends.Ends, how: raise}\n")
    done = commands.forked("-m", *SMALL, "name=digits", "optimizer.lr=0.1,0.01")
    assert done.returncode == 0, done.stderr
    args = ("--config-dir", "mine", "callbacks=ends", "callbacks.ends.how=raise,term")
    ended = commands.forked("-m", *SMALL, "name=ends", *args)
    assert ended.returncode in (1, 143), ended.stderr
    return commands.folder / "outputs"


@pytest.fixture(scope="module")
def stored(outputs: Path) -> dict[str, StoredRun]:
    """Return the runs in the store, by name."""
    return {run.name: run for run in read_mlflow(f"sqlite:///{outputs / 'mlflow.db'}")}


@pytest.fixture(scope="module")
def page(outputs: Path) -> Iterator[Any]:
    store = f"sqlite:///{outputs / 'mlflow.db'}"
    args = ("-m", "mlflow", "ui", "--backend-store-uri", store, "--workers", "1")
    with page_of(Commands(outputs.parent), *args) as page:
        yield page


def result(job: Path) -> dict[str, Any]:
    return json.loads((job / "result.json").read_text())


def jobs(outputs: Path, name: str) -> list[Path]:
    (sweep,) = (outputs / name).iterdir()
    return sorted(path for path in sweep.iterdir() if path.is_dir() and (path / "result.json").exists())


def test_the_page_shows_the_runs_with_their_states_and_charts(
    page: Any, outputs: Path, stored: dict[str, StoredRun]
) -> None:
    failed, stopped = jobs(outputs, "ends")
    assert (result(failed)["state"], stored[failed.name].status) == ("failed", "FAILED")
    assert (result(stopped)["state"], stored[stopped.name].status) == ("preempted", "KILLED")
    assert stored[stopped.name].tags["state"] == "preempted"

    page.goto("/#/experiments/1/runs")
    page.get_by_text("Model training", exact=True).click()  # the page starts with another kind of project
    names = page.locator("a[href*='/runs/']")
    expect(names).to_have_count(2)
    shown = {link.inner_text(): link.get_attribute("href") for link in names.all()}
    assert shown == {job.name: f"#/experiments/1/runs/{stored[job.name].id}" for job in jobs(outputs, "digits")}
    assert {(stored[name].tags["sweep"], stored[name].status) for name in shown} == {
        (jobs(outputs, "digits")[0].parent.name, "FINISHED")
    }
    page.goto("about:blank")
    page.goto("/#/experiments/1/runs?compareRunsMode=CHART")
    search = page.get_by_placeholder("Search metric charts")
    expect(search).to_be_visible()
    if (assistant := page.get_by_role("button", name="Close")).count():  # a panel that is unrelated to runs
        assistant.first.click()
    search.fill("val/")
    charts = page.locator(".js-plotly-plot")
    expect(charts).to_have_count(2)  # val/accuracy and val/loss
    # A line and a band of each run in each chart.
    expect(page.locator(".js-plotly-plot .scatterlayer .trace")).to_have_count(8)
    keep(page, "mlflow")
