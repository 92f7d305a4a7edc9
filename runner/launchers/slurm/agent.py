"""torch's elastic agent on one node of a Slurm job.

usage: python -m runner.launchers.slurm.agent NODE_ID NODES NPROC_PER_NODE ENDPOINT MAX_RESTARTS JOIN_TIMEOUT_S
ARGUMENT..., with RUNNER_DIRECTORY set
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed.elastic.multiprocessing import SignalException

from runner.errors import InputError, JobFailed, Preempted, print_messages
from runner.launchers.elastic import Ranks
from runner.launchers.slurm.requeue import STOPPED
from runner.launchers.torchrun import Torchrun
from runner.records.run_directory import Destination

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # forwarded to the ranks, which save and exit


def run() -> int:
    """Run this node's ranks to the end of the job, and return the exit status.

    Exit with 0 even after a signal, because the ranks received it too; `result.json` has the outcome. Another status
    would make srun terminate the other nodes' agents, whose ranks may still be saving.
    """
    node_id, num_nodes, num_ranks, endpoint, max_restarts, join_timeout_s = sys.argv[1:7]
    launcher = Torchrun(
        int(num_ranks),
        int(num_nodes),
        endpoint if num_nodes != "1" else None,
        max_restarts=int(max_restarts),
        join_timeout_s=float(join_timeout_s),
    )
    launcher.is_host = node_id == "0"
    directory = os.environ["RUNNER_DIRECTORY"]
    with TemporaryDirectory() as temporary:
        os.environ["RUNNER_RESTART_FILE"] = str(Path(temporary, "restart"))
        try:
            ranks = Ranks(launcher.nproc_per_node, sys.executable, ["-um", "runner", *sys.argv[7:]], SIGNALS)
            launcher.run(ranks, Destination(directory), [])
        except (SignalException, Preempted):
            # The signal has killed ranks that were still starting. The batch script may not have received it.
            (Path(directory) / STOPPED).touch()
        except InputError as error:
            print_messages(error.messages)
            return 1
        except JobFailed:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(run())
