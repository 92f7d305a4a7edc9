"""MLflow: a run in an experiment, in a SQLite file in the directory of all runs or on a server."""

import fcntl
import functools
import logging
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from runner.errors import require_packages
from runner.records.background import BackgroundThread
from runner.records.compared_runs import Trial
from runner.records.loggers.contract import Logger, Predictions, RunOutcome
from runner.records.loggers.dashboard import History, RunFacts, read_ids, save_id
from runner.records.loggers.images import draw_confusion
from runner.records.run_files import without_links
from runner.records.run_record import DONE
from runner.records.settings import dotted, to_text

STORE, ARTIFACTS, LOCK = "mlflow.db", "mlflow-artifacts", ".mlflow.lock"  # in the directory of all runs
STATUS = {**dict.fromkeys(DONE, "FINISHED"), "preempted": "KILLED", "failed": "FAILED"}
INTERVAL_S = 2.0  # between two batches of metrics
MAX_METRICS, MAX_PARAMS, MAX_PARAM_LENGTH = 1000, 100, 6000  # of a batch, and of a value: MLflow's limits
RESPONSE_S, MAX_RETRIES, FLUSH_S, CLOSE_S = 10, 2, 10, 60

log = logging.getLogger(__name__)


class MLflow(Logger):
    """logger=mlflow; conf/logger/mlflow.yaml documents the options.

    A thread sends the metrics, so that no step waits for the server.
    """

    def __init__(self, uri: str | None = None, experiment: str | None = None, images: bool = True) -> None:
        if uri is not None and not urlsplit(uri).scheme:
            raise ValueError(f"uri={uri} must be a URI; try uri=sqlite:///{uri}")
        require_packages("logger=mlflow", "mlflow", "mlflow")
        self.wants_predictions = images
        self._uri, self._experiment = uri, experiment
        self._unsent: list[Any] = []
        self._last_sent = time.monotonic()

    def open(self, directory: str, first_step: int, trial: Trial) -> None:
        """Start the run, or continue it. Raises ConnectionError if the server does not respond or rejects the run."""
        path, facts = Path(directory), RunFacts(Path(directory))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of SQLAlchemy, about MLflow
            import mlflow.environment_variables as variables  # takes seconds, so it is imported only if it was chosen
            from mlflow.exceptions import MlflowException

            uri = self._uri or variables.MLFLOW_TRACKING_URI.get() or f"sqlite:///{facts.outputs / STORE}"
            parts = urlsplit(uri)
            credentials = f"{parts.username}:{parts.password}@" if parts.password else ""
            if not variables.MLFLOW_HTTP_REQUEST_TIMEOUT.is_set():  # the default is two minutes
                variables.MLFLOW_HTTP_REQUEST_TIMEOUT.set(RESPONSE_S)
            if not variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES.is_set():  # the default is seven
                variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES.set(MAX_RETRIES)
            for name in ("mlflow", "alembic"):  # messages about MLflow's tables
                logging.getLogger(name).setLevel(logging.WARNING)
            try:
                last = self._connect(uri, read_ids(path).get("mlflow", {}).get(uri), facts)
            except MlflowException as error:
                raise ConnectionError(str(error).splitlines()[0].replace(credentials, "")) from None
        save_id(path, "mlflow", uri, self._run_id)
        shown = uri.replace(credentials, "")
        viewer = shown if shown.startswith("http") else f"mlflow ui --backend-store-uri {shown}"
        log.info("mlflow   run %s, shown by %s", self._run_id, viewer)
        self._history = History(last, valid_name)
        self._thread = BackgroundThread("mlflow")
        self._thread.submit(lambda: self._describe(path, facts, trial))
        for step, metrics in self._history.missing(directory):
            self._add(step, metrics)

    def scalars(self, step: int, metrics: dict[str, float]) -> None:
        self._add(step, self._history.new(step, metrics))
        if len(self._unsent) >= MAX_METRICS or time.monotonic() - self._last_sent >= INTERVAL_S:
            self._send()

    def predictions(self, step: int, predictions: Predictions) -> None:
        image = draw_confusion(predictions.confusion)
        file = f"confusion/step_{step}.png"
        self._thread.submit(lambda: self._client.log_image(self._run_id, image, file))

    def text(self, tag: str, text: str) -> None:
        self._thread.submit(lambda: self._client.log_text(self._run_id, text, f"{tag}.txt"))

    def flush(self) -> None:
        """Send the metrics and wait for at most FLUSH_S seconds. A resumed run sends metrics that did not arrive."""
        self._send()
        self._thread.wait(FLUSH_S)

    def close(self, outcome: RunOutcome) -> None:
        self._send()
        self._thread.submit(lambda: self._client.set_tag(self._run_id, "state", outcome.state))
        self._thread.submit(lambda: self._client.set_terminated(self._run_id, STATUS[outcome.state]))
        if not self._thread.wait(CLOSE_S):
            raise TimeoutError(f"not everything was sent within {CLOSE_S} s")

    def _connect(self, uri: str, run_id: str | None, facts: RunFacts) -> dict[str, int]:
        """Create the run, or continue the one with this id. Return the last step of each of its metrics."""
        from mlflow import MlflowClient

        with ExitStack() as stack:
            if uri.startswith("sqlite:"):  # otherwise several processes could create its tables at the same time
                file = stack.enter_context(open(facts.outputs / LOCK, "w", opener=without_links))
                fcntl.flock(file, fcntl.LOCK_EX)
            self._client = MlflowClient(tracking_uri=uri)
            if run_id is None:
                experiment = self._find_experiment(self._experiment or facts.config["name"], uri, facts.outputs)
                run_id = self._client.create_run(experiment, run_name=facts.name).info.run_id
            self._run_id = run_id
            self._client.update_run(run_id, status="RUNNING")
            return {metric.key: metric.step for metric in self._client.get_run(run_id).to_proto().data.metrics}

    def _find_experiment(self, name: str, uri: str, outputs: Path) -> str:
        from mlflow.exceptions import MlflowException

        # A server chooses where artifacts are stored; the client's default is the working directory.
        location = (outputs / ARTIFACTS / name).as_uri() if uri.startswith("sqlite:") else None
        if (found := self._client.get_experiment_by_name(name)) is None:
            try:
                return self._client.create_experiment(name, artifact_location=location)
            except MlflowException:  # another run has just created it
                if (found := self._client.get_experiment_by_name(name)) is None:
                    raise
        return found.experiment_id

    def _describe(self, directory: Path, facts: RunFacts, trial: Trial) -> None:
        """Log parameters and tags. MLflow's parameters are immutable, so values changed by a resume become tags."""
        from mlflow.entities import Param, RunTag

        git = facts.result.get("git", {})
        tags = {
            "mlflow.source.name": " ".join(facts.result.get("command", [])),
            "mlflow.source.type": "LOCAL",
            "mlflow.source.git.commit": git.get("commit"),
            "uncommitted_changes": git.get("dirty"),
            "state": "running",
            "directory": directory,
            "sweep": facts.sweep,
        }
        config = {key: value for key, value in facts.config.items() if key not in ("resume", "run")}
        values = dotted(config) | facts.choices | trial.overrides
        params = {valid_name(key): to_text(value)[:MAX_PARAM_LENGTH] for key, value in values.items()}
        logged = self._client.get_run(self._run_id).data.params
        tags |= {f"resumed/{key}": value for key, value in params.items() if logged.get(key, value) != value}
        new = [Param(key, value) for key, value in params.items() if key not in logged]
        for batch in _batches(new, MAX_PARAMS):
            self._client.log_batch(self._run_id, params=batch)
        known = [RunTag(key, str(value)) for key, value in tags.items() if value not in (None, "")]
        self._client.log_batch(self._run_id, tags=known)

    def _add(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(datetime.now().timestamp() * 1000)
        self._unsent += [Metric(name, value, now_ms, step) for name, value in metrics.items()]

    def _send(self) -> None:
        metrics, self._unsent, self._last_sent = self._unsent, [], time.monotonic()
        for batch in _batches(metrics, MAX_METRICS):
            self._thread.submit(functools.partial(self._client.log_batch, self._run_id, metrics=batch))


def valid_name(name: str) -> str:
    """Return a name that MLflow accepts: letters, digits, `_-.:/` and spaces. No path component is `.` or `..`."""
    parts = [re.sub(r"[^\w\-. :]", "_", part) for part in name.split("/")]
    return "/".join(part if part.strip(".") else "_" * max(len(part), 1) for part in parts)[:250]


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
