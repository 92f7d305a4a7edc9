"""What Python code writes to the standard streams of a job: on the terminal as before, and in the log of the run.

Not copied: what C code and started programs write.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from runner.errors import printable

MAX_KEPT = 10_000  # lines that are written before the log exists
_STREAMS = ("stdout", "stderr")


class FailSafeStream:
    """A stream that ignores errors, as of a closed terminal, a pipe or a full disk, so that the run continues.

    What it writes to a standard stream is not copied into the log.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        self._write = getattr(stream.write, "uncopied", stream.write)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def close(self) -> None:
        with suppress(OSError):
            self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Copies:
    """Complete lines of the streams, for the logs that are open."""

    def __init__(self) -> None:
        self.is_active = False
        self.logs: list[Callable[[str], None]] = []  # that of a job within another one comes last
        self._kept = deque[str](maxlen=MAX_KEPT)  # until a log is open
        self._begun: dict[tuple[str, int, int], str] = {}  # lines by stream, process and thread

    def add(self, stream: str, text: str) -> None:
        """Copy a text: its complete lines now, and the rest when its line ends."""
        key = (stream, os.getpid(), threading.get_ident())
        *lines, rest = (self._begun.pop(key, "") + text).replace("\r\n", "\n").split("\n")
        for line in lines:
            self._send(line)
        if "\r" in rest:  # of a progress bar, each state of which replaces the previous one
            end = "\r" if rest.endswith("\r") else ""
            rest = "\r" + rest.rstrip("\r").rpartition("\r")[2] + end
        if rest:
            self._begun[key] = rest

    def end_lines(self, also_bars: bool = False) -> None:
        """Send the incomplete lines of this thread, except a progress bar, before something else is written."""
        own = [(stream, os.getpid(), threading.get_ident()) for stream in _STREAMS]
        for key in own:
            if key in self._begun and (also_bars or "\r" not in self._begun[key]):
                self._send(self._begun.pop(key))

    def open(self, write: Callable[[str], None]) -> None:
        """Send the lines so far, and all later ones, to `write`."""
        while self._kept:
            write(self._kept.popleft())
        self.logs.append(write)

    def close(self, write: Callable[[str], None]) -> None:
        self.end_lines(also_bars=True)
        self.logs.remove(write)

    def clear(self) -> None:
        self._kept.clear()
        self._begun.clear()

    def _send(self, line: str) -> None:
        shown = line.rstrip("\r").rpartition("\r")[2]
        if "\x1b" in shown:  # colors, and movements of the cursor
            from rich.text import Text  # imported here, because a refusal of mistyped arguments does not need it

            shown = Text.from_ansi(shown).plain
        for write in self.logs:
            write(printable(shown))
        if not self.logs:
            self._kept.append(printable(shown))


copies = _Copies()  # a global, as the standard streams are


@contextmanager
def copying_output(is_copied: bool = True) -> Iterator[None]:
    """Copy what is written to the standard streams within the context, for the logs that are opened in it."""
    if copies.is_active or not is_copied:
        yield
        return
    copies.is_active = True
    with ExitStack() as restored:
        restored.callback(setattr, copies, "is_active", False)
        restored.callback(copies.clear)
        for name in _STREAMS:
            with suppress(AttributeError, TypeError):  # a stream without attributes of its own
                restored.callback(_copy(name))
        yield


def _copy(name: str) -> Callable[[], None]:
    """Copy what is written to this stream. Return a function that ends it.

    The method is replaced instead of the stream, because loggers of other packages keep the stream.
    """
    stream: Any = getattr(sys, name)
    before, terminal = vars(stream).get("write"), FailSafeStream(stream)

    def write(text: str) -> int:
        written = terminal.write(text)
        copies.add(name, text)
        return written

    write.uncopied = terminal.write  # type: ignore[attr-defined]
    stream.write = write

    def restore() -> None:
        if vars(stream).get("write") is write:
            stream.write = before
            if before is None:
                del stream.write

    return restore
