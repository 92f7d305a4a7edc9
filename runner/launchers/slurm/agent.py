"""torch's elastic agent on one node of a Slurm job.

usage: python -m runner.launchers.slurm.agent OPTIONS_OF_TORCHRUN, with RUNNER_DIRECTORY set
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousParameters
from torch.distributed.run import config_from_args, parse_args

from runner.errors import JobFailed, Preempted
from runner.launchers.elastic import Ranks, run_worlds
from runner.launchers.node_rendezvous import Nodes
from runner.launchers.slurm.requeue import STOPPED
from runner.records.run_directory import Request


def run() -> int:
    """Run this node's ranks to the end of the job, and return the exit status.

    Exit with 0 even after a signal, because the ranks received it too; `result.json` has the outcome. Another status
    would make srun terminate the other nodes' agents, whose ranks may still be saving.
    """
    config, command, args = config_from_args(parse_args(None))
    directory = os.environ["RUNNER_DIRECTORY"]
    with TemporaryDirectory() as folder:
        os.environ["RUNNER_RESTART_FILE"] = str(Path(folder, "restart"))
        try:
            parameters = RendezvousParameters(
                config.rdzv_backend,
                config.rdzv_endpoint,
                config.run_id,
                config.min_nodes,
                config.max_nodes,
                config.local_addr,
                **{"join_timeout": 600, "last_call_timeout": 30, **config.rdzv_configs},
            )
            ranks = Ranks(config.nproc_per_node, command, args, signals=config.signals_to_handle)
            run_worlds(Nodes(parameters), ranks, Request(directory=directory), config.max_restarts, [])
        except (SignalException, Preempted):
            # Ranks that were only starting died of the signal, which the batch script may not have received.
            (Path(directory) / STOPPED).touch()
        except (JobFailed, RendezvousClosedError):
            return 1  # this node or another one has reported why
        except RendezvousError as error:
            print(f"the nodes no longer found each other: {error or type(error).__name__}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(run())
