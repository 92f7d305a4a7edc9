"""The sweepers and the launcher of runner.sweeps, as classes that Hydra accepts only from this package."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext
from omegaconf import DictConfig

# The task function is a runner.sweeps.sweep.Sweep. `sweep` ignores its argument, the overrides of the first job,
# with which Hydra composes its own configuration.


class GridSweeper(BasicSweeper):
    """hydra/sweeper=grid: every combination of the values, checked before the first job and recorded in a ledger."""

    def __init__(self, params: dict[str, str] | None = None, zip: Any = None):
        super().__init__(None, params)
        self.zip = zip

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self.task = task_function

    def sweep(self, arguments: list[str]) -> Any:
        from runner.config.texts import keep_text
        from runner.sweeps.jobs import Composer, combine, complete_overrides

        assert self.hydra_context is not None and self.launcher is not None and self.config is not None
        sweep, composer = self.task, Composer(self.config, self.hydra_context.config_loader)
        texts = [*map(keep_text, self._parse_config()), *sweep.arguments]
        overrides = OverridesParser.create(composer.loader).parse_overrides(texts)
        swept = [override.get_key_element() for override in overrides if override.is_sweep_override()]
        with _closing(self.launcher) as check:
            sweep.open(combine(overrides, self.zip), swept, composer, check)
            jobs = [complete_overrides(job.overrides) for job in sweep.jobs]
            return self.launcher.launch(jobs, initial_job_idx=0) if jobs else []


class OptunaSweeper(Sweeper):
    """hydra/sweeper=optuna: trials that Optuna proposes; conf/hydra/sweeper/optuna.yaml has the options."""

    def __init__(self, **options: Any):
        self.options = options

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        self.task, self.loader, self.config = task_function, hydra_context.config_loader, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        from runner.sweeps.jobs import Composer
        from runner.sweeps.study import run_study
        from runner.sweeps.study_options import StudyOptions

        assert self.launcher is not None and self.config is not None
        composer = Composer(self.config, self.loader)
        with _closing(self.launcher) as check:
            run_study(self.task, StudyOptions(**self.options), composer, self.launcher, check)


class SlotsLauncher(Launcher):
    """hydra/launcher=slots, and those for other machines: jobs in parallel, each on its own devices.

    machines: the dotted path of the class of the machines, which has the `options`; None for this machine.
    """

    def __init__(self, slots: Any, machines: str | None = None, **options: Any):
        self.slots, self.kind, self.options = slots, machines, options
        self.machines: list[Any] = []  # once they have been checked

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        self.task, self.loader, self.config = task_function, hydra_context.config_loader, config

    def check(self, configs: Sequence[Any]) -> None:
        """Raise InputError if the jobs cannot run on these slots."""
        from runner.sweeps.slot_machines import find_machines
        from runner.sweeps.slots import check_jobs

        self.machines = find_machines(self.slots, self.kind, self.options, configs)
        check_jobs(self.machines, configs)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from runner.sweeps.slots import run_in_slots

        composed = [self.loader.load_sweep_config(self.config, list(overrides)) for overrides in job_overrides]
        run_in_slots(self.task, composed, initial_job_idx, self.machines)
        return []

    def close(self) -> None:
        """Release the machines, all of which belong to one `Machines`."""
        for machine in self.machines[:1]:
            machine.machines.close()


@contextmanager
def _closing(hydra_launcher: Launcher) -> Iterator[Callable[[Sequence[Any]], None]]:
    """Yield the launcher's check of the jobs, and close the launcher at the end. Hydra's own launchers have neither."""
    try:
        yield getattr(hydra_launcher, "check", lambda configs: None)
    finally:
        getattr(hydra_launcher, "close", lambda: None)()
