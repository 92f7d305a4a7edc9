"""TensorBoard's event file, in the run directory: scalars, pictures, the configuration, and the run's hparams."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.runs.loggers.pictures import draw_confusion, draw_samples, is_image
from runner.runs.loggers.protocol import Ending, Predictions
from runner.runs.records import Trial

# Charts of the tab "Custom Scalars", beside those of an evaluation's metrics.
SPEED = {
    "samples per second": ["Multiline", ["perf/samples_per_second"]],
    "share of a step that waits for data": ["Multiline", ["perf/data_wait"]],
    "share of a step in which the others wait for the slowest rank": ["Multiline", ["perf/straggler"]],
}

# The metrics of the tab "HParams": of more than a few, TensorBoard hides the last.
MAX_TABLED = 2  # of an evaluation
TABLED = ("train/loss", "perf/samples_per_second")


class TensorBoard:
    """logger=tensorboard. `images` false leaves the pictures of predictions out."""

    def __init__(self, images: bool = True) -> None:
        self.wants_predictions = images
        self._writer: Any = None

    def open(self, directory: str, first_step: int, trial: Trial) -> None:
        # Imported here because it takes over a second, and only rank 0 writes.
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard drops what an earlier file of the directory says of later steps: those are made again.
        started_before = any(Path(directory).glob("events.out.tfevents.*"))
        self._writer = SummaryWriter(directory, purge_step=first_step + 1 if started_before else None)
        self._writer.add_custom_scalars({"train against val": _charts(trial.metrics), "speed": SPEED})
        if trial.words:
            self._start_session(Path(directory), trial)

    def scalars(self, step: int, metrics: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # In one event: one for each of a step's seven numbers would cost four times as much.
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
        self._writer.file_writer.add_summary(Summary(value=values), step)

    def predictions(self, step: int, seen: Predictions) -> None:
        self._writer.add_image("val/confusion", draw_confusion(seen.confusion), step, dataformats="HWC")
        samples = seen.samples()
        if samples and is_image(samples[0][0]):
            self._writer.add_image("val/predictions", draw_samples(samples), step, dataformats="HWC")

    def text(self, tag: str, text: str) -> None:
        self._writer.add_text(tag, text)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, finished: Ending) -> None:
        if finished:  # only then: the first end that TensorBoard reads is the one that it shows
            self._end_session()
        self._writer.close()

    def _start_session(self, directory: Path, trial: Trial) -> None:
        """A row of the tab HParams, in this run's own file: SummaryWriter.add_hparams would open a second run."""
        from tensorboard.plugins.hparams import api_pb2, metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb  # `api` needs TensorFlow

        hparams = {key: _typed(value) for key, value in trial.words.items()}
        name = f"{directory.name} in {directory.parent.name}"  # rows of the same name would be averaged
        self._writer.file_writer.add_summary(hparams_pb(hparams, trial_id=name))
        if not trial.varied:
            return  # single runs: without an experiment the table has the keys of all that are shown
        kinds = {bool: api_pb2.DATA_TYPE_BOOL, float: api_pb2.DATA_TYPE_FLOAT64, str: api_pb2.DATA_TYPE_STRING}
        infos = []
        for key, values in trial.varied.items():
            found = {type(_typed(value)) for value in values}
            # No domain: what is outside of one is hidden, and the sweep may be extended.
            kind = kinds[found.pop() if len(found) == 1 else str]
            infos.append(api_pb2.HParamInfo(name=key, type=kind, differs=len(values) > 1))
        tabled = (*trial.metrics[:MAX_TABLED], *TABLED)
        metrics = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in tabled]
        experiment = api_pb2.Experiment(hparam_infos=infos, metric_infos=metrics)
        self._add(metadata.EXPERIMENT_TAG, HParamsPluginData(experiment=experiment))

    def _end_session(self) -> None:
        from tensorboard.plugins.hparams import api_pb2, metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

        end = SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
        self._add(metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=end))

    def _add(self, tag: str, data: Any) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import metadata

        about = metadata.create_summary_metadata(data)
        value = Summary.Value(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR)
        self._writer.file_writer.add_summary(Summary(value=[value]))


def _charts(metrics: Sequence[str]) -> dict[str, list[Any]]:
    """The loss of training and validation in one chart, and one for each metric, of several numbers together."""
    charts: dict[str, list[Any]] = {"loss": ["Multiline", ["train/loss"]]}
    for name in metrics:
        chart = name.split("/")[1]
        charts.setdefault(chart, ["Multiline", []])[1].append(name)
    return charts


def _typed(value: str) -> bool | float | str:
    """A number on an axis of numbers, not one word among others."""
    if value in ("true", "false"):
        return value == "true"
    try:
        return float(value)
    except ValueError:
        return value
