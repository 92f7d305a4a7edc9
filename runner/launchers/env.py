"""The world that the environment describes: torchrun's variables, the same set by hand, or one process alone."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from runner.backend import as_backend
from runner.config import Config, InputError
from runner.run_dir import Request


@dataclass(frozen=True)
class Place:
    """Where this process stands in the world of its run."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    restart: int = 0  # how often the launcher has started this world again
    found: str = "one process"  # what described it
    master_addr: str = ""
    master_port: int = 0
    hosts_store: bool = False  # this process, and not an agent, serves the world's store


class Env:
    """launcher=env: the processes exist already; this one runs its part of the job."""

    starts_processes = False

    def __init__(self) -> None:
        pass

    def launch(self, config: Config, request: Request, place: Place) -> dict[str, float]:
        from runner.job import run_job  # the entry imports this module before it knows whether torch is needed
        from runner.world import join

        return run_job(config, request, join(place, as_backend(config.backend)))


def find_place(init: str = "env", environ: Mapping[str, str] = os.environ) -> Place:
    """Read this process's place from the environment.

    init: as Backend's; other than env, it says by itself where the ranks meet, and no MASTER_ADDR is needed. Raises
    InputError when only some of the variables are set, or when their values cannot be.
    """
    needed = ("RANK", "WORLD_SIZE", *(("MASTER_ADDR", "MASTER_PORT") if init == "env" else ()))
    missing = [key for key in needed if not environ.get(key)]
    if "RANK" in missing and "WORLD_SIZE" in missing:
        return Place()  # MASTER_ADDR alone is often left over in a shell and describes no world
    if missing:
        given = ", ".join(f"{key}={environ[key]}" for key in needed if key not in missing)
        raise InputError(f"{given}: half a world; {' and '.join(missing)} must be set too, or none of them")
    rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise InputError(f"RANK={rank} must be at least 0 and below WORLD_SIZE={world_size}")
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(
        rank=rank,
        # By hand, on one machine, the two are the same; on several, people set LOCAL_RANK.
        local_rank=_integer(environ, "LOCAL_RANK", rank),
        world_size=world_size,
        local_world_size=_integer(environ, "LOCAL_WORLD_SIZE", world_size),
        restart=_integer(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        found="torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment variables",
        master_addr=environ.get("MASTER_ADDR", ""),
        master_port=_integer(environ, "MASTER_PORT", 0),
        hosts_store=rank == 0 and not agent,
    )


@contextmanager
def on_loopback() -> Iterator[None]:
    """Let what gloo and TensorPipe open meanwhile listen on this machine's loopback alone."""
    names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    before = {name: os.environ[name] for name in names if name in os.environ}
    os.environ.update(dict.fromkeys(names, "lo0" if sys.platform == "darwin" else "lo"))
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]
        os.environ.update(before)


def _integer(environ: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = environ.get(key)
    if not text and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise InputError(f"{key}={text} must be an integer") from None
