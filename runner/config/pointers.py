"""The directory that resume=, fork= or run= names: how it is found, and how it is written as an override."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from runner.checkpoints.layout import LAST, find_checkpoint
from runner.config.diagnostics.keys import key_of
from runner.errors import InputError
from runner.records.finding import check_is_record, newest_record, newest_training_run
from runner.records.ledger import LEDGER, is_sweep
from runner.records.run_directory import CHECKPOINTS
from runner.records.settings import OVERRIDES

ANY_NAME = "*"  # resume=last name=* resumes the newest run of all names


# The functions that find the directory of run=last, resume=last or fork=last, by what the command reads.
_NEWEST: dict[str, Callable[[list[Path]], Path | None]] = {
    "run": newest_training_run,
    "sweep": partial(newest_record, files=(LEDGER,)),
    "sweep or run": newest_record,
}


def find_directory(key: str, values: Mapping[str, Any], kind: str = "run") -> Path:
    """Return the directory that the key names; `kind` is a key of `_NEWEST`."""
    value, file = str(values[key]), LEDGER if kind == "sweep" else OVERRIDES
    if value == LAST:
        outputs, name = Path(str(values.get("outputs", "outputs"))).absolute(), str(values.get("name", "run"))
        parents = [path for path in outputs.glob("*") if path.is_dir()] if name == ANY_NAME else [outputs / name]
        if (path := _NEWEST[kind](parents)) is None:
            raise InputError(f"{key}=last: there is no {kind} under {outputs / name}; set name=, outputs= or {key}=DIR")
        return path
    path = Path(value).absolute()
    if kind == "sweep or run":
        check_is_record(path, key)
        return path
    if is_sweep(path) and kind == "run":
        raise InputError(f"{key}={value} is a sweep; {'add -m' if key == 'resume' else 'name a job'}")
    if not (path / file).is_file():
        what = f"no {kind} directory (it has no {file})" if path.is_dir() else "no directory"
        raise InputError(f"{key}={value} is {what}; name one under outputs/, or {key}=last")
    return path


def named_directory(run_id: str | None, name: str, outputs: str) -> Path | None:
    """Return the directory of the run or sweep that `run_id` names, which need not exist; None without `run_id`."""
    return Path(outputs).absolute() / name / run_id if run_id else None


def check_location(path: Path, values: Mapping[str, Any]) -> None:
    """Raise InputError for a run_id=, name= or outputs= that is not the location of the resumed directory."""
    parent = path.parent.parent if is_sweep(path.parent) else path.parent
    rule = f"has no effect on resume={values['resume']}, which stays in its directory; leave it out"
    if str(values.get("run_id", path.name)) != path.name:
        raise InputError(f"run_id={values['run_id']} {rule}")
    if str(values.get("name", parent.name)) != parent.name:
        raise InputError(f"name={values['name']} {rule}")
    if Path(str(values.get("outputs", parent.parent))).resolve() != parent.parent.resolve():
        raise InputError(f"outputs={values['outputs']} {rule}")


def pin_checkpoint(overrides: list[str], run: Path, name: str) -> list[str]:
    """Return the overrides with checkpoint.load=step_N, because `name` may refer to another checkpoint later."""
    try:
        name = find_checkpoint(run / CHECKPOINTS, name).name
    except ValueError:
        return overrides  # check_resumable reports it
    return [*(each for each in overrides if key_of(each) != "checkpoint.load"), f"checkpoint.load={name}"]


def pointer_to(path: Path, key: str) -> str:
    """Return the override by which `key` names the path. Raise InputError if the path cannot be part of an override."""
    if "${" in str(path):
        raise InputError(f"{key}={path}: the path must not contain ${{, which is interpolated; use a link to it")
    return f"{key}={quote(str(path))}"


def quote(value: str) -> str:
    return QuotedString(value, Quote.single).with_quotes()
