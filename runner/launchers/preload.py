"""The modules that the fork server imports once for the ranks of all jobs; imported only by the fork server."""

import sys
from types import TracebackType

from runner.errors import describe_system_error, print_messages
from runner.jobs.process_tuning import begin_imports


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error that ends the fork server; one line if no further process may be started."""
    if line := describe_system_error(error):
        print_messages([line])
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _report
begin_imports()  # each rank calls `tune_process`, which ends the imports

import torch._dynamo  # noqa: E402
import torch.distributed.checkpoint.state_dict  # noqa: E402, F401

import runner.launchers.spawn  # noqa: E402
import runner.launchers.torchrun  # noqa: E402, F401
