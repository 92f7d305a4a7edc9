"""torchrun's command on one node of a Slurm job, without a traceback where a signal asked it to end.

usage: python -m runner.launchers.slurm.agent OPTIONS_OF_TORCHRUN, with RUNNER_DIRECTORY set
"""

import logging
import os
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main

from runner.launchers.slurm.requeue import TOLD

RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"


def run() -> int:
    """0 also after a signal, which the ranks had as well: what became of the run is in its directory.

    Another status would let srun end the other nodes' agents, whose ranks may still be busy saving.
    """
    # At the end of a job, where the node of the rendezvous has ended first.
    logging.getLogger(RENDEZVOUS).addFilter(lambda record: "failed to shutdown" not in record.getMessage())
    try:
        main()
    except SignalException:
        # Ranks that were only starting died of it, and the batch script need not have had one.
        (Path(os.environ["RUNNER_DIRECTORY"]) / TOLD).touch()
    return 0


if __name__ == "__main__":
    sys.exit(run())
