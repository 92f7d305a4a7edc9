"""Signals that stop a run after it has saved, from a command's first line on, and the exit of a rank with its parent.

This module imports neither torch nor other modules of the runner, so that signals are handled while torch is imported.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# nohup, and shells for background jobs, may have set these to be ignored; the runner then ignores them too.
MAY_BE_IGNORED = (signal.SIGHUP, signal.SIGQUIT)
PREEMPTED, INTERRUPTED = 143, 130  # exit statuses
EXIT_DELAY_S = 1.5  # from a second Ctrl-C to the exit
START_GRACE_S = 8.0  # from a signal to the exit of a rank whose start still waits for others, for example in C++
PARENT_GRACE_S = 30.0  # from the exit of the parent, for a step and a save
PARENT_POLL_S = 0.5
PARENT_EXITED = "the process that started this rank has exited"


class Stopped(BaseException):
    """A signal arrived where nothing has to be saved first. Not an Exception, which the interrupted code may catch."""


def _note(reason: str) -> None:
    pass


def _raise_stopped(reason: str) -> None:
    raise Stopped(reason)


@dataclass
class _State:
    """The signals that this process has received, and what it does on the first one."""

    reason: str | None = None  # the first signal's name, or `requested_reason`
    received_at: float = 0.0  # monotonic seconds
    num_received: int = 0
    on_first: Callable[[str], None] = _note
    pid: int | None = None  # the process that installed the handlers; a forked process installs its own
    num_interrupts: int = 0  # of SIGINT: a launcher may pass on a terminal's SIGINT as another signal
    requested_reason: str | None = None  # replaces the name of the next signal
    parent: int | None = None  # the pid of the parent at the command's first line
    terminals: tuple[int, ...] = ()  # the descriptors of standard output and standard error that are terminals
    is_starting: bool = False  # this process is a rank that has not formed its process group, and has nothing to save


_state = _State()


def received() -> str | None:
    """Return the reason why this process has to stop, for example "SIGTERM"; None if it does not."""
    return _state.reason


def forget_signal() -> None:
    """Continue after the first signal. If a second one has arrived meanwhile, the process still has to stop."""
    _state.num_received -= 1
    if _state.num_received <= 0:
        _state.num_received, _state.reason = 0, None


def seconds_since_received() -> float:
    return time.monotonic() - _state.received_at if _state.reason else 0.0


def install_handlers() -> None:
    """Handle signals from a command's first line on: until a run exists, a signal ends the command with status 143.

    In a world of several ranks, a rank records the signal instead, and reports it to the others after the rendezvous,
    unless torchrun has started all ranks: it terminates the others when one exits.
    """
    environ = os.environ
    is_rank = any(environ.get(name, "1") != "1" for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"))
    has_agent = "TORCHELASTIC_RUN_ID" in environ and environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
    _install(_note if is_rank and not has_agent else lambda reason: os._exit(PREEMPTED))
    _state.is_starting = is_rank
    _state.parent = os.getppid()
    _exit_at_second_interrupt()


def install_rank_handlers() -> None:
    """Handle signals in a rank that a launcher of the runner has started within `signals_blocked`."""
    _install(_note)
    _state.is_starting = True
    _exit_at_second_interrupt()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def end_start() -> None:
    """From now on, a rank exits after a signal only once it has saved."""
    _state.is_starting = False


@contextmanager
def handling_signals() -> Iterator[None]:
    """Record the first signal within the context. A process that had handlers before also does so afterwards.

    A second Ctrl-C raises KeyboardInterrupt at once; other signals after the first have no effect.
    """
    if _state.pid == os.getpid():
        _state.on_first = _note
        yield
        return
    before = [(number, signal.getsignal(number)) for number in STOP_SIGNALS]
    _install(_note)
    _state.terminals = ()  # the caller needs them after the run
    try:
        yield
    finally:
        _state.pid, _state.reason = None, None
        for number, handler in before:
            if handler is not None:  # None: not installed by Python, which cannot restore it
                signal.signal(number, handler)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Stopped within the context at the first signal, also if that arrived earlier."""
    before, _state.on_first = _state.on_first, _raise_stopped
    try:
        if _state.reason is not None:
            raise Stopped(_state.reason)
        yield
    finally:
        _state.on_first = before


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block signals within the context. A process started in it unblocks them with `install_rank_handlers`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Call the handlers of the signals that arrive within the context at its end.

    Blocking the signals would not do: another thread would receive them, and Python would call the handlers at once.
    """
    arrived: list[int] = []

    def defer(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {number: handler for number in STOP_SIGNALS if callable(handler := signal.getsignal(number))}
    for number in before:
        signal.signal(number, defer)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is defer:  # torch's agent may have installed its own
                signal.signal(number, handler)
        for arrival in arrived:
            signal.raise_signal(arrival)


def ignore_signals() -> None:
    """Ignore signals, in a worker that must stay until the process that uses it has stopped."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def detach_terminal() -> None:
    """Redirect output to /dev/null after SIGHUP, when the terminal is closed and writing to it would fail."""
    for stream in _state.terminals:
        with contextlib.suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream)
            os.close(null)


def exit_with_parent() -> None:
    """From now on, when the parent exits, stop as after a signal, and exit after PARENT_GRACE_S at the latest."""
    _watch_parent(_stop_and_exit)


def exit_at_once_with_parent() -> None:
    """From now on, exit as soon as the parent exits. For a process that has nothing to save."""
    _watch_parent(lambda: os._exit(1))


def _install(on_first: Callable[[str], None]) -> None:
    _state.reason, _state.on_first, _state.pid = None, on_first, os.getpid()
    _state.num_received = _state.num_interrupts = 0
    _state.terminals = tuple(stream for stream in (1, 2) if os.isatty(stream))
    for number in STOP_SIGNALS:
        if number not in MAY_BE_IGNORED or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)


def _handle(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _state.pid:
        return  # in a process that was just forked, and is about to install its own handlers
    if number == signal.SIGHUP:
        detach_terminal()
    _state.num_received += 1
    _state.num_interrupts += number == signal.SIGINT
    if _state.reason is None:
        _state.reason = _state.requested_reason or signal.Signals(number).name
        _state.received_at = time.monotonic()
        _state.on_first(_state.reason)
    elif number == signal.SIGINT and _state.num_interrupts > 1:
        raise KeyboardInterrupt


def _exit_at_second_interrupt() -> None:
    """Exit at the second Ctrl-C, and START_GRACE_S after a signal to a rank that is still starting.

    A thread does so, because Python's handlers run in the main thread, which may wait in C++.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_reset_wakeup)  # or a child's signals would be counted here
    threading.Thread(target=_watch_signals, args=(reader,), daemon=True, name="signals").start()


def _watch_signals(reader: int) -> None:
    num_interrupts = 0
    while num_interrupts < 2:
        number = os.read(reader, 1)[0]
        # A launcher handles Ctrl-C itself, to terminate its ranks first; a debugger handles it too.
        num_interrupts += number == signal.SIGINT and signal.getsignal(signal.SIGINT) is _handle
        if _state.is_starting and number in STOP_SIGNALS:
            timer = threading.Timer(START_GRACE_S, _exit_if_starting)
            timer.daemon = True
            timer.start()
    _exit_interrupted()


def _exit_if_starting() -> None:
    if _state.is_starting:
        os._exit(PREEMPTED)


def _reset_wakeup() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


def _exit_interrupted() -> None:
    time.sleep(EXIT_DELAY_S)
    os._exit(INTERRUPTED)


def _watch_parent(on_exit: Callable[[], None]) -> None:
    """Call `on_exit` in a thread when the parent exits."""
    import multiprocessing  # not needed at a command's first line
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()
    first = os.getppid() if parent is not None or _state.parent is None else _state.parent
    # An orphan gets another parent, except that the fork server stays the parent of the processes that it has started:
    # these have a pipe to the process that requested them. Other forked processes may keep their pipe open.
    pipes = [] if parent is None else [parent.sentinel]

    def watch() -> None:
        while os.getppid() == first and not wait(pipes, PARENT_POLL_S):
            pass
        on_exit()

    threading.Thread(target=watch, daemon=True, name="parent").start()


def _stop_and_exit() -> None:
    if received() == signal.SIGINT.name:  # the parent waits for this process, unless there was a second Ctrl-C
        threading.Thread(target=_exit_interrupted, daemon=True, name="exit").start()
    _state.requested_reason = PARENT_EXITED
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PARENT_GRACE_S)
    os._exit(1)
