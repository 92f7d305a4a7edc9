"""hydra/sweeper=grid: every combination of the values typed."""

from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser


class GridSweeper(BasicSweeper):
    """Hydra's own grid, whose jobs are checked before the first one runs and recorded in a ledger."""

    def __init__(self, max_batch_size: int | None, params: dict[str, str] | None = None, zip: Any = None):
        super().__init__(max_batch_size, params)
        self.zip = zip

    def sweep(self, arguments: list[str]) -> Any:
        """arguments: the first job's, for Hydra to compose; what makes all of them is the sweep's own."""
        from runner.sweeps.grid import combine
        from runner.sweeps.sweep import current

        assert self.hydra_context is not None and self.launcher is not None and self.config is not None
        sweep, loader = current(), self.hydra_context.config_loader
        overrides = OverridesParser.create(config_loader=loader).parse_overrides(self._parse_config() + sweep.arguments)
        swept = [override.get_key_element() for override in overrides if override.is_sweep_override()]
        check = getattr(self.launcher, "check", lambda configs: None)  # slots has one, Hydra's own launchers don't
        sweep.open(combine(overrides, self.zip), swept, self.config, loader, check)
        return self.launcher.launch(sweep.words(), initial_job_idx=0) if sweep.jobs else []
