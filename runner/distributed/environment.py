"""The world that the environment describes: torchrun's variables, the same set by hand, srun's, or one process."""

import os
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from runner.errors import InputError

ALONE = "one process"
IMAGINED = "a plan"  # the source of a rank whose code a plan runs with fake tensors, without the other ranks
JOIN_TIMEOUT_S = 120.0  # for the ranks to find each other, until the configuration is known
PORTS = range(10_000, 30_000)  # below the ephemeral ports
# A global, because custom code that starts another run within a run has no access to the first one.
_runs_in_progress: list[None] = []


@dataclass(frozen=True)
class RankInfo:
    """Which rank this process is, in which world, and where the rendezvous is."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    restart: int = 0  # how often the launcher has restarted this world
    source: str = ALONE  # what started the ranks
    world_id: str = ""  # distinguishes the world from others that use the same port; empty if the launcher has no id
    master_addr: str = ""
    master_port: int = 0
    hosts_store: bool = False  # this process, and not an agent, serves the world's store
    on_one_machine: bool = True  # as far as is known before the rendezvous
    directory: str | None = None  # the run directory of a job that a queue may start again
    inferred: tuple[str, ...] = ()  # the fields that the rendezvous infers by counting the ranks of each host
    has_parent: bool = False  # an agent or launcher started this process, which exits when its parent does
    restart_file: str | None = None  # a file of the machine's agent, with values for a restarted world
    is_embedded: bool = False  # the process is a script or notebook, which continues after the run
    may_grow: bool = False  # other processes may join this world, even if it has only one rank

    @property
    def may_start_processes(self) -> bool:
        """Return True unless a launcher has started this process as a part of its world."""
        return self.source.startswith(ALONE)


def find_rank_info(init: str = "env", environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Return which rank this process is, from torchrun's variables, the same set by hand, or else srun's.

    Raises InputError if only some of the variables are set, or if a value is invalid. init: as in Backend; other than
    env, it names the rendezvous, so that MASTER_ADDR is not needed.
    """
    needed = ("RANK", "WORLD_SIZE", *(("MASTER_ADDR", "MASTER_PORT") if init == "env" else ()))
    missing = [key for key in needed if not environ.get(key)]
    if "RANK" in missing and "WORLD_SIZE" in missing:
        # A batch script and the shell of salloc have a job, but no step.
        if environ.get("SLURM_STEP_ID") and environ.get("SLURM_STEP_NUM_TASKS"):
            return rank_info_of_step(environ)
        return RankInfo()  # a shell often has a MASTER_ADDR from earlier, which describes no world
    if missing:
        given = ", ".join(f"{key}={environ[key]}" for key in needed if key not in missing)
        raise InputError(f"{given}: incomplete world; {' and '.join(missing)} must be set too, or none of them")
    rank, world_size = integer(environ, "RANK"), integer(environ, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise InputError(f"RANK={rank} must be at least 0 and below WORLD_SIZE={world_size}")
    master_addr, is_torchrun = environ.get("MASTER_ADDR", ""), "TORCHELASTIC_RUN_ID" in environ
    # Users often set only LOCAL_RANK, or neither variable: until the rendezvous, one machine is assumed for all ranks.
    local = {"local_rank": "LOCAL_RANK", "local_world_size": "LOCAL_WORLD_SIZE"}
    local_world_size = integer(environ, "LOCAL_WORLD_SIZE", world_size)
    is_size_known = bool(environ.get("LOCAL_WORLD_SIZE")) or master_addr in ("localhost", "::1")
    return RankInfo(
        rank=rank,
        local_rank=integer(environ, "LOCAL_RANK", rank),
        world_size=world_size,
        local_world_size=local_world_size,
        restart=integer(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        source="torchrun" if is_torchrun else "environment variables",
        world_id=environ.get("TORCHELASTIC_RUN_ID", ""),
        master_addr=master_addr,
        master_port=integer(environ, "MASTER_PORT", 0),
        hosts_store=rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        directory=environ.get("RUNNER_DIRECTORY"),
        restart_file=_file_of_torchrun(environ),
        inferred=tuple(name for name, key in local.items() if not environ.get(key)),
        has_parent=is_torchrun,
        on_one_machine=(is_size_known or master_addr.startswith("127.")) and local_world_size == world_size,
    )


def _file_of_torchrun(environ: Mapping[str, str]) -> str | None:
    """Return a file in the private directory that the agent of the command torchrun keeps while it restarts ranks."""
    file = Path(environ.get("TORCHELASTIC_ERROR_FILE", ""))  # DIRECTORY/attempt_N/LOCAL_RANK/error.json
    return str(file.parents[2] / "restart") if file.parent.parent.name.startswith("attempt_") else None


def integer(environ: Mapping[str, str], key: str, default: int | None = None) -> int:
    """Return a variable's value. Raise InputError if it is not an integer."""
    text = environ.get(key)
    if not text and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise InputError(f"{key}={text} must be an integer") from None


def quiet_profiler() -> None:
    """Keep torch's profiler from logging its stages, and that there is no GPU, on standard error."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


@contextmanager
def run_in_progress() -> Iterator[None]:
    """Mark this process as a part of one world, within which it must not start another run."""
    _runs_in_progress.append(None)
    try:
        yield
    finally:
        _runs_in_progress.pop()


def is_run_in_progress() -> bool:
    """Return True within a run, for example when a model, a dataset or a callback calls the runner."""
    return bool(_runs_in_progress)


# The ranks of a step that srun has started.


def rank_info_of_step(environ: Mapping[str, str]) -> RankInfo:
    """Return which task of its job step this process is. Raise InputError if srun's variables are incomplete."""
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    if missing := [key for key in needed if not environ.get(key)]:
        raise InputError(
            f"SLURM_STEP_ID={environ['SLURM_STEP_ID']}: incomplete job step; {' and '.join(missing)} must be set too"
        )
    world_size = integer(environ, "SLURM_STEP_NUM_TASKS")
    if world_size == 1:
        return RankInfo(source=f"{ALONE} under srun")
    rank, tasks = integer(environ, "SLURM_PROCID"), tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    first_node = first_host(environ["SLURM_STEP_NODELIST"])
    return RankInfo(
        rank=rank,
        local_rank=integer(environ, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=tasks[integer(environ, "SLURM_NODEID")],
        source="srun",
        world_id=f"{environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}",
        # A script may export another address and port.
        master_addr=environ.get("MASTER_ADDR") or ("localhost" if len(tasks) == 1 else address_of(first_node)),
        master_port=integer(environ, "MASTER_PORT", step_port(environ)),
        hosts_store=rank == 0,
        on_one_machine=len(tasks) == 1,
    )


def step_port(environ: Mapping[str, str]) -> int:
    """Return a port that is the same for all tasks of the step, and very likely unused by other steps on the node."""
    if reserved := environ.get("SLURM_STEP_RESV_PORTS"):  # for example 12000-12003, on clusters that reserve ports
        return int(re.split("[-,]", reserved)[0])
    number = integer(environ, "SLURM_JOB_ID") + 7_919 * integer(environ, "SLURM_STEP_ID")
    return PORTS[number % len(PORTS)]


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node from Slurm's short form: 2(x3),1 means 2, 2, 2 and 1."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise InputError(f"SLURM_STEP_TASKS_PER_NODE={text} must be numbers of tasks, as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first name in Slurm's short form of a list of nodes: gpu03 for gpu[03-08,11],login."""
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", nodes)[0])


def address_of(node: str) -> str:
    """Return the node's name if it resolves; otherwise the address by which Slurm itself reaches it."""
    with suppress(OSError):
        socket.getaddrinfo(node, None)
        return node
    try:
        command = ("scontrol", "show", "node", node)
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(f"the job's first node is {node}, whose name does not resolve ({error})") from None
    match = re.search(r"\bNodeAddr=(\S+)", output)
    return match[1] if match else node
