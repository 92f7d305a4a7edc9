"""The pruner of a trial: whether its run is worth continuing. Called on rank 0, in whichever process that is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.utils import instantiate


@dataclass
class TrialPruner:
    """Reports a trial's metric to its study, and returns whether the study's pruner stops it. Pickled before use."""

    storage: str
    study_name: str
    trial: int
    metric: str
    pruner: dict[str, Any]

    def __post_init__(self) -> None:
        self._trial: Any = None
        self._reported_steps: set[int] = set()

    def __call__(self, step: int, metrics: dict[str, float]) -> bool:
        if self.metric not in metrics:
            return False
        if self._trial is None:
            import optuna

            study = optuna.load_study(
                study_name=self.study_name, storage=open_storage(self.storage), pruner=instantiate(self.pruner)
            )
            recorded = study.get_trials(deepcopy=False)[self.trial]
            self._trial = optuna.trial.Trial(study, recorded._trial_id)
            self._reported_steps = set(recorded.intermediate_values)  # by earlier attempts of a resumed run
        if step not in self._reported_steps:
            self._trial.report(metrics[self.metric], step)
            self._reported_steps.add(step)
        return self._trial.should_prune()


def open_storage(storage: str) -> Any:
    """Return the storage of a study as Optuna accepts it, for a database's URL or the path of a journal file."""
    if "://" in storage:
        return storage
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(str(Path(storage).absolute())))
