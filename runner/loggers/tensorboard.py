"""TensorBoard's event file, in the run directory: scalars, pictures, the configuration, and the run's hparams."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.loggers.pictures import draw_confusion, draw_samples, is_image
from runner.predictions import Predictions

# Charts of the tab "Custom Scalars".
LAYOUT = {
    "train against val": {
        "loss": ["Multiline", ["train/loss", "val/loss"]],
        "accuracy": ["Multiline", ["val/accuracy"]],
    },
    "speed": {
        "samples per second": ["Multiline", ["perf/samples_per_second"]],
        "share of a step that waits for data": ["Multiline", ["perf/data_wait"]],
    },
}


class TensorBoard:
    """logger=tensorboard. `images` false leaves the pictures of predictions out."""

    def __init__(self, images: bool = True) -> None:
        self.wants_predictions = images
        self._writer: Any = None

    def open(self, directory: str, first_step: int, varied: Mapping[str, str]) -> None:
        # Imported here because it takes over a second, and only rank 0 writes.
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard drops what an earlier file of the directory says of later steps: those are made again.
        started_before = any(Path(directory).glob("events.out.tfevents.*"))
        self._writer = SummaryWriter(directory, purge_step=first_step + 1 if started_before else None)
        self._writer.add_custom_scalars(LAYOUT)
        if varied:
            self._start_session(Path(directory), {key: _typed(value) for key, value in varied.items()})

    def scalars(self, step: int, metrics: dict[str, float]) -> None:
        for tag, value in metrics.items():
            self._writer.add_scalar(tag, value, step)

    def predictions(self, step: int, seen: Predictions) -> None:
        self._writer.add_image("val/confusion", draw_confusion(seen.confusion), step, dataformats="HWC")
        samples = seen.samples()
        if samples and is_image(samples[0][0]):
            self._writer.add_image("val/predictions", draw_samples(samples), step, dataformats="HWC")

    def text(self, tag: str, text: str) -> None:
        self._writer.add_text(tag, text)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, finished: bool) -> None:
        if finished:  # only then: the first end that TensorBoard reads is the one that it shows
            self._end_session()
        self._writer.close()

    def _start_session(self, directory: Path, hparams: dict[str, Any]) -> None:
        """A row of the tab HParams, in this run's own file: SummaryWriter.add_hparams would open a second run.

        No experiment summary: without one the table has the keys of all sessions that are shown, with one only its.
        """
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb  # `api` needs TensorFlow

        name = f"{directory.name} in {directory.parent.name}"  # rows of the same name would be averaged
        self._writer.file_writer.add_summary(hparams_pb(hparams, trial_id=name))

    def _end_session(self) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
        data = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=end))
        value = Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=data, tensor=metadata.NULL_TENSOR)
        self._writer.file_writer.add_summary(Summary(value=[value]))


def _typed(value: str) -> bool | float | str:
    """A number on an axis of numbers, not one word among others."""
    if value in ("true", "false"):
        return value == "true"
    try:
        return float(value)
    except ValueError:
        return value
