"""The world that the environment describes: torchrun's variables, the same set by hand, srun's, or one process."""

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace

from runner.errors import InputError

ALONE = "one process"
PORTS = range(10_000, 30_000)  # below those that systems give away by themselves


@dataclass(frozen=True)
class RankInfo:
    """Which rank this process is, in which world, and where their rendezvous is."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    restart: int = 0  # how often the launcher has started this world again
    found: str = ALONE  # what described it
    master_addr: str = ""
    master_port: int = 0
    hosts_store: bool = False  # this process, and not an agent, serves the world's store
    on_one_machine: bool = True  # as far as is known
    directory: str | None = None  # given to a run whose job Slurm may start again
    submitted: str | None = None  # the file of the code's state then, of a job that runs what there is when it starts
    guessed: tuple[str, ...] = ()  # of these fields, what the ranks count at their rendezvous
    has_parent: bool = False  # an agent or launcher started this process for the run, and it ends with that
    memory: str | None = None  # where its node's agent keeps what a world that it starts again is to know
    is_guest: bool = False  # the process is a script's or a notebook's, and goes on after the run

    @property
    def may_start_processes(self) -> bool:
        """Whether no launcher has started this one as a part of its world."""
        return self.found.startswith(ALONE)


def find_rank_info(init: str = "env", environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Read from the environment which rank this process is: torchrun's variables, the same by hand, or else srun's.

    init: as Backend's; other than env, it says by itself where the rendezvous is, and no MASTER_ADDR is needed. Raises
    InputError when only some of the variables are set, or when their values cannot be.
    """
    needed = ("RANK", "WORLD_SIZE", *(("MASTER_ADDR", "MASTER_PORT") if init == "env" else ()))
    missing = [key for key in needed if not environ.get(key)]
    if "RANK" in missing and "WORLD_SIZE" in missing:
        # In a batch script, and in the shell of salloc, there is a job but no step.
        if environ.get("SLURM_STEP_ID") and environ.get("SLURM_STEP_NUM_TASKS"):
            return rank_info_in_step(environ)
        return RankInfo()  # MASTER_ADDR alone is often left over in a shell and describes no world
    if missing:
        given = ", ".join(f"{key}={environ[key]}" for key in needed if key not in missing)
        raise InputError(f"{given}: half a world; {' and '.join(missing)} must be set too, or none of them")
    rank, world_size = integer(environ, "RANK"), integer(environ, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise InputError(f"RANK={rank} must be at least 0 and below WORLD_SIZE={world_size}")
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    master_addr = environ.get("MASTER_ADDR", "")
    # By hand, people often set LOCAL_RANK alone, or none of the two: then it is one machine until the rendezvous.
    local = {"local_rank": "LOCAL_RANK", "local_world_size": "LOCAL_WORLD_SIZE"}
    local_world_size = integer(environ, "LOCAL_WORLD_SIZE", world_size)
    counted = bool(environ.get("LOCAL_WORLD_SIZE")) or master_addr in ("localhost", "::1")
    return RankInfo(
        rank=rank,
        local_rank=integer(environ, "LOCAL_RANK", rank),
        world_size=world_size,
        local_world_size=local_world_size,
        restart=integer(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        found="torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment variables",
        master_addr=master_addr,
        master_port=integer(environ, "MASTER_PORT", 0),
        hosts_store=rank == 0 and not agent,
        directory=environ.get("RUNNER_DIRECTORY"),
        submitted=environ.get("RUNNER_SUBMITTED"),
        guessed=tuple(name for name, key in local.items() if not environ.get(key)),
        has_parent="TORCHELASTIC_RUN_ID" in environ,
        on_one_machine=(counted or master_addr.startswith("127.")) and local_world_size == world_size,
    )


def started_by_launch(rank_info: RankInfo, local_rank: int | None) -> RankInfo:
    """The info, of a command to which `python -m torch.distributed.launch` has appended --local-rank.

    Raises InputError where it is not the one that the environment says.
    """
    if local_rank is None:
        return rank_info
    if rank_info.world_size > 1 and local_rank != rank_info.local_rank:
        raise InputError(
            f"--local-rank={local_rank} is not LOCAL_RANK={rank_info.local_rank} of the environment; drop it"
        )
    return replace(rank_info, found="torch.distributed.launch") if rank_info.found == "torchrun" else rank_info


def integer(environ: Mapping[str, str], key: str, default: int | None = None) -> int:
    """A variable's value. Raises InputError where it is none."""
    text = environ.get(key)
    if not text and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise InputError(f"{key}={text} must be an integer") from None


def quiet_profiler() -> None:
    """Let torch's profiler not tell, on standard error, of its stages and that there is no GPU."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def rank_info_in_step(environ: Mapping[str, str]) -> RankInfo:
    """Which of its job step's tasks this process is. Raises InputError where srun's variables are incomplete."""
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    if missing := [key for key in needed if not environ.get(key)]:
        raise InputError(
            f"SLURM_STEP_ID={environ['SLURM_STEP_ID']}: half a job step; {' and '.join(missing)} must be set too"
        )
    world_size = integer(environ, "SLURM_STEP_NUM_TASKS")
    if world_size == 1:
        return RankInfo(found=f"{ALONE} under srun")
    rank = integer(environ, "SLURM_PROCID")
    tasks = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    return RankInfo(
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
