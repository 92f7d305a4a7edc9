"""Several losses of one objective, in turn within a step: each has an optimizer of its own, and all share the model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

from runner.training.batch import MicroBatch
from runner.training.objective import Prediction, Turn, turns
from runner.training.saved_state import MODEL, HeldState, SavedState
from runner.training.strategy import Recipe, Spread, Stepping


class Taking(Spread, Stepping, Protocol):
    """A spread model that steps by one loss."""


def take_turns(recipe: Recipe, spread: Callable[[Turn], Taking]) -> Spread:
    """The model spread for each loss of the recipe's objective. `spread` makes that of one turn."""
    by_name: dict[str, Taking] = {}
    for turn in turns(recipe.objective, recipe.module):
        with only(turn):
            by_name[turn.name] = spread(turn)
    return Alternating(by_name) if len(by_name) > 1 else next(iter(by_name.values()))


@contextmanager
def only(turn: Turn) -> Iterator[None]:
    """Let no parameter of another turn ask for a gradient.

    But slices: what FSDP gathers of them asks as it did when they were cut. Their gradients are dropped afterwards.
    """
    others = [parameter for parameter in turn.others if not isinstance(parameter, DTensor)]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
        for parameter in turn.others:
            parameter.grad = None


class Alternating:
    """A spread of each turn, over the same module."""

    def __init__(self, by_name: Mapping[str, Taking]):
        self._by_name = by_name
        self._first = next(iter(by_name.values()))

    @property
    def turns(self) -> Mapping[str, Stepping]:
        return self._by_name

    @property
    def learning_rate(self) -> float:
        return self._first.learning_rate

    def predict(self, micro_batch: MicroBatch) -> Prediction | None:
        return self._first.predict(micro_batch)

    def state(self) -> HeldState:
        """As of one turn, with what is each one's own by the names of the losses. All ranks must call it."""
        together = HeldState()
        for name, spread in self._by_name.items():
            held = spread.state()
            shared = HeldState(
                {key: piece for key, piece in held.pieces.items() if key.startswith(MODEL)},
                {key: fact for key, fact in held.facts.items() if key == "scaler"},
            )
            own = HeldState(
                {key: piece for key, piece in held.pieces.items() if key not in shared.pieces},
                {key: fact for key, fact in held.facts.items() if key not in shared.facts},
            )
            together = together | shared | own.under(f"turns.{name}")
        return together

    def load_state(self, saved: SavedState) -> None:
        for name, spread in self._by_name.items():
            turn = saved.under(f"turns.{name}")
            others = {key: tensor for key, tensor in saved.tensors.items() if not key.startswith("turns.")}
            spread.load_state(replace(saved, tensors={**others, **turn.tensors}, facts={**saved.facts, **turn.facts}))

    def weights(self) -> dict[str, torch.Tensor]:
        return self._first.weights()

    def load_weights(self, saved: SavedState) -> None:
        self._first.load_weights(saved)

    def held(self) -> dict[str, torch.Tensor]:
        return self._first.held()

    def changed(self) -> None:
        self._first.changed()
