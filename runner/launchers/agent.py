"""torchrun's command on one node of a Slurm job, without a traceback where a signal asked it to end.

usage: python -m runner.launchers.agent OPTIONS_OF_TORCHRUN
"""

import sys
from contextlib import suppress

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main


def run() -> int:
    """0 also after a signal, which the ranks had as well: result.json says what they made of it.

    Another status would let srun end the other nodes' agents, whose ranks may still be busy saving.
    """
    with suppress(SignalException):
        main()
    return 0


if __name__ == "__main__":
    sys.exit(run())
