"""`resume=` and `run=`: what an earlier run or sweep recorded, with what is typed now on top."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from runner.config.own_folders import absolute
from runner.config.recorded import read_overrides
from runner.config.renamed_targets import rename_keys
from runner.config.shorthands import expand
from runner.config.strangers import check_words
from runner.errors import InputError
from runner.runs.ledger import LEDGER, is_sweep, read_ledger, read_sweep
from runner.runs.records import last_of, last_trained
from runner.runs.run_directory import OVERRIDES, read_result

READ_ALONE = ("report",)  # tasks that read directories as they are: nothing recorded there is composed
OF_TRAINING = ("profile", "debug")  # how a run was watched, which is refused where nothing is trained
ONCE = ("resume_force", "trust")  # typed for one command, and not what a run is made of: none records it


@dataclass(frozen=True)
class Typed:
    """What to compose, and what a new run records of it."""

    overrides: list[str]
    recorded: list[str]
    config_dirs: list[str]  # as typed, and absolute
    directory: str | None = None
    words: list[str] = field(default_factory=list)  # as Request.words


def with_recorded(overrides: list[str], config_dirs: Sequence[str], multirun: bool) -> Typed:
    """Put what the named run recorded before what is typed. Raises InputError where there is no such run.

    config_dirs: the typed ones; those that the run recorded come before them.
    """
    overrides, config_dirs = expand(overrides), list(config_dirs)
    try:
        typed = OverridesParser.create().parse_overrides(overrides)
    except HydraException:
        return Typed(overrides, overrides, config_dirs)  # composing will say what is wrong with the grammar
    named = {o.key_or_group: o for o in typed if o.key_or_group in ("run", "resume") and o.value() is not None}
    if multirun and "resume" in named:
        return _with_recorded_sweep(named["resume"], typed, config_dirs)
    if multirun and "run" in named and _task(typed) not in READ_ALONE:
        return Typed(overrides, overrides, _of_each(named["run"], typed, config_dirs))
    if not named or multirun:
        return Typed(overrides, overrides, config_dirs)
    key, override = next(iter(named.items()))
    if _task(typed) in READ_ALONE and key == "run":
        if override.value() != "last":
            return Typed(overrides, overrides, config_dirs)
        path = last_of(folder := _runs_folder(typed))
        if path is None:
            raise InputError(f"run=last: there is no sweep or run under {folder}; set name= or outputs=, or name it")
        words = [*(str(o.input_line) for o in typed if o is not override), f"run='{path}'"]
        return Typed(words, words, config_dirs)
    path = _find(key, str(override.value()), typed)
    anew = [o for o in typed if o.key_or_group.partition(".")[0] == "init_from"]
    if anew and _task(typed) != "rerun":
        raise InputError(
            f"{anew[0].input_line} has no effect on {key}={override.value()}, whose own weights are taken; leave it "
            f"out, or start anew without {key}="
        )
    if key == "resume":
        _check_place(path, typed)
    recorded, folders = read_overrides(path, f"{key}={override.value()}", _trust(typed))
    folders = _on_top(f"{key}={override.value()}", folders, config_dirs)
    own = [o for o in typed if o is not override]
    kept = _without(OverridesParser.create().parse_overrides(recorded), own)
    if key == "run" and _task(typed) != "rerun":
        kept = [o for o in kept if o.key_or_group not in OF_TRAINING]
    words = [str(o.input_line) for o in (*kept, *own)]
    pointing = f"{key}='{path}'"
    if _task(typed) == "rerun" and key == "run":
        return _rerun(words, path, folders)
    lasting = [word for word in words if word.partition("=")[0] not in ONCE]
    return Typed(
        overrides=[*words, pointing],
        recorded=lasting if key == "resume" else [*lasting, pointing],
        config_dirs=folders,
        directory=str(path) if key == "resume" else None,
        words=[*words, pointing] if key == "run" and lasting != words else [],
    )


def _rerun(words: list[str], path: Path, config_dirs: list[str]) -> Typed:
    """What makes the run again; what the new one records of it is a training run as the old one was."""
    trained = [word for word in words if word.partition("=")[0] != "task"]
    threads = (read_result(path) or {}).get("machine", {}).get("threads")
    if threads and not any(word.partition("=")[0] == "threads" for word in words):
        trained.append(f"threads={threads}")  # which the environment may give otherwise now
    words = [*trained, "task=rerun", f"run='{path}'"]
    return Typed(words, [word for word in trained if word.partition("=")[0] not in ONCE], config_dirs, words=words)


def put_on_top(recorded: list[str], typed: list[str]) -> list[str]:
    """The recorded words that the typed ones leave standing, and then those."""
    parser = OverridesParser.create()
    kept = _without(parser.parse_overrides(recorded), parser.parse_overrides(typed))
    return [*(str(o.input_line) for o in kept), *typed]


def _with_recorded_sweep(resume: Override, typed: list[Override], config_dirs: list[str]) -> Typed:
    if resume.is_sweep_override():
        raise InputError(f"{resume.input_line}: one sweep at a time; type one directory, or resume=last")
    path = _find_sweep(str(resume.value()), typed)
    _check_place(path, typed)
    try:
        recorded, jobs = read_sweep(path), read_ledger(path)
    except OSError as error:
        raise InputError(f"{resume.input_line}: its {LEDGER} cannot be read ({error}); start a new sweep") from None
    words = [*recorded.typed, *(word for job in jobs for word in job.overrides)]
    check_words(f"resume={resume.value()}", path, words, recorded.config_dirs, _trust(typed), (LEDGER,))
    own = [o for o in typed if o is not resume]
    before = rename_keys(recorded.typed)
    words = put_on_top(before, [str(o.input_line) for o in own])
    # What is typed on top adds jobs this once; how jobs are run and chosen is remembered.
    kept = put_on_top(before, [str(o.input_line) for o in own if o.is_hydra_override()])
    return Typed(words, kept, _on_top(resume.input_line or "", recorded.config_dirs, config_dirs), str(path))


def _of_each(run: Override, typed: list[Override], config_dirs: list[str]) -> list[str]:
    """The folders of the runs that the jobs of a sweep read, one each: all jobs share one search path."""
    values = list(run.sweep_string_iterator()) if run.is_discrete_sweep() else [str(run.value())]
    folders: dict[str, list[str]] = {}
    for value in (value.strip("'\"") for value in values):
        own = read_overrides(_find("run", value, typed), f"run={value}", _trust(typed))[1]
        folders[value] = _on_top(f"run={value}", own, config_dirs)
    (one, expected), *others = folders.items()
    for other, found in others:
        if found != expected:
            raise InputError(
                f"run={one} was made with {_shown(expected)} and run={other} with {_shown(found)}, which one sweep "
                "cannot tell apart; type a command for each"
            )
    return expected


def _shown(folders: Sequence[str]) -> str:
    return " ".join(f"--config-dir={folder}" for folder in folders) or "no --config-dir"


def _on_top(typed: str, recorded: Sequence[str], config_dirs: Sequence[str]) -> list[str]:
    """The folders that a run recorded, then those that are typed now, which may stand for some that have moved.

    Raises InputError, which begins with what names the run, where one is not there and nothing is typed.
    """
    there = [folder for folder in recorded if Path(folder).is_dir()]
    if len(there) < len(recorded) and not config_dirs:
        gone = next(folder for folder in recorded if folder not in there)
        raise InputError(
            f"{typed}: its --config-dir={gone} is not there any more; type --config-dir=DIR with where it is now"
        )
    return absolute([*there, *config_dirs])


def _trust(typed: list[Override]) -> Any:
    """As typed; None where nothing is."""
    return next((o.value() for o in typed if o.key_or_group == "trust"), None)


def _check_place(path: Path, typed: list[Override]) -> None:
    """Raises InputError for a name= or outputs= that does not lead to what is resumed, and so has no effect."""
    named = {o.key_or_group: str(o.value()).strip("'\"") for o in typed}
    name, outputs = named.get("name"), named.get("outputs")
    folder = path.parent.parent if is_sweep(path.parent) else path.parent
    where = f"has no effect on resume={named['resume']}, which stays where it is; leave it out"
    if name is not None and folder.name != name:
        raise InputError(f"name={name} {where}")
    if outputs is not None and folder.parent.resolve() != Path(outputs).resolve():
        raise InputError(f"outputs={outputs} {where}")


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
    newest = last_trained(folder)
    if newest is None:
        raise InputError(f"{key}=last: there is no run under {folder}; set name= or outputs=, or name the directory")
    return newest


def _runs_folder(typed: list[Override]) -> Path:
    """Where the runs of the typed name are."""
    named = {o.key_or_group: str(o.value()) for o in typed}
    return Path(named.get("outputs", "outputs")).absolute() / named.get("name", "run")


def _task(typed: list[Override]) -> str:
    return next((str(o.value()) for o in typed if o.key_or_group == "task"), "train")
