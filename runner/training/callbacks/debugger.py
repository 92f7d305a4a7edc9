"""The progress bar stops while pdb has the terminal, which a bar that is drawn ten times a second makes unreadable."""

import pdb
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.file_proxy import FileProxy
from rich.progress import Progress


@contextmanager
def stopping_for_debugger(bar: Progress) -> Iterator[None]:
    """While entered, the bar is away from each prompt of pdb to the command that goes on.

    pdb's own method is wrapped, and not breakpoint(), pdb.set_trace() or post_mortem(): those end before the first
    prompt comes, and a frame around them would be what the user is shown. IPython's debugger derives from it.
    """
    interaction = pdb.Pdb.interaction

    def without_bar(debugger: pdb.Pdb, frame: FrameType | None, *arguments: Any) -> None:
        if not bar.live.is_started:
            return interaction(debugger, frame, *arguments)
        bar.stop()
        if isinstance(debugger.stdout, FileProxy):  # made while the bar had the standard output
            debugger.stdout = debugger.stdout.rich_proxied_file
        try:
            interaction(debugger, frame, *arguments)
        finally:
            bar.start()

    pdb.Pdb.interaction = without_bar  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        pdb.Pdb.interaction = interaction  # type: ignore[method-assign]
