"""The modules that the fork server imports once for the ranks of all jobs; imported only by the fork server."""

from runner.jobs.process_tuning import begin_imports

begin_imports()  # each rank calls `tune_process`, which ends the imports

import torch._dynamo  # noqa: E402, F401

import runner.launchers.spawn  # noqa: E402
import runner.launchers.torchrun  # noqa: E402, F401
