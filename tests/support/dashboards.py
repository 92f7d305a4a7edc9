"""The runs that dashboards have stored, each read by its own means."""

import json
import os
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Points = dict[str, list[tuple[int, float]]]  # steps and values of each metric, in the order in which they are stored

# Run in another process, because importing MLflow starts threads.
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
        images = [file.path for file in client.list_artifacts(run.info.run_id, "confusion")]
        found.append([run.info.run_id, run.info.run_name, experiment.name, run.info.status, points,
                      run.data.params, run.data.tags, images])
print(json.dumps(found))
"""


@dataclass
class StoredRun:
    """A run as a dashboard has stored it."""

    id: str
    name: str
    project: str
    status: str
    points: Points
    params: dict[str, Any]
    tags: dict[str, str]
    images: list[str]


def read_mlflow(uri: str) -> list[StoredRun]:
    """Return all runs of a store."""
    command = [sys.executable, "-c", MLFLOW, uri]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ})
    assert done.returncode == 0, done.stderr
    runs = [StoredRun(*found) for found in json.loads(done.stdout)]
    for run in runs:
        run.points = {name: [(step, value) for step, value in points] for name, points in run.points.items()}
    return runs


def read_trackio(directory: Path, project: str) -> list[StoredRun]:
    """Return all runs of a project, from trackio's SQLite file."""
    with sqlite3.connect(directory / f"{project}.db") as connection:
        rows = connection.execute("SELECT run_id, run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        configs = dict(connection.execute("SELECT run_id, config FROM configs").fetchall())
    connection.close()
    runs: dict[str, StoredRun] = {}
    for run_id, name, step, text in rows:
        run = runs.setdefault(run_id, StoredRun(run_id, name, project, "", {}, json.loads(configs[run_id]), {}, []))
        for key, value in json.loads(text).items():
            if isinstance(value, dict):
                run.images.append(value["file_path"])
            else:
                run.points.setdefault(key, []).append((step, value))
    return list(runs.values())
