"""What all dashboards outside of the run directory need: the run's own facts, its ids there, and the package."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runner.errors import InputError
from runner.runs.ledger import is_sweep
from runner.runs.run_directory import CONFIG, read_result, write_whole
from runner.runs.shapes import read_mapping
from runner.runs.strict_json import dumps

IDS = "loggers.json"


def require(option: str, package: str) -> None:
    """Raises InputError where the package of the extra of that name is not installed; it is not imported yet."""
    if find_spec(package) is None:
        raise InputError(f"logger={option} needs {package}; pip install 'experiment-runner[{option}]'")


@dataclass(frozen=True)
class RunFacts:
    """What a run has recorded of itself when it starts."""

    name: str  # of its directory
    experiment: str  # the configuration's name
    sweep: str | None  # the name of the sweep's directory
    outputs: Path  # the folder of all runs
    config: dict[str, Any]
    result: dict[str, Any]  # as in result.json; its state is still running

    @property
    def choices(self) -> dict[str, str]:
        """The options that a configuration does not name."""
        return {key: self.result[key] for key in ("model", "data", "parallel", "world_size") if key in self.result}


def read_facts(directory: Path) -> RunFacts:
    """Of the directory of a run that has just been recorded."""
    config = read_mapping(directory / CONFIG)
    named = next((folder for folder in directory.parents if folder.name == config["name"]), directory.parent)
    return RunFacts(
        name=directory.name,
        experiment=config["name"],
        sweep=directory.parent.name if is_sweep(directory.parent) else None,
        outputs=named.parent,
        config=config,
        result=read_result(directory) or {},
    )


def read_ids(directory: Path, option: str) -> dict[str, str]:
    """The ids that the run has with a logger, by the place where that keeps runs."""
    return _read(directory).get(option, {})


def keep_id(directory: Path, option: str, place: str, run_id: str) -> None:
    """Whatever goes on with the run finds it there again: a restart, a requeue, resume=."""
    ids = _read(directory)
    ids.setdefault(option, {})[place] = run_id
    write_whole(directory / IDS, dumps(ids, indent=1) + "\n")


def _read(directory: Path) -> dict[str, dict[str, str]]:
    path = directory / IDS
    return read_mapping(path) if path.exists() else {}


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those that are numbers."""
    return {name: value for name, value in metrics.items() if value == value and abs(value) != float("inf")}
