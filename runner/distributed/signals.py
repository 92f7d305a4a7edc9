"""Signals that ask a run to save and stop: what follows the first one, from a command's first line on.

Imports nothing of the runner's, and so no torch: a signal that comes while that is imported ends the command.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
OFTEN_IGNORED = (signal.SIGHUP, signal.SIGQUIT)  # by nohup, and by shells for what runs in the background: so do we
SAVED, INTERRUPTED = 143, 130  # exit statuses
LAST_WORD_S = 1.5  # from a second Ctrl-C to the end


class Stopped(BaseException):
    """A signal came where nothing has to be saved first. No Exception: what it interrupts may catch those."""


@dataclass
class _Asked:
    """What this process has been asked, and what follows."""

    why: str | None = None  # the first signal, or what `ask` was told
    at: float = 0.0  # monotonic seconds
    act: Callable[[str], None] = field(default=lambda why: None)
    process: int | None = None  # whose handlers these are; one that is forked from it has its own
    interrupts: int = 0  # how often it was SIGINT; a launcher may pass a terminal's on as another signal besides
    told: str | None = None  # why the next signal comes
    started_by: int | None = None  # the process that was its parent at a command's first line
    terminals: tuple[int, ...] = ()  # of standard output and error those that go to one


_asked = _Asked()


def received() -> str | None:
    """Why this process has been asked to stop; None: it has not been."""
    return _asked.why


def seconds_since() -> float:
    """That it was asked; 0 where it has not been."""
    return time.monotonic() - _asked.at if _asked.why else 0.0


def started_by() -> int:
    """The process that has started this one, also where that has ended since a command's first line."""
    return os.getppid() if _asked.started_by is None else _asked.started_by


def listen() -> None:
    """For a command's first line: a signal ends it, with status 143 and without a word, until there is a run to save.

    One rank of several notes the signal, and tells the others when it meets them.
    """
    many = any(os.environ.get(name, "1") != "1" for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"))
    _install(_note if many else _leave)
    _asked.started_by = os.getppid()
    _end_at_second_interrupt()


def listen_as_rank() -> None:
    """As `listen`, in a process that a launcher of the runner's has started with these signals held back."""
    _install(_note)
    _end_at_second_interrupt()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)


@contextmanager
def listening() -> Iterator[None]:
    """Meanwhile the first signal is noted; afterwards too, in a process that has been listening before."""
    if _asked.process == os.getpid():
        _asked.act = _note
        yield
        return
    before = [(number, signal.getsignal(number)) for number in ASKING]
    _install(_note)
    _asked.terminals = ()  # the caller's, who goes on after the run
    try:
        yield
    finally:
        _asked.process, _asked.why = None, None
        for number, handler in before:
            if handler is not None:  # None: not one of Python's, nor to be set by it
                signal.signal(number, handler)


@contextmanager
def interruptible() -> Iterator[None]:
    """Meanwhile a signal, also one that came before, raises Stopped."""
    before, _asked.act = _asked.act, _raise
    try:
        if _asked.why is not None:
            raise Stopped(_asked.why)
        yield
    finally:
        _asked.act = before


@contextmanager
def held_back() -> Iterator[None]:
    """Meanwhile none arrives; what is started has to let them through itself, by `listen_as_rank`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """For a process that helps one which is asked to stop, and is needed until that has."""
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)


def ask(why: str) -> None:
    """Ask this process to stop, as a signal does; for any thread."""
    _asked.told = why
    os.kill(os.getpid(), signal.SIGTERM)


def end_soon() -> None:
    """End this process in `LAST_WORD_S`, whatever its main thread waits for."""
    threading.Thread(target=_end_late, daemon=True, name="last word").start()


def drop_terminal() -> None:
    """After a SIGHUP there is none: what is printed goes nowhere, and fails nothing."""
    for stream in _asked.terminals:
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


class StopRequest:
    """While entered, the first signal asks the loop to stop, and a second Ctrl-C interrupts at once.

    It stops after its step, or in an evaluation after that one's batch. What comes after it is only noted.
    """

    def __init__(self) -> None:
        self._listening = contextlib.ExitStack()

    @property
    def received(self) -> str | None:
        return received()

    def __enter__(self) -> "StopRequest":
        self._listening.enter_context(listening())
        return self

    def __exit__(self, *details: object) -> None:
        self._listening.close()


def _install(act: Callable[[str], None]) -> None:
    _asked.why, _asked.act, _asked.process, _asked.interrupts = None, act, os.getpid(), 0
    _asked.terminals = tuple(stream for stream in (1, 2) if os.isatty(stream))
    for number in ASKING:
        if number not in OFTEN_IGNORED or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _receive)


def _receive(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _asked.process:
        return  # of a process that was forked a moment ago, and is about to set its own
    if number == signal.SIGHUP:
        drop_terminal()
    _asked.interrupts += number == signal.SIGINT
    if _asked.why is None:
        _asked.why, _asked.at = _asked.told or signal.Signals(number).name, time.monotonic()
        _asked.act(_asked.why)
    elif number == signal.SIGINT and _asked.interrupts > 1:
        raise KeyboardInterrupt


def _note(why: str) -> None:
    pass


def _leave(why: str) -> None:
    os._exit(SAVED)


def _raise(why: str) -> None:
    raise Stopped(why)


def _end_at_second_interrupt() -> None:
    """A handler runs in the main thread alone, which may wait for a peer outside of Python."""
    heard, tells = os.pipe()
    os.set_blocking(tells, False)
    signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget_wakeup)  # or a child's signals would be heard here
    threading.Thread(target=_count, args=(heard,), daemon=True, name="interrupts").start()


def _count(heard: int) -> None:
    interrupts = 0
    while interrupts < 2:
        is_interrupt = os.read(heard, 1)[0] == signal.SIGINT
        # A launcher ends its ranks before itself, and a debugger has a Ctrl-C of its own.
        interrupts += is_interrupt and signal.getsignal(signal.SIGINT) is _receive
    _end_late()


def _forget_wakeup() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


def _end_late() -> None:
    time.sleep(LAST_WORD_S)
    os._exit(INTERRUPTED)
