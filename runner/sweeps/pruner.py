"""Whether a run that is a study's trial is worth continuing: asked on rank 0, wherever the run's processes are."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.utils import instantiate


@dataclass
class TrialPruner:
    """Tells the study how a trial does, and whether its pruner gives it up; to be pickled before it is asked."""

    storage: str  # as Options.storage, of which there is one
    study_name: str
    trial: int
    metric: str
    pruner: dict[str, Any]
    _open: Any = field(default=None, repr=False)
    _told: set[int] = field(default_factory=set, repr=False)  # the steps that the study knows

    def __call__(self, step: int, metrics: dict[str, float]) -> bool:
        if self.metric not in metrics:
            return False
        if self._open is None:
            import optuna

            study = optuna.load_study(
                study_name=self.study_name, storage=open_storage(self.storage), pruner=instantiate(self.pruner)
            )
            frozen = study.get_trials(deepcopy=False)[self.trial]
            self._open = optuna.trial.Trial(study, frozen._trial_id)
            self._told = set(frozen.intermediate_values)  # before the run was resumed
        if step not in self._told:
            self._open.report(metrics[self.metric], step)
            self._told.add(step)
        return self._open.should_prune()


def open_storage(storage: str) -> Any:
    """What Optuna keeps a study in: a database's URL, or else a journal's file."""
    if "://" in storage:
        return storage
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(str(Path(storage).absolute())))
