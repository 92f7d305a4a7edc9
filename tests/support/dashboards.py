"""What dashboards hold of runs, each read by its own means in a process of its own: importing them starts threads."""

import json
import os
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Points = dict[str, list[tuple[int, float]]]  # steps and values of each metric, in the order in which they are held

MLFLOW = """
import json, logging, sys, warnings
warnings.simplefilter("ignore")
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
found = []
for experiment in client.search_experiments():
    for run in client.search_runs([experiment.experiment_id]):
        points = {
            key: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, key)]
            for key in run.data.metrics
        }
        pictures = [file.path for file in client.list_artifacts(run.info.run_id, "confusion")]
        found.append([run.info.run_id, run.info.run_name, experiment.name, run.info.status, points,
                      run.data.params, run.data.tags, pictures])
print(json.dumps(found))
"""
WANDB = """
import json, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2
from runner.runs.loggers.wandb_file import _records, history
for path in sorted(Path(sys.argv[1]).glob("wandb/offline-run-*/run-*.wandb")):
    records = [wandb_internal_pb2.Record.FromString(data) for data in _records(path.read_bytes())]
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    ends = [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"]
    print(json.dumps([runs[0].run_id, runs[0].display_name, runs[0].project, ends, list(history(path)),
                      {update.key: json.loads(update.value_json) for update in runs[0].config.update}]))
"""


@dataclass
class Held:
    """A run as a dashboard holds it."""

    id: str
    name: str
    project: str
    status: str
    points: Points
    params: dict[str, Any]
    tags: dict[str, str]
    pictures: list[str]


def read_mlflow(uri: str) -> list[Held]:
    """All runs of a store, by MLflow's client."""
    (line,) = _said(MLFLOW, uri)
    held = [Held(*found) for found in json.loads(line)]
    for run in held:
        run.points = {name: [(step, value) for step, value in points] for name, points in run.points.items()}
    return held


def read_wandb(run: Path) -> Held:
    """A run's offline files, as they would be put together when they are synced."""
    files = [json.loads(line) for line in _said(WANDB, str(run))]
    assert len({(file[0], file[1], file[2]) for file in files}) == 1
    points: Points = {}
    pictures = []
    for file in files:
        for step, values in file[4]:
            for name, value in values.items():
                if name == "val/confusion/path":
                    pictures.append(value)
                elif not name.startswith("val/confusion/"):
                    points.setdefault(name, []).append((step, value))
    (code,) = files[-1][3]
    run_id, name, project = files[-1][:3]
    return Held(run_id, name, project, "FAILED" if code else "FINISHED", points, files[-1][5], {}, pictures)


def read_trackio(folder: Path, project: str) -> list[Held]:
    """All runs of a project, from trackio's SQLite file."""
    with sqlite3.connect(folder / f"{project}.db") as connection:
        rows = connection.execute("SELECT run_id, run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        configs = dict(connection.execute("SELECT run_id, config FROM configs").fetchall())
    connection.close()
    held: dict[str, Held] = {}
    for run_id, name, step, text in rows:
        run = held.setdefault(run_id, Held(run_id, name, project, "", {}, json.loads(configs[run_id]), {}, []))
        for key, value in json.loads(text).items():
            if isinstance(value, dict):
                run.pictures.append(value["file_path"])
            else:
                run.points.setdefault(key, []).append((step, value))
    return list(held.values())


def _said(script: str, *words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=300, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
