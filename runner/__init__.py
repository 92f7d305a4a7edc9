"""A configuration-driven experiment runner for PyTorch: `python -m runner model=convnet parallel=ddp`.

The names in `__all__` are the interface for scripts, notebooks and custom code (docs/python.md). Each is imported, and
torch with it, when it is first used (PEP 562); importing this package has no other effect.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.api.experiments import compose as compose, sweep as sweep, train as train
    from runner.api.manage import (
        archive as archive,
        delete as delete,
        show as show,
        stop as stop,
        tag as tag,
    )
    from runner.api.runs import Run as Run, open_run as open_run, runs as runs, table as table
    from runner.config.schema import Config as Config
    from runner.errors import InputError as InputError, JobFailed as JobFailed, Preempted as Preempted
    from runner.jobs.task import JobTask as JobTask, LaunchingTask as LaunchingTask
    from runner.launchers.env import Env as Env
    from runner.launchers.contract import Launcher as Launcher, Queue as Queue
    from runner.objectives.objective import Objective as Objective, Prediction as Prediction
    from runner.parallel.loss_groups import prepare_loss_groups as prepare_loss_groups
    from runner.parallel.replica import Replica as Replica
    from runner.records.ledger import read_ledger as read_ledger
    from runner.records.loggers.contract import Logger as Logger
    from runner.records.loggers.dashboard import History as History, save_id as save_id
    from runner.training.callbacks.contract import Callback as Callback, Progress as Progress, RunInfo as RunInfo
    from runner.training.metrics.contract import Metric as Metric, Rows as Rows
    from runner.training.mode import Axes as Axes, Parallel as Parallel
    from runner.training.refusal import Refusal as Refusal
    from runner.training.restore import restore_evaluated as restore_evaluated

_MODULES = {
    **dict.fromkeys(("compose", "sweep", "train"), "runner.api.experiments"),
    **dict.fromkeys(("archive", "delete", "show", "stop", "tag"), "runner.api.manage"),
    **dict.fromkeys(("Run", "open_run", "runs", "table"), "runner.api.runs"),
    **dict.fromkeys(("InputError", "JobFailed", "Preempted"), "runner.errors"),
    "Config": "runner.config.schema",
    **dict.fromkeys(("Callback", "Progress", "RunInfo"), "runner.training.callbacks.contract"),
    **dict.fromkeys(("Metric", "Rows"), "runner.training.metrics.contract"),
    **dict.fromkeys(("Objective", "Prediction"), "runner.objectives.objective"),
    **dict.fromkeys(("Axes", "Parallel"), "runner.training.mode"),
    "Refusal": "runner.training.refusal",
    "Replica": "runner.parallel.replica",
    "prepare_loss_groups": "runner.parallel.loss_groups",
    **dict.fromkeys(("Launcher", "Queue"), "runner.launchers.contract"),
    "Env": "runner.launchers.env",
    **dict.fromkeys(("JobTask", "LaunchingTask"), "runner.jobs.task"),
    "restore_evaluated": "runner.training.restore",
    "Logger": "runner.records.loggers.contract",
    **dict.fromkeys(("History", "save_id"), "runner.records.loggers.dashboard"),
    "read_ledger": "runner.records.ledger",
}

__all__ = sorted(_MODULES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
