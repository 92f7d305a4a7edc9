"""Weights & Biases: a run in a project, on its server, or offline in files of the run directory for `wandb sync`."""

import logging
import threading
import uuid
from pathlib import Path
from typing import Any, Literal

from runner.errors import require_packages
from runner.records.compared_runs import Trial
from runner.records.loggers.contract import RunOutcome
from runner.records.loggers.dashboard import History, ProjectRun, RunFacts, read_ids, save_id

CLOSE_S = 120

log = logging.getLogger(__name__)


class WandB(ProjectRun):
    """logger=wandb; conf/logger/wandb.yaml documents the options.

    A process of wandb writes and sends the metrics, so that no step waits for it.
    """

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        mode: Literal["auto", "online", "offline"] = "auto",
        images: bool = True,
    ) -> None:
        require_packages("logger=wandb", "wandb", "wandb")
        self.wants_predictions = images
        self._project, self._entity, self._mode = project, entity, mode

    def open(self, directory: str, first_step: int, trial: Trial) -> None:
        """Start the run, or continue it. Raises ConnectionError if the server does not accept it."""
        import wandb  # takes seconds, so it is imported only if it was chosen

        self._package = wandb
        path, facts = Path(directory), RunFacts(Path(directory))
        project = self._project or facts.config["name"]
        location = f"{self._entity}/{project}" if self._entity else project
        known = read_ids(path).get("wandb", {}).get(location)
        run_id = known or uuid.uuid4().hex[:16]
        mode = self._choose_mode()
        try:
            self._run = wandb.init(
                project=project,
                entity=self._entity,
                id=run_id,
                resume="allow",
                name=facts.name,
                group=facts.sweep,
                dir=directory,
                mode=mode,
                config={**facts.config, "typed": trial.overrides, "git": facts.result.get("git", {})},
                allow_val_change=True,
                # The run directory has the log and the state of the code.
                settings=wandb.Settings(
                    console="off", silent=True, disable_git=True, save_code=False, reinit="create_new"
                ),
            )
        except wandb.Error as error:
            raise ConnectionError(f"{str(error).splitlines()[0]}; logger.wandb.mode=offline needs no server") from None
        save_id(path, "wandb", location, run_id)
        if mode == "offline":
            log.info("wandb    run %s, sent by wandb sync %s", run_id, path / "wandb")
            # The files of earlier attempts contain the earlier steps, and possibly steps that are repeated now.
            least_step = first_step + 1 if known else 0
        else:
            log.info("wandb    run %s, shown by %s", run_id, self._run.url)
            least_step = self._run.starting_step  # the server rejects steps up to the last one that it has
        self._history = History({}, least_step=least_step)
        self.catch_up(directory)

    def close(self, outcome: RunOutcome) -> None:
        self._run.summary["state"] = outcome.state
        exit_code = int(outcome.state == "failed")
        thread = threading.Thread(target=self._run.finish, kwargs={"exit_code": exit_code}, daemon=True)
        thread.start()  # because finish() never returns without a response from the server
        thread.join(CLOSE_S)
        if thread.is_alive():
            raise TimeoutError(f"not everything was sent within {CLOSE_S} s; send the rest with `wandb sync`")

    def _choose_mode(self) -> Any:
        if self._mode != "auto":
            return self._mode
        configured = self._package.setup().settings.mode  # set by WANDB_MODE
        if configured != "online":
            return configured
        return "online" if self._package.login(prompt=False) else "offline"
