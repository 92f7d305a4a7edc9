"""TensorBoard's event file in the run directory: scalars, images, the configuration, and the run's hparams."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.records.compared_runs import Trial
from runner.records.loggers.contract import Logger, Predictions, RunOutcome
from runner.records.loggers.images import draw_confusion, draw_samples, is_image
from runner.records.tables import as_number

# Charts of the tab "Custom Scalars", in addition to the charts of an evaluation's metrics.
SPEED = {
    "samples per second": ["Multiline", ["perf/samples_per_second"]],
    "model FLOPs utilization (mfu), and productive fraction of the run (goodput)": [
        "Multiline",
        ["perf/mfu", "perf/goodput"],
    ],
    "fraction of a step that waits for data": ["Multiline", ["perf/data_wait"]],
    "fraction of the time in which other ranks wait for the slowest rank": ["Multiline", ["perf/straggler"]],
}

# The metrics of the tab "HParams", few because TensorBoard hides columns beyond a maximum.
MAX_EVALUATION_COLUMNS = 2
OTHER_COLUMNS = ("train/loss", "perf/samples_per_second")


class TensorBoard(Logger):
    """logger=tensorboard; conf/logger/tensorboard.yaml documents the options."""

    def __init__(self, images: bool = True) -> None:
        self.wants_predictions = images
        self._writer: Any = None

    def open(self, directory: str, first_step: int, trial: Trial) -> None:
        # Imported here because it takes over a second, and only rank 0 writes.
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard drops later steps, which are now repeated, from the earlier files of the directory.
        self._writer = SummaryWriter(directory, purge_step=first_step + 1)
        self._writer.add_custom_scalars({"train against val": _charts(trial.metrics), "speed": SPEED})
        if trial.overrides:
            self._start_session(Path(directory), trial)

    def scalars(self, step: int, metrics: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all metrics of a step: an event for each would take four times as long.
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
        self._writer.file_writer.add_summary(Summary(value=values), step)

    def predictions(self, step: int, predictions: Predictions) -> None:
        self._writer.add_image("val/confusion", draw_confusion(predictions.confusion), step, dataformats="HWC")
        if samples := [each for each in predictions.samples() if is_image(each[0])]:
            self._writer.add_image("val/predictions", draw_samples(samples), step, dataformats="HWC")

    def text(self, tag: str, text: str) -> None:
        self._writer.add_text(tag, text)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, outcome: RunOutcome) -> None:
        if outcome:  # not if the run may be resumed, because TensorBoard shows the first end that it reads
            self._end_session()
        self._writer.close()

    def _start_session(self, directory: Path, trial: Trial) -> None:
        """Add a row to the tab HParams. SummaryWriter.add_hparams would create a second run."""
        from tensorboard.plugins.hparams import api_pb2, metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb  # `api` needs TensorFlow

        # TensorBoard uses a numeric axis only for numbers.
        numbers = {key: as_number(value) for key, value in trial.overrides.items()}
        hparams = {key: value if numbers[key] is None else numbers[key] for key, value in trial.overrides.items()}
        name = f"{directory.name} in {directory.parent.name}"  # TensorBoard averages rows of equal names
        self._writer.file_writer.add_summary(hparams_pb(hparams, trial_id=name))
        if not trial.varied:
            return  # a single run: without an experiment summary, TensorBoard shows the keys of all runs
        infos = []
        for key, values in trial.varied.items():
            # No domain: TensorBoard hides values outside of it, and the sweep may be extended.
            is_numeric = all(as_number(value) is not None for value in values)
            data_type = api_pb2.DATA_TYPE_FLOAT64 if is_numeric else api_pb2.DATA_TYPE_STRING
            infos.append(api_pb2.HParamInfo(name=key, type=data_type, differs=len(values) > 1))
        columns = (*trial.metrics[:MAX_EVALUATION_COLUMNS], *OTHER_COLUMNS)
        metrics = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in columns]
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

        summary_metadata = metadata.create_summary_metadata(data)
        value = Summary.Value(tag=tag, metadata=summary_metadata, tensor=metadata.NULL_TENSOR)
        self._writer.file_writer.add_summary(Summary(value=[value]))


def _charts(metrics: Sequence[str]) -> dict[str, list[Any]]:
    """Return a chart with the training and validation losses, and one chart for each metric with all of its values."""
    charts: dict[str, list[Any]] = {"loss": ["Multiline", ["train/loss"]]}
    for name in metrics:
        chart = name.split("/")[1]
        charts.setdefault(chart, ["Multiline", []])[1].append(name)
    return charts
