"""The directory that resume=, fork= or run= names: how it is found, and how it is written as an override."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from runner.checkpoints.layout import BEST, LAST, find_checkpoint
from runner.checkpoints.pull import pull
from runner.config.diagnostics.keys import key_of
from runner.errors import InputError
from runner.records.finding import check_is_record, newest_record, newest_training_run
from runner.records.ledger import LEDGER, is_sweep
from runner.records.run_directory import CHECKPOINTS
from runner.records.settings import OVERRIDES
from runner.remote.address import Address, is_remote, local_outputs

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
    if is_remote(value):
        return _local_copy(value, key, values, kind)
    if value == LAST and is_remote(outputs := str(values.get("outputs", "outputs"))):
        path = _find_newest(key, values, kind)
        address = Address.parse(outputs) / path.relative_to(_local_outputs(values)).as_posix()
        return _local_copy(str(address), key, values, kind, is_optional=True)  # it may not be uploaded yet
    if value == LAST:
        return _find_newest(key, values, kind)
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


def _find_newest(key: str, values: Mapping[str, Any], kind: str) -> Path:
    """Return the newest directory of the name in `values`, without its checkpoints if `outputs` is an address."""
    outputs, name = str(values.get("outputs", "outputs")), str(values.get("name", "run"))
    directory = _local_outputs(values)
    shown = str(directory / name)
    if is_remote(outputs):
        shown = str(Address.parse(outputs) / ("" if name == ANY_NAME else name))
        _pull(shown, "outputs", values, None, is_optional=True)
    parents = [path for path in directory.glob("*") if path.is_dir()] if name == ANY_NAME else [directory / name]
    if (path := _NEWEST[kind](parents)) is None:
        raise InputError(f"{key}=last: there is no {kind} under {shown}; set name=, outputs= or {key}=DIR")
    return path


def _local_copy(value: str, key: str, values: Mapping[str, Any], kind: str, is_optional: bool = False) -> Path:
    """Return the local copy of the run or sweep at an address, with the checkpoints that the command needs."""
    named = values.get("checkpoint.load")
    checkpoints = None if kind == "sweep or run" else (LAST, BEST, *([str(named)] if named else []))
    path = _pull(value, key, values, checkpoints, is_optional)
    if not (is_sweep(path) or (path / OVERRIDES).is_file()):
        raise InputError(f"{key}={value} is no run directory (it has no {OVERRIDES}); name one below it, or {key}=last")
    if is_sweep(path) and kind == "run":
        raise InputError(f"{key}={value} is a sweep; {'add -m' if key == 'resume' else 'name a job'}")
    if kind == "sweep" and not is_sweep(path):
        raise InputError(f"{key}={value} is no sweep directory (it has no {LEDGER})")
    return path


def pull_named(cfg: DictConfig) -> None:
    """Download the run or sweep that `run_id` names if `outputs` is an address, and if it exists there."""
    if cfg.get("run_id") and not cfg.get("resume") and is_remote(cfg.outputs):
        remote: Any = OmegaConf.to_container(cfg.remote, resolve=True) if OmegaConf.is_dict(cfg.remote) else {}
        address = Address.parse(str(cfg.outputs)) / str(cfg.name) / str(cfg.run_id)
        _pull(str(address), "outputs", {f"remote.{key}": value for key, value in remote.items()}, is_optional=True)


def _pull(
    address: str,
    key: str,
    values: Mapping[str, Any],
    checkpoints: Sequence[str] | None = (LAST, BEST),
    is_optional: bool = False,
) -> Path:
    """Call `pull` with the options of the object store and the `remote.local_dir` among these values."""
    given, prefix = values.get("remote.options"), "remote.options."
    options = {str(name): value for name, value in given.items()} if isinstance(given, dict) else {}
    options |= {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    return pull(address, key, checkpoints, options, _local_dir(values), is_optional=is_optional)


def _local_dir(values: Mapping[str, Any]) -> str | None:
    found = values.get("remote.local_dir")
    return None if found is None else str(found)


def _local_outputs(values: Mapping[str, Any]) -> Path:
    return local_outputs(str(values.get("outputs", "outputs")), _local_dir(values))


def remote_overrides(path: Path, values: Mapping[str, Any]) -> list[str]:
    """Return the overrides by which a resumed run is mirrored to the address from which it was copied; else none."""
    value, outputs, local_dir = str(values["resume"]), str(values.get("outputs", "")), _local_dir(values)
    if is_remote(value):
        address = Address.parse(value, "resume")
        kept = address.path.split("/")[: -3 if is_sweep(path.parent) else -2]
        outputs = str(Address(address.scheme, address.bucket, "/".join(kept)))
    if not is_remote(outputs):
        return []
    return [f"outputs={quote(outputs)}", f"remote.local_dir={quote(local_dir) if local_dir else 'null'}"]


def with_addresses(message: str, overrides: Iterable[str]) -> str:
    """Return the message with the addresses of the overrides instead of the directories of their copies."""
    values = {key: value.strip("'\"") for key, _, value in (override.partition("=") for override in overrides)}
    for value in filter(is_remote, values.values()):
        copy = Address.parse(value).local_directory(_local_dir(values))
        message = message.replace(str(copy), value)
    return message


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
    outputs = _local_outputs(values) if "outputs" in values else parent.parent
    if outputs.resolve() != parent.parent.resolve():
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
