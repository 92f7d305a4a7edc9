"""TensorBoard's event file, in the run directory."""

from typing import Any


class TensorBoard:
    """logger=tensorboard."""

    def __init__(self) -> None:
        self._writer: Any = None

    def open(self, directory: str, first_step: int) -> None:
        # Imported here because it takes over a second, and only rank 0 writes.
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard drops what an earlier file of the directory says of later steps: those are made again.
        self._writer = SummaryWriter(directory, purge_step=first_step + 1 if first_step else None)

    def scalars(self, step: int, metrics: dict[str, float]) -> None:
        for tag, value in metrics.items():
            self._writer.add_scalar(tag, value, step)

    def text(self, tag: str, text: str) -> None:
        self._writer.add_text(tag, text)

    def close(self) -> None:
        self._writer.close()
