"""hydra/sweeper=grid: every combination of the values typed."""

from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser


class GridSweeper(BasicSweeper):
    """Hydra's own grid, whose jobs are checked before the first one runs and tabled after the last one."""

    def sweep(self, arguments: list[str]) -> Any:
        from runner.sweeps.sweep import current

        assert self.hydra_context is not None and self.launcher is not None and self.config is not None
        loader = self.hydra_context.config_loader
        overrides = OverridesParser.create(config_loader=loader).parse_overrides(self._parse_config() + arguments)
        jobs = [job for batch in self.split_arguments(overrides, None) for job in batch]
        sweep = current()
        jobs = sweep.open(jobs, self.config, loader)
        sweep.results = self.launcher.launch(jobs, initial_job_idx=0)
        return sweep.results
