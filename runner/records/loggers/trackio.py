"""trackio: a run in a project, in trackio's local SQLite file or on a server or Space."""

import contextlib
import io
import logging
from pathlib import Path

from runner.errors import require_packages
from runner.records.compared_runs import Trial
from runner.records.loggers.contract import RunOutcome
from runner.records.loggers.dashboard import History, ProjectRun, RunFacts, read_ids, save_id
from runner.records.settings import dotted

log = logging.getLogger(__name__)


class Trackio(ProjectRun):
    """logger=trackio; conf/logger/trackio.yaml documents the options.

    A thread of trackio writes the metrics, so that no step waits for it. trackio's environment variables choose where
    runs are stored.
    """

    def __init__(self, project: str | None = None, images: bool = True) -> None:
        require_packages("logger=trackio", "trackio", "trackio")
        self.wants_predictions = images
        self._project = project

    def open(self, directory: str, first_step: int, trial: Trial) -> None:
        import trackio  # takes seconds, so it is imported only if it was chosen
        from trackio.sqlite_storage import SQLiteStorage

        self._package = trackio
        path, facts = Path(directory), RunFacts(Path(directory))
        project = self._project or facts.config["name"]
        known = read_ids(path).get("trackio", {}).get(project)
        name = known or (f"{facts.sweep}/{facts.name}" if facts.sweep else facts.name)
        with contextlib.redirect_stdout(io.StringIO()):  # trackio prints how to show the run, which is logged below
            self._run = trackio.init(
                project=project,
                name=name,
                group=facts.sweep,
                config=dotted(facts.config) | facts.choices | trial.overrides,
                resume="allow" if known else "never",
                embed=False,
                auto_log_cpu=False,
            )
        save_id(path, "trackio", project, name)
        log.info("trackio  run %s, shown by trackio show --project %s", name, project)
        last: dict[str, int] = {}
        for line in SQLiteStorage.get_logs(project, name, run_id=self._run.id) if known else ():
            last |= {key: max(int(line["step"]), last.get(key, 0)) for key in line}
        self._history = History(last)
        self.catch_up(directory)

    def close(self, outcome: RunOutcome) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._package.finish()
