"""The position of a stream of training samples in a checkpoint."""

from runner.checkpoints.saved_state import LocalState, SavedState
from runner.input.loader import Loader
from runner.input.stream import Position, decode_state, encode_state
from runner.training.callbacks.contract import Callback


class StreamPosition(Callback):
    """Saves and loads the state_dict of a stream, which all readers share, so that their number may change.

    Without a state_dict, nothing is saved: the position follows from the number of steps in the epoch.
    """

    def __init__(self, loader: Loader):
        self._loader = loader

    def state(self, model: LocalState) -> LocalState:
        """Return the stream's state_dict, if there is one, and the number of samples that were read before it."""
        position = self._loader.stream_position
        if position.state is None:
            return LocalState()
        return LocalState(facts={"stream": {"samples": position.samples, "state": encode_state(position.state)}})

    def load_state(self, saved: SavedState) -> None:
        if "stream" in saved.facts:
            fact = saved.facts["stream"]
            self._loader.stream_position = Position(fact["samples"], decode_state(fact["state"]))
