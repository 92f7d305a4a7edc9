"""The log of a run: rank 0's on the terminal and in log.txt, the warnings of other ranks in logs/."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console, NewLine
from rich.control import Control

from runner.errors import printable
from runner.records.output import FailSafeStream, copies, copying_output
from runner.records.run_files import LOG, make_directory, without_links

LOGS = "logs"  # the directory of the logs of other ranks than 0
LOGGER = logging.getLogger("runner")


class _ConsoleHandler(logging.Handler):
    """A handler that prints above the progress bar."""

    def __init__(self, console: Console):
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        # The log has a handler of its own.
        Console.print(self.console, self.format(record), markup=False, highlight=False, soft_wrap=True)


class _CopiedConsole(Console):
    """A console whose prints are copied into the log as well, except for the states of a progress bar."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **options)
        if not all(isinstance(each, (Control, NewLine)) for each in objects):
            text = StringIO()
            Console(file=text, width=self.width, force_jupyter=False, emoji=False).print(*objects, **options)
            copies.add("stdout", text.getvalue())


@contextmanager
def logging_to(rank: int, directory: Path) -> Iterator[Console]:
    """Log messages and warnings of a job for the duration of the context.

    Rank 0 logs to the terminal and to log.txt, which also contains what Python code writes to the standard streams.
    Another rank logs warnings and errors to logs/rank_R.txt, which is created with the first of them.
    """
    stream = cast(IO[str], FailSafeStream(sys.stdout))
    console = _CopiedConsole(file=stream, force_terminal=is_terminal(), force_jupyter=False, emoji=False)
    handlers: list[logging.Handler]
    if rank == 0:
        log = _FileHandler(directory / LOG)
        copies.open(log.write_line)
        handlers = [log]
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
        with copying_output(rank == 0):
            yield console
    finally:
        if rank == 0:
            copies.close(log.write_line)
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
        copies.end_lines()
        with suppress(OSError):  # the disk is full
            super().emit(record)

    def write_line(self, line: str) -> None:
        self.acquire()
        try:
            assert self.stream is not None
            self.stream.write(f"{line}\n")
            self.stream.flush()
        finally:
            self.release()

    def _open(self) -> Any:
        if self.delay:
            make_directory(Path(self.baseFilename).parent)
        options: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace", "opener": without_links}
        return FailSafeStream(open(self.baseFilename, self.mode, **options))


def is_terminal() -> bool:
    """Return True if stdout is a terminal.

    A notebook's stdout claims to be one, but would show each state of a progress bar as a new line.
    """
    stdout = sys.__stdout__
    return stdout is not None and sys.stdout is stdout and stdout.isatty()
