"""MLflow's page in a real browser on the store of real sweeps: runs, their ends, numbers and pictures.

DASHBOARD_SCREENSHOTS=1 keeps the page in docs/images, where docs/dashboards.md has it from.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import keep, needs_browser, page_of
from commands import Commands
from dashboards import Held, read_mlflow

SMALL = ("logger=[tensorboard,mlflow]", "model=mlp", "data.sample_shape=[1,8,8]", "epochs=3")
ENDS = """
import os, signal
from runner.training.callback import Callback

class Ends(Callback):
    def __init__(self, how: str):
        self.how = how

    def after_step(self, now):
        if now.step == 5 and self.how == "raise":
            raise RuntimeError("no more")
        if now.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
"""

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the extra dev has it)")
pytestmark = [pytest.mark.thorough, needs_browser]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of four jobs, and one of a job that fails and one that is stopped."""
    commands = Commands(tmp_path_factory.mktemp("mlflow"))
    (commands.folder / "mine" / "callbacks").mkdir(parents=True)
    (commands.folder / "mine" / "ends.py").write_text(ENDS)
    (commands.folder / "mine" / "callbacks" / "ends.yaml").write_text("ends: {_target_: ends.Ends, how: raise}\n")
    done = commands.runner("-m", *SMALL, "name=digits", "optimizer.lr=0.1,0.01", "seed=0,1")
    assert done.returncode == 0, done.stderr
    words = ("--config-dir", "mine", "callbacks=ends", "callbacks.ends.how=raise,term")
    ended = commands.runner("-m", *SMALL, "name=ends", *words)
    assert ended.returncode in (1, 143), ended.stderr
    return commands.folder / "outputs"


@pytest.fixture(scope="module")
def held(outputs: Path) -> dict[str, Held]:
    """What the store holds, by the name of the run."""
    return {run.name: run for run in read_mlflow(f"sqlite:///{outputs / 'mlflow.db'}")}


@pytest.fixture(scope="module")
def page(outputs: Path) -> Iterator[Any]:
    store = f"sqlite:///{outputs / 'mlflow.db'}"
    words = ("-m", "mlflow", "ui", "--backend-store-uri", store, "--workers", "1")
    with page_of(Commands(outputs.parent), *words) as page:
        yield page


def result(job: Path) -> dict[str, Any]:
    return json.loads((job / "result.json").read_text())


def jobs(outputs: Path, name: str) -> list[Path]:
    (sweep,) = (outputs / name).iterdir()
    return sorted(path for path in sweep.iterdir() if path.is_dir() and (path / "result.json").exists())


def test_a_sweep_is_an_experiment_of_its_jobs(outputs: Path, held: dict[str, Held]) -> None:
    for job in jobs(outputs, "digits"):
        run = held[job.name]
        assert json.loads((job / "loggers.json").read_text())["mlflow"] == {
            f"sqlite:///{outputs / 'mlflow.db'}": run.id
        }
        assert (run.project, run.status, run.tags["sweep"]) == ("digits", "FINISHED", job.parent.name)
        assert f"lr-{run.params['optimizer.lr']}_seed-{run.params['seed']}" in job.name
        assert run.points["val/accuracy"][-1] == (69, result(job)["metrics"]["val/accuracy"])
        assert [step for step, _ in run.points["train/loss"]] == list(range(1, 70))


def test_a_run_that_failed_and_one_that_was_stopped_say_so(outputs: Path, held: dict[str, Held]) -> None:
    failed, stopped = jobs(outputs, "ends")
    assert (result(failed)["state"], held[failed.name].status) == ("failed", "FAILED")
    assert (result(stopped)["state"], held[stopped.name].status) == ("preempted", "KILLED")
    assert held[stopped.name].tags["state"] == "preempted"


def test_the_page_shows_the_runs_and_their_charts(page: Any, outputs: Path, held: dict[str, Held]) -> None:
    page.goto("/#/experiments/1/runs")
    page.get_by_text("Model training", exact=True).click()  # it begins with another kind of project
    names = page.locator("a[href*='/runs/']")
    playwright.expect(names).to_have_count(4)
    shown = {link.inner_text(): link.get_attribute("href") for link in names.all()}
    assert shown == {job.name: f"#/experiments/1/runs/{held[job.name].id}" for job in jobs(outputs, "digits")}
    page.goto("about:blank")
    page.goto("/#/experiments/1/runs?compareRunsMode=CHART")
    search = page.get_by_placeholder("Search metric charts")
    playwright.expect(search).to_be_visible()
    if (assistant := page.get_by_role("button", name="Close")).count():  # a panel that has nothing to do with runs
        assistant.first.click()
    search.fill("val/")
    charts = page.locator(".js-plotly-plot")
    playwright.expect(charts).to_have_count(2)  # val/accuracy and val/loss
    playwright.expect(page.locator(".js-plotly-plot .scatterlayer .trace")).to_have_count(
        16
    )  # a line and a band of each run
    keep(page, "mlflow")


def test_a_run_has_its_numbers_and_its_picture(page: Any, outputs: Path, held: dict[str, Held]) -> None:
    job = jobs(outputs, "digits")[0]
    run = held[job.name]
    page.goto("about:blank")
    page.goto(f"/#/experiments/1/runs/{run.id}")
    body = page.locator("body")
    playwright.expect(body).to_contain_text("val/accuracy")
    value = result(job)["metrics"]["val/accuracy"]
    playwright.expect(body).to_contain_text(re.compile(re.escape(f"{value:.4f}"[:-1])))
    picture = page.request.get(f"/get-artifact?path=confusion%2Fstep_69.png&run_uuid={run.id}").body()
    kept = outputs / "mlflow-artifacts" / "digits" / run.id / "artifacts" / "confusion" / "step_69.png"
    assert picture == kept.read_bytes() and picture.startswith(b"\x89PNG")
