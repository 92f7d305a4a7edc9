"""Exceptions that end a command, and the messages for wrong input: at most three lines, with the nearest valid word."""

import contextlib
import difflib
import errno
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

_MAX_LISTED = 12  # a longer list of choices would hide the message before it
_STDLIB = sysconfig.get_path("stdlib")
# By name, because an environment may also import the packages of another one (venv --system-site-packages).
PACKAGE_DIRECTORIES = ("site-packages", "dist-packages")
# What to do about errors of the system, by errno.
_FIXES = {
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EROFS: "make the file system writable",
    errno.EIO: "check the disk or its server (dmesg)",
    errno.ESTALE: "check the file server",
    errno.EACCES: "correct the permissions",
    errno.EPERM: "correct the permissions",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close files of other processes",
    errno.EAGAIN: "raise the limit of processes (ulimit -u, or pids.max of the cgroup)",
    errno.ENOMEM: "free memory",
}
_NO_THREAD = ("can't start new thread", os.strerror(errno.EAGAIN))  # of Python, and of C++ in torch
_WHILE_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# Control characters, by which a text can change the terminal, and those that change the direction of writing.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_VALUES = re.compile(r"(?<=\w)\(\[[^)]*$")  # of an array or a tensor whose other rows are on further lines
_RUNNER = tuple(f"{Path(__file__).parents[1] / name}/" for name in ("runner", "hydra_plugins/runner"))


class InputError(ValueError):
    """Invalid input. Each message is one line that names key, value, rule and fix."""

    def __init__(self, *messages: str):
        super().__init__("\n".join(messages))
        self.messages = list(messages)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if no memory could be allocated, on a GPU or for the CPU."""
    # By name, because commands that do not need torch import this module.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


@contextlib.contextmanager
def as_input_error(prefix: str = "") -> Iterator[None]:
    """Raise a ValueError of the context as InputError, with a prefix and a message for each line."""
    try:
        yield
    except ValueError as error:
        raise InputError(*f"{prefix}{error}".splitlines()) from None


def require_packages(choice: str, extra: str, *packages: str) -> None:
    """Raise InputError if a package that `choice` needs is missing. `extra` installs them; they are not imported."""
    if missing := [package for package in packages if find_spec(package) is None]:
        raise InputError(f"{choice} needs {' and '.join(missing)}; pip install 'experiment-runner[{extra}]'")


class JobFailed(Exception):
    """A job that failed. The error has been printed and is in result.json.

    Attributes:
        status: the exit status.
        directory: the directory of the run or sweep, for callers from Python.
        follows: True if the failure of another rank may be the cause, which is then reported first.
    """

    def __init__(self, text: str, status: int = 1, directory: str = "", follows: bool = False):
        super().__init__(text)
        self.status, self.directory, self.follows = status, directory, follows


class Preempted(Exception):
    """A run that was stopped by a signal and saved its last step; `directory` is as in JobFailed."""

    def __init__(self, text: str = "", directory: str = ""):
        super().__init__(text)
        self.directory = directory


def print_messages(messages: Sequence[str]) -> None:
    """Print the messages to standard error; of more than three the first two and the number of the others."""
    shown = messages if len(messages) <= 3 else [*messages[:2], f"... and {len(messages) - 2} more"]
    for line in shown:
        with contextlib.suppress(OSError):  # the reader of the pipe has closed it
            print(printable(line), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Return the text with escape sequences for control characters: a record may be another user's."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def nearest(word: str, choices: Collection[str]) -> str | None:
    """Return the choice that is most similar to the word, ignoring case, or None."""
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[found[0]] if found else None


def near_hint(word: str, choices: Collection[str]) -> str:
    """Return the end of a message, `; did you mean convnet?`; empty if no choice is similar."""
    near = nearest(word, choices)
    return f"; did you mean {near}?" if near else ""


def quantity(count: int, noun: str) -> str:
    """Return the count and the noun, which is in the plural unless the count is 1."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def did_you_mean(word: str, choices: Collection[str]) -> str:
    """Return the end of a message: `; did you mean convnet? (convnet, mlp)`, or only the choices."""
    if not choices:
        return ""
    hint = near_hint(word, choices)
    listed = ", ".join(list(choices)[:_MAX_LISTED]) + (", ..." if len(choices) > _MAX_LISTED else "")
    return f"{hint} ({listed})" if hint else f"; choose among: {listed}"


def user_line(error: BaseException) -> str | None:
    """Return `FILE:LINE` of the innermost frame in user code (neither the runner's nor a library's), or None."""
    positions = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        positions.append((error.filename, error.lineno))
    of_user = [f"{file}:{line}" for file, line in positions if is_user_code(file)]
    return of_user[-1] if of_user else None


def calling_line() -> str:
    """Return `FILE:LINE` of the innermost caller in user code, or else in a library of models; `torch` for others."""
    positions = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None)]
    own = [f"{file}:{line}" for file, line in positions if is_user_code(file)]
    of_models = [
        f"{file}:{line}"
        for file, line in positions
        if _is_installed(file) and "-packages/torch/" not in file and not file.startswith(_RUNNER)
    ]
    return next(iter(own + of_models), "torch")


def describe_system_error(error: BaseException) -> str | None:
    """Return one line about an error whose cause is the machine or one of its limits; None for any other error."""
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_THREAD):
        error = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    if not isinstance(error, OSError) or error.errno not in _FIXES:
        return None
    if error.errno == errno.EAGAIN:
        problem = f"a process or thread could not be started: {error.strerror}"
    else:
        action = "written" if error.errno in _WHILE_WRITING else "used"
        problem = f"{error.filename or 'a file'} could not be {action}: {error.strerror}"
    return f"{problem}; {_FIXES[error.errno]} and repeat the command"


@contextlib.contextmanager
def exiting_on_system_errors(status: int = 1) -> Iterator[None]:
    """Print one line about an error that `describe_system_error` describes, and exit with `status`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if (message := describe_system_error(error)) is None:
            raise
        print_messages([message])
        raise SystemExit(status) from None


def is_user_code(file: str) -> bool:
    """Return True if the file is neither the runner's nor a library's."""
    return not _is_installed(file) and not file.startswith((*_RUNNER, _STDLIB, "<frozen"))


def _is_installed(file: str) -> bool:
    return any(f"/{name}/" in file for name in PACKAGE_DIRECTORIES)


def failed_with(error: BaseException) -> str:
    """Return the end of a message: the error, and the line of user code that raised it."""
    line = user_line(error)
    return f" with: {first_line(error)}" + (f" (at {line})" if line else "")


def first_line(error: BaseException) -> str:
    """Return the error's type and the first line of its message, without the values of a tensor that begin there."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {_VALUES.sub('(...)', lines[0])}" if lines else type(error).__name__


@contextlib.contextmanager
def raised_by(component: str, method: str) -> Iterator[None]:
    """Add the name of a custom component to an exception. Its type is unchanged: it shows whether a peer is missing."""
    pid = os.getpid()
    try:
        yield
    except Exception as error:
        if not hasattr(error, "__notes__"):  # a component that was called by another one has been named already
            error.add_note(f"raised by {component} in {method}")
        raise
    finally:
        if os.getpid() != pid:  # a process that the component has forked must not continue the run
            _exit_as_python(sys.exception())


def _exit_as_python(error: BaseException | None) -> NoReturn:
    """Exit with the status of a Python program that `error` ends, but without Python's finalization."""
    status = 0 if error is None else 1
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        status = error.code or 0
    elif isinstance(error, SystemExit):
        print(error.code, file=sys.stderr)
    elif error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
