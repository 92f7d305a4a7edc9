"""The agent on one node of a Slurm job, which runs the node's ranks as launcher=torchrun does.

usage: python -m runner.launchers.slurm.agent NODE_ID NODES NPROC_PER_NODE ENDPOINT MAX_RESTARTS JOIN_TIMEOUT_S SAVE_S
ARGUMENT..., with RUNNER_DIRECTORY set
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from runner.config.command import composing, prepare
from runner.distributed.environment import RankInfo
from runner.distributed.failures.signals import PREEMPTED
from runner.errors import InputError, print_messages
from runner.jobs.process_tuning import tune_process
from runner.launchers.agent import run_agent
from runner.launchers.contract import Launcher
from runner.launchers.slurm.requeue import STOPPED
from runner.records.settings import split_words


def main() -> int:
    """Run this node's ranks to the end of the job, and return the exit status.

    Return 0 even after a signal, because the ranks received it too; `result.json` has the outcome. Another status would
    make srun terminate the other nodes' agents, whose ranks may still be saving.
    """
    node_id, num_nodes, num_ranks, endpoint, max_restarts, join_timeout_s, save_s = sys.argv[1:8]
    from runner.launchers.torchrun import Torchrun  # imports torch

    launcher = Torchrun(
        int(num_ranks),
        int(num_nodes),
        endpoint if num_nodes != "1" else None,
        max_restarts=int(max_restarts),
        join_timeout_s=float(join_timeout_s),
        node_rank=int(node_id),
    )
    launcher.source, launcher.is_host, launcher.save_s = "slurm", node_id == "0", float(save_s)
    launcher.is_watched = True
    directory = os.environ["RUNNER_DIRECTORY"]
    try:
        status = run_arguments(sys.argv[8:], launcher, directory)
    except SystemExit as error:  # after a signal, while no ranks are running
        status = int(error.code or 0)
    if status == PREEMPTED:
        (Path(directory) / STOPPED).touch()  # the batch script may not have received the signal
        return 0
    return status


def run_arguments(arguments: Sequence[str], launcher: Launcher, directory: str) -> int:
    """Run the job of a command's arguments by this launcher. Return the exit status that the command would have.

    directory: of the run, which continues if it exists.
    """
    overrides, config_dirs = split_words(arguments)
    rank_info = RankInfo(directory=directory)
    try:
        with composing(overrides, config_dirs, multirun=False) as composed:
            request = prepare(composed, rank_info, [sys.executable, "-m", "runner", *arguments])
            from runner.launchers.launch import launch_and_report

            tune_process()
            return launch_and_report(request, rank_info, launcher)
    except InputError as error:
        print_messages(error.messages)
        return 2


if __name__ == "__main__":
    # This process is an agent, not one of the ranks that the tasks of a step are otherwise.
    for name in ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"):
        os.environ.pop(name, None)
    run_agent(main)
