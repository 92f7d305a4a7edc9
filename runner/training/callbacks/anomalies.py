"""debug=true: a NaN in a backward fails the run, with the line of the forward that it is of."""

from contextlib import ExitStack

import torch

from runner.training.callback import Callback, Moment, Outcome, RunInfo


class AnomalyDetection(Callback):
    """torch.autograd's, from the first step to the end of the run."""

    def __init__(self) -> None:
        self._entered = ExitStack()

    def on_start(self, run: RunInfo) -> None:
        self._entered.enter_context(torch.autograd.set_detect_anomaly(True))

    def on_end(self, now: Moment, outcome: Outcome) -> None:
        self._entered.close()
