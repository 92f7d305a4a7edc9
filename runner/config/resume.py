"""`resume=` and `run=`: what an earlier run or sweep recorded, with what is typed now on top."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from runner.config.diagnostics.import_target import locate
from runner.config.schema import Config
from runner.errors import InputError
from runner.runs.ledger import LEDGER, is_sweep, read_sweep
from runner.runs.records import last_of
from runner.runs.run_directory import CHECKPOINTS, OVERRIDES, read_result
from runner.runs.train_state import available, read_train_state

READ_ALONE = ("report",)  # tasks that read directories as they are: nothing recorded there is composed


@dataclass(frozen=True)
class Typed:
    """What to compose, and what a new run records of it."""

    overrides: list[str]
    recorded: list[str]
    config_dir: str | None
    directory: str | None = None
    words: list[str] = field(default_factory=list)  # as Request.words


def with_recorded(overrides: list[str], config_dir: str | None, multirun: bool) -> Typed:
    """Put what the named run recorded before what is typed. Raises InputError where there is no such run."""
    try:
        typed = OverridesParser.create().parse_overrides(overrides)
    except HydraException:
        return Typed(overrides, overrides, config_dir)  # composing will say what is wrong with the grammar
    named = {o.key_or_group: o for o in typed if o.key_or_group in ("run", "resume") and o.value() is not None}
    if multirun and "resume" in named:
        return _with_recorded_sweep(named["resume"], typed, config_dir)
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
    if _task(typed) == "rerun" and key == "run":
        return _rerun(words, path, _absolute(config_dir) or next(iter(folders), None))
    return _with_search_path(
        Typed(
            overrides=[*words, pointing],
            recorded=words if key == "resume" else [*words, pointing],
            config_dir=_absolute(config_dir) or next(iter(folders), None),
            directory=str(path) if key == "resume" else None,
        )
    )


def _rerun(words: list[str], path: Path, config_dir: str | None) -> Typed:
    """What makes the run again; what the new one records of it is a training run as the old one was."""
    trained = [word for word in words if word.partition("=")[0] != "task"]
    threads = (read_result(path) or {}).get("machine", {}).get("threads")
    if threads and not any(word.partition("=")[0] == "threads" for word in words):
        trained.append(f"threads={threads}")  # which the environment may give otherwise now
    words = [*trained, "task=rerun", f"run='{path}'"]
    return _with_search_path(Typed(words, trained, config_dir, words=words))


def check_resumable(config: Config) -> list[str]:
    """Why the configuration cannot continue the run that it names, a message each."""
    key, path = ("resume", config.resume) if config.resume else ("run", config.run)
    if not path or (key == "run" and not locate(config.task["_target_"]).reads_checkpoint):
        return []
    checkpoints = available(Path(path) / CHECKPOINTS)
    if not checkpoints:
        return [f"{key}={path} holds no checkpoint yet; train it first, without {key}="]
    if key == "run":
        return []
    stopped = read_train_state(checkpoints[-1])
    if stopped.step_in_epoch and stopped.batch_size != config.batch_size:
        return [
            f"batch_size={config.batch_size} cannot change in the middle of an epoch: the run stopped "
            f"{stopped.step_in_epoch} steps into one with batch_size={stopped.batch_size}; keep that"
        ]
    return []


def put_on_top(recorded: list[str], typed: list[str]) -> list[str]:
    """The recorded words that the typed ones leave standing, and then those."""
    parser = OverridesParser.create()
    kept = _without(parser.parse_overrides(recorded), parser.parse_overrides(typed))
    return [*(str(o.input_line) for o in kept), *typed]


def _with_recorded_sweep(resume: Override, typed: list[Override], config_dir: str | None) -> Typed:
    if resume.is_sweep_override():
        raise InputError(f"{resume.input_line}: one sweep at a time; type one directory, or resume=last")
    path = _find_sweep(str(resume.value()), typed)
    try:
        recorded = read_sweep(path)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{resume.input_line}: its {LEDGER} cannot be read ({error}); start a new sweep") from None
    own = [o for o in typed if o is not resume]
    words = put_on_top(recorded.typed, [str(o.input_line) for o in own])
    # What is typed on top adds jobs this once; how jobs are run and chosen is remembered.
    kept = put_on_top(recorded.typed, [str(o.input_line) for o in own if o.is_hydra_override()])
    return _with_search_path(Typed(words, kept, _absolute(config_dir) or recorded.config_dir, str(path)))


def _find_sweep(value: str, typed: list[Override]) -> Path:
    if value != "last":
        path = Path(value).absolute()
        if not is_sweep(path):
            what = f"no sweep (it has no {LEDGER})" if path.is_dir() else "no directory"
            fix = f"without -m, resume={value} resumes that run" if (path / OVERRIDES).is_file() else ""
            raise InputError(f"resume={value} is {what}; {fix or 'name a sweep-* under outputs/, or resume=last'}")
        return path
    folder = _runs_folder(typed)
    sweeps = [path.parent for path in folder.glob(f"sweep-*/{LEDGER}")]
    if not sweeps:
        raise InputError(f"resume=last: there is no sweep under {folder}; set name= or outputs=, or name the directory")
    return max(sweeps, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


def _without(recorded: list[Override], typed: list[Override]) -> list[Override]:
    """The recorded overrides that the typed ones leave standing: another option of a group drops the group's own."""
    replaced = tuple(f"{o.key_or_group}.".replace("/", ".") for o in typed)
    return [
        o
        for o in recorded
        if o.key_or_group not in ("run", "resume") and not f"{o.key_or_group}.".replace("/", ".").startswith(replaced)
    ]


def _find(key: str, value: str, typed: list[Override]) -> Path:
    if value != "last":
        path = Path(value).absolute()
        if not (path / OVERRIDES).is_file():
            if is_sweep(path):
                raise InputError(
                    f"{key}={value} is a sweep; " + ("type -m with it" if key == "resume" else "name a job")
                )
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
    return replace(typed, overrides=[*typed.overrides, search])
