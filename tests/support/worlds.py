"""Whole jobs on several forked ranks within a test."""

import copy
import functools
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hydra import initialize_config_dir
from ranks import run_ranks

from runner.checkpoints.layout import list_checkpoints
from runner.checkpoints.saved_state import SavedState, open_checkpoint
from runner.checkpoints.shard_file import SavedTensor
from runner.config.compose import checked, compose
from runner.config.custom_dirs import absolute_dirs, add_to_path, on_search_path
from runner.config.request import Request
from runner.config.resume import add_recorded
from runner.config.schema import Config
from runner.distributed.backend import Backend, as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.jobs.job import run_job
from runner.paths import CONF
from runner.records.ledger import JobRecord, read_ledger
from runner.records.run_directory import Command, Destination
from runner.training.build import Experiment, build

# Without options, mesh is fsdp; test_mesh.py has its combinations. auto is one of the others.
MODES = sorted(path.stem for path in (CONF / "parallel").glob("*.yaml") if path.stem not in ("auto", "mesh"))
DEVICE = "cpu"  # of the jobs, as --device sets it
_numbers = itertools.count()


@dataclass(frozen=True)
class Run:
    """The run directory of a finished run."""

    path: Path

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.path / "result.json").read_text())

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    def values(self, name: str) -> dict[int, float]:
        """Return the values of a metric by step."""
        return {line["step"]: line[name] for line in self.lines if name in line}

    @property
    def losses(self) -> dict[int, float]:
        return self.values("train/loss")

    @property
    def grad_norms(self) -> dict[int, float]:
        return self.values("train/grad_norm")

    @property
    def saved(self) -> SavedState:
        """Return the state of the newest checkpoint."""
        return open_checkpoint(list_checkpoints(self.path / "checkpoints")[-1])

    @property
    def state(self) -> dict[str, Any]:
        return state_of(self.saved)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return _read(self.saved.model())


def only_run(folder: Path, name: str = "run") -> Run:
    """Return the only run of this name that a command in the folder has made."""
    (path,) = (folder / "outputs" / name).iterdir()
    return Run(path)


def jobs_of(folder: Path) -> list[JobRecord]:
    """Return the jobs of the only sweep in the folder."""
    return read_ledger(only_run(folder).path)


def _read(tensors: Mapping[str, SavedTensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.read() for name, tensor in tensors.items()}


def state_of(saved: SavedState) -> dict[str, Any]:
    """Return a checkpoint as nested dicts of whole tensors."""
    facts = {key: fact for key, fact in saved.facts.items() if key not in ("world_size", "parallel")}
    state: dict[str, Any] = {"model": _read(saved.model()), **facts}
    if average := _read(saved.average()):
        state["average"] = average
    for facts, part in [
        (state.get("optimizer", {}), saved),
        *((turn["optimizer"], saved.under(f"turns.{name}")) for name, turn in state.get("turns", {}).items()),
    ]:
        for name, tensor in part.tensors.items():
            if name.startswith("optimizer."):
                parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
                facts["state"].setdefault(parameter, {})[key] = tensor.read()
    return state


def configure(*overrides: str) -> tuple[Config, Request]:
    """Return the checked configuration of a command line and its request."""
    directories = [each.removeprefix("--config-dir=") for each in overrides if each.startswith("--config-dir=")]
    others = [each for each in overrides if not each.startswith("--config-dir=")]
    typed = add_recorded(others, absolute_dirs(directories), multirun=False)
    add_to_path(typed.config_dirs)
    with on_search_path(typed.config_dirs), initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(typed.overrides)
        config = checked(cfg, typed.overrides)
    choices = dict(cfg.hydra.runtime.choices)
    command = Command(tuple(typed.recorded), tuple(typed.config_dirs), ("test",), choices)
    return config, Request(config, command, Destination(typed.directory))


_configure_once = functools.cache(configure)


def unconnected(rank: int = 0, world_size: int = 1) -> World:
    """Return the world of one rank, without a store."""
    return World(RankInfo(rank, rank, world_size, world_size), None, Backend())


def build_experiment(*overrides: str, rank: int = 0, world_size: int = 1) -> Experiment:
    """Build the model and data of a command line, as one rank does."""
    config, request = configure(*overrides)
    return build(config, request.command.choices, unconnected(rank, world_size))


def run(outputs: Path, world_size: int, *overrides: str, timeout_s: float = 300) -> Run:
    """Run a job on forked ranks. Raise what a rank raises.

    Composing takes longer than many of the jobs. So each set of overrides is composed only once, without `outputs=`,
    unless it depends on an earlier run.
    """
    # One thread: the workers of OpenMP do not survive a fork, and later tests fork from this process.
    arguments = [*overrides, "threads=1"]
    if any(each.startswith(("outputs=", "resume=", "run=", "fork=")) for each in overrides):
        if not any(each.startswith(("outputs=", "resume=")) for each in overrides):
            arguments.append(f"outputs={outputs}")
        config, request = configure(*arguments)
    else:
        config, request = copy.deepcopy(_configure_once(*arguments))
        add_to_path(request.command.config_dirs)  # the previous test may have restored sys.path
        config = replace(config, outputs=str(outputs))
        overrides = (*request.command.overrides, f"outputs={outputs}")
        request = replace(request, config=config, command=replace(request.command, overrides=overrides))
    before = _runs(Path(config.local_outputs) / config.name)
    outputs.mkdir(exist_ok=True)
    run_world(request, world_size, outputs, timeout_s)
    if request.destination.directory:
        return Run(Path(request.destination.directory))
    (created,) = _runs(Path(config.local_outputs) / config.name) - before
    return Run(created)


def run_world(request: Request, world_size: int, folder: Path, timeout_s: float = 300) -> None:
    """Run a job on forked ranks, whose store is a new file in the folder. Raise what a rank raises."""
    store_path = folder / f"store-{next(_numbers)}"  # a used file would be read as this world's
    if DEVICE == "cuda":
        request = replace(request, config=on_gpu(request, world_size))

    def run_rank(rank: int, world_size: int) -> None:
        torch.backends.cudnn.deterministic = DEVICE == "cuda"  # in this process
        rank_info = RankInfo(rank, rank, world_size, world_size, source="test")
        store = dist.FileStore(str(store_path), world_size)
        world = World(rank_info, store if world_size > 1 else None, as_backend(request.config.backend))
        try:
            run_job(request, world)
        finally:  # as the command does: a failed rank exits after rank 0 has reported the failure
            world.shutdown.report_before_exit(lambda: None)

    run_ranks(run_rank, world_size, timeout_s=timeout_s, forms_group=False)  # the job forms its own group


def on_gpu(request: Request, world_size: int) -> Config:
    """Return the configuration for GPUs, which the ranks share by gloo. Skip the test if that cannot work."""
    backend, parallel = dict(request.config.backend), request.config.parallel
    if (needed := backend["devices_per_rank"]) > torch.cuda.device_count():
        pytest.skip(f"needs {needed} GPUs")
    if world_size > 1 and (request.command.choices["parallel"] == "pipeline" or parallel.get("stage", 1) != 1):
        pytest.skip("gloo does not send tensors of a GPU from one stage to the next")
    backend |= {"device": "cuda", "name": "gloo" if world_size > 1 else backend["name"].replace("gloo", "auto")}
    return replace(request.config, backend=backend)


def _runs(folder: Path) -> set[Path]:
    return set(folder.iterdir()) if folder.exists() else set()
