"""debug=true: anomaly detection, and a progress bar that does not draw over the prompt of pdb."""

import pdb
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from rich.file_proxy import FileProxy
from rich.progress import Progress as Bar

from runner.training.callbacks.contract import Callback, Outcome, Progress, RunInfo


class AnomalyDetection(Callback):
    """torch.autograd's anomaly detection: a NaN in backward fails the run, with the line of its forward operation."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def on_start(self, run: RunInfo) -> None:
        self._stack.enter_context(torch.autograd.set_detect_anomaly(True))

    def on_end(self, now: Progress, outcome: Outcome) -> None:
        self._stack.close()


@contextmanager
def paused_in_debugger(bar: Bar) -> Iterator[None]:
    """Hide the bar from each prompt of pdb until the command that continues the run.

    This wraps a method of Pdb, and not breakpoint(), pdb.set_trace() or post_mortem(): these return before the first
    prompt, and a frame around them would be shown to the user. IPython's debugger derives from Pdb.
    """
    interaction = pdb.Pdb.interaction

    def without_bar(debugger: pdb.Pdb, frame: FrameType | None, *arguments: Any) -> None:
        if not bar.live.is_started:
            return interaction(debugger, frame, *arguments)
        bar.stop()
        if isinstance(debugger.stdout, FileProxy):  # created while the bar had replaced the standard output
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
