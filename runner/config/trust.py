"""Run directories of other users are untrusted: unless `trust=` allows it, no code that they name is executed."""

import functools
import os
import pwd
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.config.schema import GROUPS, NAMED_GROUPS, Config
from runner.errors import InputError
from runner.paths import CONF
from runner.records.custom_code import read_code, targets
from runner.records.result import RESULT
from runner.records.run_directory import CONFIG, OVERRIDES

_TARGET = re.compile(r"^\s*_target_:\s*(\S+)", re.MULTILINE)
_CHOSEN_BY_NAME = {*GROUPS, *NAMED_GROUPS, "experiment"}


def check_overrides(
    named: str,
    run: Path,
    overrides: Sequence[str],
    config_dirs: Sequence[str],
    trust: Any,
    files: Sequence[str] = (OVERRIDES,),
) -> None:
    """Raise InputError if an untrusted directory of another user names code.

    `named` is how the command names the directory, as run=DIR; `files` are those that contain the overrides.
    """
    user = other_owner(run, (*files, CONFIG))
    if user is None or _is_trusted(named, run, trust):
        return
    code = [f"--config-dir={each}" for each in config_dirs] + [each for each in overrides if _may_run_code(each)]
    if code:
        raise InputError(_refusal(named, user, files[0], code[0]))


def check_targets(run: Path, config: Config, trust: bool) -> None:
    """Raise InputError if another user's config.yaml names a class that no built-in option names."""
    user = other_owner(run, (OVERRIDES, CONFIG))
    if user is None or trust:
        return
    for target in targets(vars(config)):
        if target not in _builtin_targets():
            raise InputError(_refusal(str(run), user, CONFIG, f"_target_: {target}"))


def check_code(named: str, run: Path, trust: Any) -> None:
    """Raise InputError if an untrusted directory of another user contains a copy of custom modules."""
    code = read_code(run)
    if code is not None and (user := other_owner(run, (OVERRIDES, RESULT))) and not _is_trusted(named, run, trust):
        raise InputError(_refusal(named, user, str(code.directory), next(iter(code.modules))))


def other_owner(run: Path, files: Sequence[str]) -> str | None:
    """Return the other user who owns the directory or one of the files in it; None if this user owns all."""
    for path in (run, *(run / file for file in files)):
        try:
            uid = os.stat(path).st_uid
        except OSError:
            continue
        if uid != os.geteuid():
            try:
                return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
            except KeyError:
                return f"uid {uid}"
    return None


def check_trust(trust: Any) -> list[str]:
    """Return a message if the key has an invalid value."""
    if trust is None or isinstance(trust, bool) or (isinstance(trust, str) and trust):
        return []
    return [f"trust={trust} must be true or a directory that contains the run; leave it out to trust only your own"]


def _is_trusted(named: str, run: Path, trust: Any) -> bool:
    if not isinstance(trust, str):
        return trust is True
    if not run.resolve().is_relative_to(Path(trust).resolve()):
        raise InputError(f"trust={trust} does not contain {named}; type the directory that it is in, or trust=true")
    return True


def _refusal(named: str, user: str, file: str, code: str) -> str:
    return (
        f"{named} belongs to {user}, and its {file} names code to run, {code}; review these entries; if you trust "
        "them, add trust=true"
    )


def _may_run_code(override: str) -> bool:
    """Return True if composing the override could choose anything but a built-in option, or run a shell command."""
    key, _, value = override.lstrip("+~").partition("=")
    top = re.split(r"[./@]", key)[0]
    if any(mark in override for mark in ("_target_", "$", "\\", "..")) or top == "hydra" or "@" in key:
        return True
    if top == "launcher" and key != "launcher":
        return not re.fullmatch(r"[\w.+-]*", value)  # modules, setup and prefix are run by a job's shell
    return key in _CHOSEN_BY_NAME and ("/" in value or "{" in value)


@functools.cache
def _builtin_targets() -> frozenset[str]:
    return frozenset(target for file in CONF.rglob("*.yaml") for target in _TARGET.findall(file.read_text()))
