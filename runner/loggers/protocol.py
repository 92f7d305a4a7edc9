"""What the loop knows of a logger."""

from typing import Protocol


class Logger(Protocol):
    """Made on rank 0 alone. `open` comes first; `first_step` is the step that the run goes on after."""

    def open(self, directory: str, first_step: int) -> None: ...

    def scalars(self, step: int, metrics: dict[str, float]) -> None: ...

    def text(self, tag: str, text: str) -> None: ...

    def close(self) -> None: ...
