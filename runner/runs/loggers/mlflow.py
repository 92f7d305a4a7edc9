"""MLflow: a run in an experiment, in a SQLite file beside all runs or on a server."""

import fcntl
import functools
import logging
import re
import ssl
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from runner.runs.loggers.background import Background
from runner.runs.loggers.dashboard import RunFacts, keep_id, read_facts, read_ids, require
from runner.runs.loggers.history import History
from runner.runs.loggers.pictures import draw_confusion
from runner.runs.loggers.protocol import Ending, Predictions
from runner.runs.records import Trial, dotted

STORE, ARTIFACTS, LOCK = "mlflow.db", "mlflow-artifacts", ".mlflow.lock"  # in the folder of all runs
STATUS = {"finished": "FINISHED", "pruned": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}
EVERY_S = 2.0  # between two batches of numbers
MAX_NUMBERS, MAX_PARAMS, MAX_PARAM_LENGTH = 1000, 100, 6000  # of a batch, and of a value: MLflow's own limits
ANSWER_S, FLUSH_S, CLOSE_S = 10, 10, 60
LOCK_S = 60  # for other runs of the folder, to open the SQLite file

log = logging.getLogger(__name__)


class MLflow:
    """logger=mlflow: rank 0 alone talks to it, on a thread, so that no step waits.

    uri: where runs are kept, sqlite:///FILE or http://HOST:PORT; None: MLFLOW_TRACKING_URI, or else mlflow.db in the
    folder of all runs. experiment: None: the name of the configuration. images: a confusion matrix after evaluations.
    """

    def __init__(self, uri: str | None = None, experiment: str | None = None, images: bool = True) -> None:
        if uri is not None and not urlsplit(uri).scheme:
            raise ValueError(f"uri={uri} must be a URI; try uri=sqlite:///{uri}")
        require("mlflow", "mlflow")
        self.wants_predictions = images
        self._uri, self._experiment = uri, experiment
        self._waiting: list[Any] = []  # numbers that are not on their way yet
        self._sent = time.monotonic()

    def open(self, directory: str, first_step: int, trial: Trial) -> None:
        """Raises ConnectionError where nothing answers, or what answers does not take a run."""
        path, facts = Path(directory), read_facts(Path(directory))
        with _quiet():
            from mlflow import MlflowClient  # it takes seconds, so that only what is chosen is imported
            from mlflow.environment_variables import MLFLOW_TRACKING_URI
            from mlflow.exceptions import MlflowException

            uri = self._uri or MLFLOW_TRACKING_URI.get() or f"sqlite:///{facts.outputs / STORE}"
            _check_answers(uri)
            try:
                with _alone(uri, facts.outputs):  # of two jobs that begin together one makes the tables
                    self._client = MlflowClient(tracking_uri=uri)
                    experiment = self._find_experiment(self._experiment or facts.experiment, uri, facts.outputs)
                self._run_id, last = self._find_run(read_ids(path, "mlflow").get(uri), experiment, facts)
            except MlflowException as error:
                raise ConnectionError(f"{uri}: {str(error).splitlines()[0]}") from None
        keep_id(path, "mlflow", uri, self._run_id)
        parts = urlsplit(uri)
        shown = uri.replace(f"{parts.username}:{parts.password}@", "") if parts.password else uri
        log.info("mlflow   run %s, shown by %s", self._run_id, _viewer(shown))
        self._history = History(last, valid_name)
        self._background = Background("mlflow")
        self._background.submit(lambda: self._describe(path, facts, trial))
        for step, metrics in self._history.missing(directory):
            self._add(step, metrics)

    def scalars(self, step: int, metrics: dict[str, float]) -> None:
        self._add(step, self._history.new(step, metrics))
        if len(self._waiting) >= MAX_NUMBERS or time.monotonic() - self._sent >= EVERY_S:
            self._send()

    def predictions(self, step: int, seen: Predictions) -> None:
        picture = draw_confusion(seen.confusion)
        file = f"confusion/step_{step}.png"
        self._background.submit(lambda: self._client.log_image(self._run_id, picture, file))

    def text(self, tag: str, text: str) -> None:
        self._background.submit(lambda: self._client.log_text(self._run_id, text, f"{tag}.txt"))

    def flush(self) -> None:
        """What does not arrive in time is made up when the run is resumed."""
        self._send()
        self._background.wait(FLUSH_S)

    def close(self, finished: Ending) -> None:
        self._send()
        self._background.submit(lambda: self._end(finished.state))
        if not self._background.wait(CLOSE_S):
            raise TimeoutError(f"not all was taken within {CLOSE_S} s")

    def _find_experiment(self, name: str, uri: str, outputs: Path) -> str:
        from mlflow.exceptions import MlflowException

        # A server keeps artifacts where it likes; by itself the client would put them into the working directory.
        place = (outputs / ARTIFACTS / name).as_uri() if uri.startswith("sqlite:") else None
        if (found := self._client.get_experiment_by_name(name)) is None:
            try:
                return self._client.create_experiment(name, artifact_location=place)
            except MlflowException:  # another run has just made it
                if (found := self._client.get_experiment_by_name(name)) is None:
                    raise
        return found.experiment_id

    def _find_run(self, run_id: str | None, experiment: str, facts: RunFacts) -> tuple[str, dict[str, int]]:
        """Its id, and the last step of each metric that it has."""
        from mlflow.exceptions import MlflowException

        if run_id is not None:
            try:
                read = self._client.get_run(run_id)
                self._client.update_run(run_id, status="RUNNING")
                return run_id, {metric.key: metric.step for metric in read.to_proto().data.metrics}
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        return self._client.create_run(experiment, run_name=facts.name).info.run_id, {}

    def _describe(self, directory: Path, facts: RunFacts, trial: Trial) -> None:
        """Parameters and tags. MLflow changes no parameter: one that a resumed run has otherwise becomes a tag."""
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
        own = {key: value for key, value in facts.config.items() if key not in ("resume", "run")}
        values = dotted(own) | facts.choices | trial.words
        params = {valid_name(key): _show(value) for key, value in values.items()}
        has = self._client.get_run(self._run_id).data.params
        tags |= {f"resumed/{key}": value for key, value in params.items() if key in has and has[key] != value}
        new = [Param(key, value) for key, value in params.items() if key not in has]
        for batch in _batches(new, MAX_PARAMS):
            self._client.log_batch(self._run_id, params=batch)
        kept = [RunTag(key, str(value)) for key, value in tags.items() if value not in (None, "")]
        for batch in _batches(kept, MAX_PARAMS):
            self._client.log_batch(self._run_id, tags=batch)

    def _add(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(datetime.now().timestamp() * 1000)
        self._waiting += [Metric(name, value, now_ms, step) for name, value in metrics.items()]

    def _send(self) -> None:
        numbers, self._waiting, self._sent = self._waiting, [], time.monotonic()
        for batch in _batches(numbers, MAX_NUMBERS):
            self._background.submit(functools.partial(self._client.log_batch, self._run_id, metrics=batch))

    def _end(self, state: str) -> None:
        self._client.set_tag(self._run_id, "state", state)
        self._client.set_terminated(self._run_id, STATUS[state])


def valid_name(name: str) -> str:
    """The name as MLflow takes it: of letters, digits and _ - . : / and spaces, and a path without . and .. in it."""
    parts = [re.sub(r"[^\w\-. :]", "_", part) for part in name.split("/")]
    return "/".join(part if part.strip(".") else "_" * max(len(part), 1) for part in parts)[:250]


def _viewer(uri: str) -> str:
    return uri if uri.startswith("http") else f"mlflow ui --backend-store-uri {uri}"


def _show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)[:MAX_PARAM_LENGTH]


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _check_answers(uri: str) -> None:
    """Raises ConnectionError where no server does: the client itself would ask for minutes."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return
    host = parts.hostname or ""
    if parts.scheme == "https":  # whom to trust is the client's to say
        context = ssl._create_unverified_context()
        server: HTTPConnection = HTTPSConnection(host, parts.port, timeout=ANSWER_S, context=context)
    else:
        server = HTTPConnection(host, parts.port, timeout=ANSWER_S)
    try:
        server.request("HEAD", parts.path or "/")
        server.getresponse()  # whatever it says: one that hangs takes connections too
    except (OSError, HTTPException) as error:
        raise ConnectionError(f"{parts.scheme}://{host}:{server.port} does not answer ({error})") from None
    finally:
        server.close()


@contextmanager
def _alone(uri: str, folder: Path) -> Iterator[None]:
    """No other run of the folder opens a SQLite file meanwhile; a server looks after itself."""
    if not uri.startswith("sqlite:"):
        yield
        return
    with (folder / LOCK).open("w") as file:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConnectionError(
                        f"{folder / LOCK} has been held by another run for {LOCK_S} s; does that one hang?"
                    ) from None
                time.sleep(0.05)
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """MLflow tells of its tables, and SQLAlchemy of how MLflow calls it: nothing for whoever trains a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import mlflow  # noqa: F401  # which sets levels itself

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        yield
