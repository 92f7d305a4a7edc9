"""Where classes have moved to that run directories, ledgers and people's own YAML files name by their older path."""

from collections.abc import Mapping
from typing import Any

_MODULES = {
    "runner.backend": "runner.distributed.backend",
    "runner.launchers.slurm": "runner.launchers.slurm.launcher",
    "runner.loader": "runner.training.loader",
    "runner.loggers.none": "runner.runs.loggers.none",
    "runner.loggers.tensorboard": "runner.runs.loggers.tensorboard",
    "runner.losses": "runner.training.losses",
    "runner.schedules": "runner.training.lr_schedules",
}


def rename_targets(node: Any) -> Any:
    """The node with every `_target_` in it, also under a dotted key, as it is called today."""
    if isinstance(node, Mapping):
        return {
            key: _renamed(value) if str(key).endswith("_target_") and isinstance(value, str) else rename_targets(value)
            for key, value in node.items()
        }
    return [rename_targets(item) for item in node] if isinstance(node, list) else node


def _renamed(target: str) -> str:
    module, _, name = target.rpartition(".")
    return f"{_MODULES.get(module, module)}.{name}" if module else target
