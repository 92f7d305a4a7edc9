"""hydra/launcher=slots: the jobs of a sweep side by side, each on devices of its own."""

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class SlotsLauncher(Launcher):
    """Starts the next job when slots are free, without waiting for those that run."""

    def __init__(self, slots: Any):
        self.slots = slots

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config

    def check(self, configs: Sequence[Any]) -> None:
        """Raises InputError when the jobs cannot run on these slots."""
        from runner.sweeps.slots import check_slots

        check_slots(self.slots, configs)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from runner.sweeps.slots import run_in_slots
        from runner.sweeps.sweep import current

        loader = self.hydra_context.config_loader
        run_in_slots(current(), job_overrides, initial_job_idx, self.slots, self.config, loader)
        return []
