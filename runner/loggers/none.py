"""No logger."""


class NoLogger:
    """logger=none: metrics.jsonl alone."""

    def __init__(self) -> None:
        pass

    def open(self, directory: str, first_step: int) -> None:
        pass

    def scalars(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def text(self, tag: str, text: str) -> None:
        pass

    def close(self) -> None:
        pass
