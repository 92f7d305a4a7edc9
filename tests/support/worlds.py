"""Run a job of the runner on several ranks from inside one test, without starting Python anew."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra import initialize_config_dir
from ranks import run_ranks

from runner import CONF
from runner.config.compose import checked, compose
from runner.config.own_folders import absolute, add_to_path, searching
from runner.config.resume import with_recorded
from runner.config.schema import Config
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.fault_tolerance.checkpoint import open_checkpoint
from runner.launchers.job import run_job
from runner.runs.run_directory import Request
from runner.runs.train_state import available
from runner.training.saved_state import SavedState

MODES = sorted(path.stem for path in (CONF / "parallel").glob("*.yaml"))
_numbers = itertools.count()


@dataclass(frozen=True)
class Run:
    """What a finished run left behind."""

    path: Path

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.path / "result.json").read_text())

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> dict[int, float]:
        return {line["step"]: line["train/loss"] for line in self.lines if "train/loss" in line}

    @property
    def saved(self) -> SavedState:
        """The newest checkpoint."""
        return open_checkpoint(available(self.path / "checkpoints")[-1])

    @property
    def state(self) -> dict[str, Any]:
        return state_of(self.saved)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.saved.model())


def state_of(saved: SavedState) -> dict[str, Any]:
    """A checkpoint as nested dicts, each tensor whole."""
    facts = {key: fact for key, fact in saved.facts.items() if key not in ("world_size", "parallel")}
    state: dict[str, Any] = {"model": dict(saved.model()), **facts}
    if average := dict(saved.average()):
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
    """The checked configuration of a command line, and its request."""
    folders = [word.removeprefix("--config-dir=") for word in overrides if word.startswith("--config-dir=")]
    words = [word for word in overrides if not word.startswith("--config-dir=")]
    typed = with_recorded(words, absolute(folders), multirun=False)
    add_to_path(typed.config_dirs)
    with searching(typed.config_dirs), initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(typed.overrides)
        config = checked(cfg, typed.overrides)
    choices = dict(cfg.hydra.runtime.choices)
    return config, Request(tuple(typed.recorded), tuple(typed.config_dirs), ("test",), typed.directory, choices)


def run(outputs: Path, world_size: int, *overrides: str, timeout_s: float = 300) -> Run:
    """Run what the overrides say on this many forked ranks; what it raises is raised here."""
    # One thread: OpenMP's workers do not survive a fork, and a later test forks from what this one leaves behind.
    words = [*overrides, "threads=1"]
    if not any(word.startswith(("outputs=", "resume=")) for word in overrides):  # a run that goes on stays where it is
        words.append(f"outputs={outputs}")
    config, request = configure(*words)
    agreement = outputs / f"store-{next(_numbers)}"  # a used one would be read as this world's
    before = _runs(Path(config.outputs) / config.name)

    def rank_of(rank: int, world_size: int) -> None:
        rank_info = RankInfo(rank, rank, world_size, world_size, found="test")
        store = dist.FileStore(str(agreement), world_size)
        world = World(rank_info, store if world_size > 1 else None, as_backend(config.backend))
        try:
            run_job(config, request, world)
        finally:
            world.ending.say_then_continue(
                lambda: None
            )  # as the entry does: a rank that fails is not gone before rank 0 has told

    outputs.mkdir(exist_ok=True)
    run_ranks(rank_of, world_size, timeout_s=timeout_s, forms_group=False)  # the job forms its own
    if request.directory:
        return Run(Path(request.directory))
    (made,) = _runs(Path(config.outputs) / config.name) - before
    return Run(made)


def _runs(folder: Path) -> set[Path]:
    return set(folder.iterdir()) if folder.exists() else set()
