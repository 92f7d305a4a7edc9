"""The log of a run: rank 0's on the terminal and in log.txt, the warnings of other ranks in logs/."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console

from runner.errors import printable
from runner.records.run_files import make_directory, without_links

LOG, LOGS = "log.txt", "logs"  # the log of rank 0, and the directory for those of other ranks
LOGGER = logging.getLogger("runner")


class _ConsoleHandler(logging.Handler):
    """A handler that prints above the progress bar."""

    def __init__(self, console: Console):
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(self.format(record), markup=False, highlight=False, soft_wrap=True)


class _FailSafeStream:
    """A stream that ignores errors, as of a closed terminal, a pipe or a full disk, so that the run continues."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def close(self) -> None:
        with suppress(OSError):
            self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def logging_to(rank: int, directory: Path) -> Iterator[Console]:
    """Log messages and warnings of a job for the duration of the context.

    Rank 0 logs to the terminal and to log.txt. Another rank logs warnings and errors to logs/rank_R.txt, which is
    created with the first of them.
    """
    stream = cast(IO[str], _FailSafeStream(sys.stdout))
    console = Console(file=stream, force_terminal=is_terminal(), force_jupyter=False, emoji=False)
    handlers: list[logging.Handler]
    if rank == 0:
        handlers = [_FileHandler(directory / LOG)]
        if not any(isinstance(handler, _ConsoleHandler) for handler in LOGGER.handlers):  # in task=compare
            handlers.append(_ConsoleHandler(console))
    else:
        handlers = [_FileHandler(directory / LOGS / f"rank_{rank}.txt", delay=True)]
        handlers[0].setLevel(logging.WARNING)
    loggers = [LOGGER, logging.getLogger("py.warnings")]
    for handler in handlers:
        handler.setFormatter(_Formatter())
        for logger in loggers:
            logger.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    for logger in loggers:
        logger.propagate = False
    show = warnings.showwarning
    logging.captureWarnings(True)
    try:
        yield console
    finally:
        logging.captureWarnings(False)
        warnings.showwarning = show  # within a job of task=compare, `show` captures warnings
        for handler in handlers:
            for logger in loggers:
                logger.removeHandler(handler)
            handler.close()


class _Formatter(logging.Formatter):
    """Formats the message, after the level if it is a warning or an error."""

    def format(self, record: logging.LogRecord) -> str:
        text = printable(super().format(record))
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


class _FileHandler(logging.FileHandler):
    """Appends to a regular file. Opening a link raises OSError. With `delay`, the first record creates the file."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # the disk is full
            super().emit(record)

    def _open(self) -> Any:
        if self.delay:
            make_directory(Path(self.baseFilename).parent)
        return _FailSafeStream(open(self.baseFilename, self.mode, opener=without_links))


def is_terminal() -> bool:
    """Return True if stdout is a terminal.

    A notebook's stdout claims to be one, but would show each state of a progress bar as a new line.
    """
    stdout = sys.__stdout__
    return stdout is not None and sys.stdout is stdout and stdout.isatty()
