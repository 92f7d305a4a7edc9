"""hydra/sweeper=optuna: trials that Optuna proposes."""

from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class OptunaSweeper(Sweeper):
    """Every rank runs the trial that rank 0's study proposes; conf/hydra/sweeper/optuna.yaml has the options."""

    def __init__(
        self,
        metric: Any,
        direction: Any,
        n_trials: Any,
        n_jobs: Any,
        study_name: Any,
        storage: Any,
        params: Any,
        sampler: Any,
        pruner: Any,
    ):
        self.options = (metric, direction, n_trials, n_jobs, study_name, storage, params, sampler, pruner)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.loader, self.config = hydra_context.config_loader, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """arguments: the first job's, for Hydra to compose; what makes all of them is the sweep's own."""
        from runner.sweeps.study import Options, run_study
        from runner.sweeps.sweep import current

        assert self.launcher is not None and self.config is not None
        sweep = current()
        run_study(sweep, Options(*self.options), sweep.arguments, self.launcher, self.config, self.loader)
