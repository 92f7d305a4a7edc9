"""trackio: a run in a project of its local SQLite file, or of the server or Space that its own variables name."""

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner.runs.loggers.dashboard import RunFacts, keep_id, read_facts, read_ids, require
from runner.runs.loggers.history import Feed, History
from runner.runs.loggers.pictures import draw_confusion
from runner.runs.loggers.protocol import Ending, Predictions
from runner.runs.records import Trial, dotted

CONFUSION = "val/confusion"

log = logging.getLogger(__name__)


class Trackio:
    """logger=trackio: rank 0 alone talks to it, and it writes on a thread, so that no step waits.

    project: None: the name of the configuration. images: a confusion matrix after evaluations. Where it keeps runs is
    said by its own environment variables (TRACKIO_DIR, TRACKIO_SERVER_URL, TRACKIO_SPACE_ID).
    """

    def __init__(self, project: str | None = None, images: bool = True) -> None:
        require("trackio", "trackio")
        self.wants_predictions = images
        self._project = project
        self._run: Any = None

    def open(self, directory: str, first_step: int, trial: Trial) -> None:
        import trackio  # it takes seconds, so that only what is chosen is imported
        from trackio.sqlite_storage import SQLiteStorage

        path, facts = Path(directory), read_facts(Path(directory))
        project = self._project or facts.experiment
        known = read_ids(path, "trackio").get(project)
        name = known or _free_name(trackio, project, facts)
        with _silently():
            self._run = trackio.init(
                project=project,
                name=name,
                group=facts.sweep,
                config=dotted(facts.config) | facts.choices | trial.words,
                resume="allow" if known else "never",
                embed=False,
                auto_log_cpu=False,
            )
        keep_id(path, "trackio", project, name)
        log.info("trackio  run %s, shown by trackio show --project %s", name, project)
        last: dict[str, int] = {}
        for line in SQLiteStorage.get_logs(project, name, run_id=self._run.id) if known else ():
            last |= {key: max(int(line["step"]), last.get(key, 0)) for key in line}
        self._feed = Feed(self._run, History(last))
        self._feed.catch_up(directory)

    def scalars(self, step: int, metrics: dict[str, float]) -> None:
        self._feed.scalars(step, metrics)

    def predictions(self, step: int, seen: Predictions) -> None:
        import trackio

        self._feed.picture(step, CONFUSION, lambda: trackio.Image(draw_confusion(seen.confusion)), known_as=CONFUSION)

    def text(self, tag: str, text: str) -> None:
        """The configuration is the run's config."""

    def flush(self) -> None:
        """It writes within a second; what a kill left unwritten is made up when the run is resumed."""

    def close(self, finished: Ending) -> None:
        import trackio

        with _silently():
            trackio.finish()


def _free_name(trackio: Any, project: str, facts: RunFacts) -> str:
    """A name that no run of the project has: by its name trackio finds a run again."""
    wanted = f"{facts.sweep}/{facts.name}" if facts.sweep else facts.name
    taken = set()
    with contextlib.suppress(ValueError):  # there is no such project yet
        taken = {run.name for run in trackio.Api().runs(project)}
    return next(name for n in range(len(taken) + 1) if (name := f"{wanted}-{n}" if n else wanted) not in taken)


@contextlib.contextmanager
def _silently() -> Iterator[None]:
    """It prints how to be shown, and the runner says so by itself."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
