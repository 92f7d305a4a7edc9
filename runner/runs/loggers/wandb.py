"""Weights & Biases: a run in a project, on its server, or offline in files of the run directory for `wandb sync`."""

import functools
import logging
import uuid
from pathlib import Path
from typing import Any, Literal

from runner.runs.loggers.background import Background
from runner.runs.loggers.dashboard import keep_id, read_facts, read_ids, require
from runner.runs.loggers.history import Feed, History
from runner.runs.loggers.pictures import draw_confusion
from runner.runs.loggers.protocol import Ending, Predictions
from runner.runs.loggers.wandb_file import last_steps
from runner.runs.records import Trial

CLOSE_S = 120
CONFUSION = "val/confusion"

log = logging.getLogger(__name__)


class WandB:
    """logger=wandb: rank 0 alone talks to it. A process of wandb's own writes and sends, so that no step waits.

    mode: auto is online where there is an API key, and otherwise offline. project: None: the name of the configuration.
    images: a confusion matrix after evaluations.
    """

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        mode: Literal["auto", "online", "offline"] = "auto",
        images: bool = True,
    ) -> None:
        require("wandb", "wandb")
        self.wants_predictions = images
        self._project, self._entity, self._mode = project, entity, mode
        self._run: Any = None

    def open(self, directory: str, first_step: int, trial: Trial) -> None:
        """Raises ConnectionError where the server takes no run."""
        import wandb  # it takes seconds, so that only what is chosen is imported

        path, facts = Path(directory), read_facts(Path(directory))
        project = self._project or facts.experiment
        place = f"{self._entity}/{project}" if self._entity else project
        known = read_ids(path, "wandb").get(place)
        run_id = known or uuid.uuid4().hex[:16]
        mode = self._choose_mode(wandb)
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
                config={**facts.config, "typed": trial.words, "git": facts.result.get("git", {})},
                allow_val_change=True,
                # The runner keeps what it prints, and the state of its code, by itself.
                settings=wandb.Settings(
                    console="off", silent=True, disable_git=True, save_code=False, reinit="create_new"
                ),
            )
        except wandb.Error as error:
            raise ConnectionError(f"{str(error).splitlines()[0]}; logger.wandb.mode=offline needs no server") from None
        keep_id(path, "wandb", place, run_id)
        if mode == "offline":
            log.info("wandb    run %s, sent by wandb sync %s", run_id, path / "wandb")
            # Each start has a file of its own, and syncing puts them together in their order.
            history = History(last_steps(path, run_id))
        else:
            log.info("wandb    run %s, shown by %s", run_id, self._run.url)
            # A server takes no step twice, nor one before the last that it has.
            history = History({}, least_step=self._run.starting_step)
        self._feed = Feed(self._run, history)
        self._feed.catch_up(directory)

    def scalars(self, step: int, metrics: dict[str, float]) -> None:
        self._feed.scalars(step, metrics)

    def predictions(self, step: int, seen: Predictions) -> None:
        import wandb

        self._feed.picture(
            step, CONFUSION, lambda: wandb.Image(draw_confusion(seen.confusion)), known_as=f"{CONFUSION}/path"
        )

    def text(self, tag: str, text: str) -> None:
        """The configuration is the run's config."""

    def flush(self) -> None:
        """wandb's process writes by itself; what it had not written when it was killed is made up on resuming."""

    def close(self, finished: Ending) -> None:
        self._run.summary["state"] = finished.state
        background = Background("wandb")  # without an answer from the server it would never return
        background.submit(functools.partial(self._run.finish, exit_code=int(finished.state == "failed")))
        if not background.wait(CLOSE_S):
            raise TimeoutError(f"not all was sent within {CLOSE_S} s; `wandb sync` sends the rest")

    def _choose_mode(self, wandb: Any) -> Any:
        if self._mode != "auto":
            return self._mode
        asked = wandb.setup().settings.mode  # by WANDB_MODE
        if asked != "online":
            return asked
        return "online" if wandb.login(prompt=False) else "offline"
