"""torchrun's command on one node of a Slurm job, without a traceback where a signal asked it to end.

usage: python -m runner.launchers.slurm.agent OPTIONS_OF_TORCHRUN, with RUNNER_DIRECTORY set
"""

import logging
import os
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError
from torch.distributed.run import main

from runner.distributed.hung_rank import ENDED
from runner.launchers.elastic_agent import counting_from_checkpoints
from runner.launchers.restarts import Told, how_it_died
from runner.launchers.slurm.requeue import TOLD

PROCESSES = "torch.distributed.elastic.multiprocessing.api"
RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"


def run() -> int:
    """0 also after a signal, which the ranks had as well: what became of the run is in its directory.

    Another status would let srun end the other nodes' agents, whose ranks may still be busy saving.
    """
    logging.getLogger(PROCESSES).setLevel(logging.CRITICAL)  # how a rank ended is told below, where none has told it
    # At the end of a job, where the node of the rendezvous has ended first.
    logging.getLogger(RENDEZVOUS).addFilter(lambda record: "failed to shutdown" not in record.getMessage())
    directory = os.environ["RUNNER_DIRECTORY"]
    told = Told(lambda: directory)
    try:
        with counting_from_checkpoints(told):
            main()
    except SignalException:
        # Ranks that were only starting died of it, and the batch script need not have had one.
        (Path(directory) / TOLD).touch()
    except ChildFailedError as error:
        (rank, failure), why = error.get_first_failure(), told.failure()
        if not why or (failure.exitcode < 0 and ENDED not in why):  # whom the others ended is not the cause
            print(how_it_died(rank, failure.exitcode), file=sys.stderr)
        return 1
    except RendezvousClosedError:
        return 1  # another node has given up, and says why
    except RendezvousError as error:
        print(f"the nodes found each other no more: {error or type(error).__name__}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run())
