"""`resume=` and `run=`: what an earlier run recorded, with what is typed now on top."""

from dataclasses import dataclass
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from runner.config import Config, InputError
from runner.explain.locate import locate
from runner.progress import available, read_progress
from runner.report.records import last_of
from runner.run_dir import CHECKPOINTS, OVERRIDES, read_result

READ_ALONE = ("report",)  # tasks that read directories as they are: nothing recorded there is composed


@dataclass(frozen=True)
class Typed:
    """What to compose, and what a new run records of it."""

    overrides: list[str]
    recorded: list[str]
    config_dir: str | None
    directory: str | None = None


def go_on(overrides: list[str], config_dir: str | None, multirun: bool) -> Typed:
    """Put what the named run recorded before what is typed. Raises InputError where there is no such run."""
    try:
        typed = OverridesParser.create().parse_overrides(overrides)
    except HydraException:
        return Typed(overrides, overrides, config_dir)  # composing will say what is wrong with the grammar
    named = {o.key_or_group: o for o in typed if o.key_or_group in ("run", "resume") and o.value() is not None}
    if not named or multirun:
        return _with_search_path(Typed(overrides, overrides, _absolute(config_dir)))
    key, override = next(iter(named.items()))
    if _task(typed) in READ_ALONE and key == "run":
        if override.value() != "last":
            return _with_search_path(Typed(overrides, overrides, _absolute(config_dir)))
        path = last_of(folder := _runs_folder(typed))
        if path is None:
            raise InputError(f"run=last: there is no sweep or run under {folder}; set name= or outputs=, or name it")
        words = [*(str(o.input_line) for o in typed if o is not override), f"run='{path}'"]
        return _with_search_path(Typed(words, words, _absolute(config_dir)))
    path = _find(key, str(override.value()), typed)
    recorded = yaml.safe_load((path / OVERRIDES).read_text()) or []
    folders = [word.removeprefix("--config-dir=") for word in recorded if word.startswith("--config-dir=")]
    own = [o for o in typed if o is not override]
    kept = _without(OverridesParser.create().parse_overrides([w for w in recorded if w[:2] != "--"]), own)
    words = [str(o.input_line) for o in (*kept, *own)]
    pointing = f"{key}='{path}'"
    return _with_search_path(
        Typed(
            overrides=[*words, pointing],
            recorded=words if key == "resume" else [*words, pointing],
            config_dir=_absolute(config_dir) or next(iter(folders), None),
            directory=str(path) if key == "resume" else None,
        )
    )


def check_going_on(config: Config) -> list[str]:
    """What keeps the configuration from going on where the run it names stands."""
    key, path = ("resume", config.resume) if config.resume else ("run", config.run)
    if not path or (key == "run" and not locate(config.task["_target_"]).reads_checkpoint):
        return []
    checkpoints = available(Path(path) / CHECKPOINTS)
    if not checkpoints:
        return [f"{key}={path} holds no checkpoint yet; train it first, without {key}="]
    if key == "run":
        return []
    progress = read_progress(checkpoints[-1])
    if progress.step_in_epoch and progress.batch_size != config.batch_size:
        return [
            f"batch_size={config.batch_size} cannot change in the middle of an epoch: the run stopped "
            f"{progress.step_in_epoch} steps into one with batch_size={progress.batch_size}; keep that"
        ]
    return []


def _without(recorded: list[Override], typed: list[Override]) -> list[Override]:
    """The recorded overrides that the typed ones leave standing: another option of a group drops the group's own."""
    replaced = {o.key_or_group for o in typed}
    return [
        o
        for o in recorded
        if o.key_or_group not in replaced | {"run", "resume"} and o.key_or_group.split(".")[0] not in replaced
    ]


def _find(key: str, value: str, typed: list[Override]) -> Path:
    if value != "last":
        path = Path(value).absolute()
        if not (path / OVERRIDES).is_file():
            what = "no run directory (it has no overrides.yaml)" if path.is_dir() else "no directory"
            raise InputError(f"{key}={value} is {what}; name one under outputs/, or {key}=last")
        return path
    folder = _runs_folder(typed)
    runs = [path.parent for path in folder.glob(f"*/{OVERRIDES}")]
    trained = [(path.stat().st_ctime, path) for path in runs if (read_result(path) or {}).get("task") == "train"]
    if not trained:
        raise InputError(f"{key}=last: there is no run under {folder}; set name= or outputs=, or name the directory")
    return max(trained)[1]


def _runs_folder(typed: list[Override]) -> Path:
    """Where the runs of the typed name are."""
    named = {o.key_or_group: str(o.value()) for o in typed}
    return Path(named.get("outputs", "outputs")).absolute() / named.get("name", "run")


def _task(typed: list[Override]) -> str:
    return next((str(o.value()) for o in typed if o.key_or_group == "task"), "train")


def _absolute(folder: str | None) -> str | None:
    return str(Path(folder).absolute()) if folder else None


def _with_search_path(typed: Typed) -> Typed:
    if typed.config_dir is None:
        return typed
    search = f"hydra.searchpath=['file://{typed.config_dir}']"
    return Typed([*typed.overrides, search], typed.recorded, typed.config_dir, typed.directory)
