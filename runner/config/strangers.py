"""Run directories of other users: what they record is data, and names no code that is run without `trust=`."""

import functools
import os
import pwd
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner import CONF
from runner.config.renamed_targets import rename_targets
from runner.config.schema import GROUPS, NAMED_GROUPS, Config
from runner.errors import InputError
from runner.runs.run_directory import CONFIG, OVERRIDES

_TARGET = re.compile(r"^\s*_target_:\s*(\S+)", re.MULTILINE)
_CHOSEN_BY_NAME = {*GROUPS, *NAMED_GROUPS, "experiment"}


def check_words(
    typed: str, run: Path, words: Sequence[str], folders: Sequence[str], trust: Any, files: Sequence[str] = (OVERRIDES,)
) -> None:
    """Raises InputError, which begins with what was typed, where another user's run directory names code.

    trust: what was typed for the key, None where nothing was. files: those that the words are of.
    """
    stranger = owner(run, (*files, CONFIG))
    if stranger is None or _is_trusted(typed, run, trust):
        return
    named = [f"--config-dir={folder}" for folder in folders] + [word for word in words if _may_run_code(word)]
    if named:
        raise InputError(_refusal(typed, stranger, files[0], named[0]))


def check_targets(run: Path, config: Config, trust: bool) -> None:
    """Raises InputError where another user's config.yaml names a class that no option of the runner has."""
    stranger = owner(run, (OVERRIDES, CONFIG))
    if stranger is None or trust:
        return
    for target in _targets(vars(config)):
        if target not in _shipped():
            raise InputError(_refusal(str(run), stranger, CONFIG, f"_target_: {target}"))


def owner(run: Path, files: Sequence[str]) -> str | None:
    """Who else owns the directory, or one of those files in it; None where all is one's own."""
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
    """Why the value is none for the key, one message."""
    if trust is None or isinstance(trust, bool) or (isinstance(trust, str) and trust):
        return []
    return [f"trust={trust} must be true, or the directory that holds the run; leave it out to trust none but your own"]


def _is_trusted(typed: str, run: Path, trust: Any) -> bool:
    if not isinstance(trust, str):
        return trust is True
    if not run.resolve().is_relative_to(Path(trust).resolve()):
        raise InputError(f"trust={trust} does not hold {typed}; type the directory that it is in, or trust=true")
    return True


def _refusal(typed: str, stranger: str, file: str, named: str) -> str:
    return (
        f"{typed} is of {stranger}, and its {file} names code to run, {named}; look at that, then add trust=true, or "
        "leave it alone"
    )


def _may_run_code(word: str) -> bool:
    """Whether composing it could choose anything but the runner's own options, or run a command in a shell."""
    key, _, value = word.lstrip("+~").partition("=")
    top = re.split(r"[./@]", key)[0]
    if "_target_" in word or "$" in word or "\\" in word or ".." in word or top == "hydra" or "@" in key:
        return True
    if top == "launcher" and key != "launcher":
        return not re.fullmatch(r"[\w.+-]*", value)  # modules, setup, prefix: what a job's shell does
    return key in _CHOSEN_BY_NAME and ("/" in value or "{" in value)


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if str(key).endswith("_target_"):
                yield str(value)
            else:
                yield from _targets(value)
    elif isinstance(node, (list, tuple)):
        for item in node:
            yield from _targets(item)


@functools.cache
def _shipped() -> frozenset[str]:
    """The classes that the options of the runner name."""
    found = {target for file in CONF.rglob("*.yaml") for target in _TARGET.findall(file.read_text())}
    return frozenset(rename_targets({"_target_": target})["_target_"] for target in found)
