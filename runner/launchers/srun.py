"""The world that srun describes to the processes of a job step."""

import re
import socket
import subprocess
from collections.abc import Mapping

from runner.config import InputError
from runner.launchers.env import ALONE, Place, integer

PORTS = range(10_000, 30_000)  # below those that systems give away by themselves


def place_in_step(environ: Mapping[str, str]) -> Place:
    """This process's place among the tasks of its job step. Raises InputError where srun's variables are incomplete."""
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    if missing := [key for key in needed if not environ.get(key)]:
        raise InputError(
            f"SLURM_STEP_ID={environ['SLURM_STEP_ID']}: half a job step; {' and '.join(missing)} must be set too"
        )
    world_size = integer(environ, "SLURM_STEP_NUM_TASKS")
    if world_size == 1:
        return Place(found=f"{ALONE} under srun")
    rank = integer(environ, "SLURM_PROCID")
    tasks = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    return Place(
        rank=rank,
        local_rank=integer(environ, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=tasks[integer(environ, "SLURM_NODEID")],
        restart=0,  # a requeued job has another step, and so a store of its own
        found="srun",
        # A script that exports an address and a port of its own knows better.
        master_addr=environ.get("MASTER_ADDR") or _master(environ["SLURM_STEP_NODELIST"], len(tasks)),
        master_port=integer(environ, "MASTER_PORT", step_port(environ)),
        hosts_store=rank == 0,
        on_one_machine=len(tasks) == 1,
    )


def step_port(environ: Mapping[str, str]) -> int:
    """A port that all tasks of the step work out alike, and that no other job or step on the node does."""
    if reserved := environ.get("SLURM_STEP_RESV_PORTS"):  # as 12000-12003, where the cluster hands them out
        return int(re.split("[-,]", reserved)[0])
    number = integer(environ, "SLURM_JOB_ID") + 7_919 * integer(environ, "SLURM_STEP_ID")
    return PORTS[number % len(PORTS)]


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks on each node, of Slurm's short form: 2(x3),1 is 2, 2, 2 and 1."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise InputError(f"SLURM_STEP_TASKS_PER_NODE={text} must be numbers of tasks, as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first name of Slurm's short form: gpu[03-08,11],login is gpu03."""
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", nodes)[0])


def _master(nodes: str, num_nodes: int) -> str:
    if num_nodes == 1:
        return "localhost"
    return address_of(first_host(nodes))


def address_of(node: str) -> str:
    """The node's name where it resolves; otherwise the address by which Slurm itself reaches it."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        pass
    try:
        words = ("scontrol", "show", "node", node)
        said = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(f"the job's first node is {node}, whose name does not resolve ({error})") from None
    match = re.search(r"\bNodeAddr=(\S+)", said)
    return match[1] if match else node
