"""The world that the environment describes: torchrun's variables, the same set by hand, srun's, or one process."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from runner.backend import as_backend
from runner.config import Config, InputError
from runner.run_dir import Request

ALONE = "one process"


@dataclass(frozen=True)
class Place:
    """Where this process stands in the world of its run."""

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
    guessed: tuple[str, ...] = ()  # of these fields, what the ranks count when they meet
    has_parent: bool = False  # an agent or launcher started this process for the run, and it ends with that

    @property
    def may_start_processes(self) -> bool:
        """Whether no launcher has started this one as a part of its world."""
        return self.found.startswith(ALONE)


class Env:
    """launcher=env: the processes exist already; this one runs its part of the job."""

    starts_processes = False
    queues = False
    started_on_each = False
    world_size: int | None = None

    def __init__(self, join_timeout_s: float = 120.0):
        self.join_timeout_s = checked_timeout(join_timeout_s)

    def launch(self, config: Config, request: Request, place: Place) -> dict[str, float]:
        from runner.job import run_job  # the entry imports this module before it knows whether torch is needed
        from runner.meeting import join

        return run_job(config, request, join(place, as_backend(config.backend), self.join_timeout_s))


def checked_timeout(join_timeout_s: float) -> float:
    """The seconds that a process waits for the others to appear. Raises ValueError for none at all."""
    if join_timeout_s <= 0:
        raise ValueError(f"launcher.join_timeout_s={join_timeout_s:g} must be above 0 seconds; try 120")
    return join_timeout_s


def find_place(init: str = "env", environ: Mapping[str, str] = os.environ) -> Place:
    """Read this process's place from the environment: torchrun's variables, the same by hand, or else srun's.

    init: as Backend's; other than env, it says by itself where the ranks meet, and no MASTER_ADDR is needed. Raises
    InputError when only some of the variables are set, or when their values cannot be.
    """
    needed = ("RANK", "WORLD_SIZE", *(("MASTER_ADDR", "MASTER_PORT") if init == "env" else ()))
    missing = [key for key in needed if not environ.get(key)]
    if "RANK" in missing and "WORLD_SIZE" in missing:
        # In a batch script, and in the shell of salloc, there is a job but no step.
        if environ.get("SLURM_STEP_ID") and environ.get("SLURM_STEP_NUM_TASKS"):
            from runner.launchers.srun import place_in_step

            return place_in_step(environ)
        return Place()  # MASTER_ADDR alone is often left over in a shell and describes no world
    if missing:
        given = ", ".join(f"{key}={environ[key]}" for key in needed if key not in missing)
        raise InputError(f"{given}: half a world; {' and '.join(missing)} must be set too, or none of them")
    rank, world_size = integer(environ, "RANK"), integer(environ, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise InputError(f"RANK={rank} must be at least 0 and below WORLD_SIZE={world_size}")
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    master_addr = environ.get("MASTER_ADDR", "")
    # By hand, people often set LOCAL_RANK alone, or none of the two: then it is one machine until the ranks have met.
    local = {"local_rank": "LOCAL_RANK", "local_world_size": "LOCAL_WORLD_SIZE"}
    local_world_size = integer(environ, "LOCAL_WORLD_SIZE", world_size)
    counted = bool(environ.get("LOCAL_WORLD_SIZE")) or master_addr in ("localhost", "::1")
    return Place(
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
        guessed=tuple(name for name, key in local.items() if not environ.get(key)),
        has_parent="TORCHELASTIC_RUN_ID" in environ,
        on_one_machine=(counted or master_addr.startswith("127.")) and local_world_size == world_size,
    )


def started_by_launch(place: Place, local_rank: int | None) -> Place:
    """The place, of a command to which `python -m torch.distributed.launch` has appended --local-rank.

    Raises InputError where it is not the one that the environment says.
    """
    if local_rank is None:
        return place
    if place.world_size > 1 and local_rank != place.local_rank:
        raise InputError(f"--local-rank={local_rank} is not LOCAL_RANK={place.local_rank} of the environment; drop it")
    return replace(place, found="torch.distributed.launch") if place.found == "torchrun" else place


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
