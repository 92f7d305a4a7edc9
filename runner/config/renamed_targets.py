"""Classes and keys that run directories, ledgers and people's own YAML files name as they were called before."""

from collections.abc import Mapping, Sequence
from typing import Any

_MODULES = {
    "runner.backend": "runner.distributed.backend",
    "runner.launchers.slurm": "runner.launchers.slurm.launcher",
    "runner.loader": "runner.training.loader",
    "runner.loggers.tensorboard": "runner.runs.loggers.tensorboard",
    "runner.losses": "runner.training.losses",
    "runner.schedules": "runner.training.lr_schedules",
}
_KEYS = {"logger.images": "logger.tensorboard.images"}  # from when one logger was chosen, and had no name


def rename_targets(node: Any) -> Any:
    """The node with every `_target_` in it, also under a dotted key, as it is called today."""
    if isinstance(node, Mapping):
        return {
            key: _renamed(value) if str(key).endswith("_target_") and isinstance(value, str) else rename_targets(value)
            for key, value in node.items()
        }
    return [rename_targets(item) for item in node] if isinstance(node, list) else node


def rename_keys(words: Sequence[str]) -> list[str]:
    """The recorded words of a command line, with the keys as they are called today."""
    return [_KEYS.get(key, key) + word[len(key) :] for word in words for key in (word.partition("=")[0],)]


def rename_shared(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the jobs of a recorded sweep share, by dotted key, as a configuration says it today."""
    values = rename_targets(values)
    target = values.get("logger._target_", "")
    if target.endswith("loggers.none.NoLogger"):  # the class is no more
        return {"logger": {}} | {key: value for key, value in values.items() if key != "logger._target_"}
    if target != "runner.runs.loggers.tensorboard.TensorBoard":
        return dict(values)
    return {key.replace("logger.", "logger.tensorboard.", key.startswith("logger.")): values[key] for key in values}


def _renamed(target: str) -> str:
    module, _, name = target.rpartition(".")
    return f"{_MODULES.get(module, module)}.{name}" if module else target
