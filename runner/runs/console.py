"""What a run says: rank 0 on the terminal and in log.txt, another rank in its own file when it has something to say."""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console
from rich.table import Table

LOG, LOGS = "log.txt", "logs"  # of rank 0, and the folder of the others
LOGGER = logging.getLogger("runner")
WIDTH = 200  # of a table that goes into a file, in characters


class _ToConsole(logging.Handler):
    """Lines above the progress bar, where there is one."""

    def __init__(self, console: Console):
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(self.format(record), markup=False, highlight=False, soft_wrap=True)


class _Lasting:
    """A stream that may lose its reader, as a closed terminal or a pipe to what has ended: the run goes on."""

    def __init__(self, stream: Any):
        self._stream, self._is_lost = stream, False

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            if not self._is_lost:
                act()
        except OSError:
            self._is_lost = True


@contextmanager
def logging_to(rank: int, directory: Path) -> Iterator[Console]:
    """Direct what is logged, warnings too, for the length of a job.

    Rank 0 tells the user everything; another rank keeps warnings and errors in logs/rank_R.txt, which is made when
    the first one comes.
    """
    console = Console(file=cast(IO[str], _Lasting(sys.stdout)), force_terminal=is_terminal(), force_jupyter=False)
    handlers: list[logging.Handler]
    if rank == 0:
        handlers = [logging.FileHandler(directory / LOG)]
        if not any(isinstance(handler, _ToConsole) for handler in LOGGER.handlers):  # a job within task=compare
            handlers.append(_ToConsole(console))
    else:
        quiet = _LazyFile(directory / LOGS / f"rank_{rank}.txt")
        quiet.setLevel(logging.WARNING)
        handlers = [quiet]
    loggers = [LOGGER, logging.getLogger("py.warnings")]
    for handler in handlers:
        handler.setFormatter(_Plain())
        for logger in loggers:
            logger.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    for logger in loggers:
        logger.propagate = False
    show = warnings.showwarning
    is_captured = getattr(show, "__module__", "") == "logging"  # by whoever has called
    if not is_captured:
        logging.captureWarnings(True)
    try:
        yield console
    finally:
        if not is_captured:
            logging.captureWarnings(False)
        warnings.showwarning = show
        for handler in handlers:
            for logger in loggers:
                logger.removeHandler(handler)
            handler.close()


class _Plain(logging.Formatter):
    """The message alone; the level where it matters."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


class _LazyFile(logging.FileHandler):
    def __init__(self, path: Path):
        super().__init__(path, delay=True)

    def _open(self) -> Any:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


def draw_table(table: Table, width: int | None) -> str:
    """The table as lines of text; what is in it is no markup, as an error's text that begins with a path in brackets.

    width: in characters; None is the terminal's.
    """
    shape: dict[str, Any] = {"width": width, "force_terminal": is_terminal(), "force_jupyter": False}
    console = Console(file=sys.stdout, no_color=True, markup=False, emoji=False, **shape)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def width_of_terminal() -> int | None:
    """For `draw_table`: the terminal's, or enough for a table that goes into a file."""
    return None if is_terminal() else WIDTH


def is_terminal() -> bool:
    """Whether what is printed goes to one; a notebook's output says so too, and shows a bar as a page of lines."""
    own = sys.__stdout__
    return own is not None and sys.stdout is own and own.isatty()
