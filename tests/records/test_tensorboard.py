"""TensorBoard's events: one value per step, hparams, a layout, and the predictions of all ranks."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from worlds import run

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.input.source import Source
from runner.records.compared_runs import Trial, read_trial
from runner.records.ledger import write_lines
from runner.records.loggers.composite import CompositeLogger
from runner.records.loggers.contract import RunOutcome
from runner.records.loggers.images import draw_confusion, draw_samples, is_image
from runner.records.loggers.tensorboard import TensorBoard
from runner.training.metrics.confusion import Predictions

SMALL = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "precision=fp64", "logger=tensorboard")


def read_events(path: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def read_hparams(path: Path) -> dict[str, Any]:
    data = read_events(path).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = metadata.parse_session_start_info_plugin_data(data)
    return {key: getattr(value, str(value.WhichOneof("kind"))) for key, value in start.hparams.items()}


def read_images(path: Path) -> dict[str, list[bytes]]:
    board = read_events(path)
    return {tag: [image.encoded_image_string for image in board.Images(tag)] for tag in board.Tags()["images"]}


@pytest.mark.fault("a restart, in TensorBoard", outcome="survived")
def test_a_resumed_run_has_one_value_per_tag_and_step(tmp_path: Path) -> None:
    first = run(tmp_path, 1, *SMALL, "max_steps=8", "checkpoint.every_steps=3")
    shutil.rmtree(first.path / "checkpoints" / "step_8")  # as if it had been killed before it saved
    run(tmp_path, 1, f"resume='{first.path}'", "max_steps=12")
    board = read_events(first.path)
    for tag in ("train/loss", "perf/step_time_s"):
        assert [event.step for event in board.Scalars(tag)] == list(range(1, 13)), tag
    assert [event.step for event in board.Scalars("val/loss")] == [12]
    assert board.Scalars("val/loss")[0].value == pytest.approx(first.result["metrics"]["val/loss"])
    assert [event.step for event in board.Images("val/confusion")] == [12]


def test_a_run_restarted_from_step_0_drops_its_earlier_events(tmp_path: Path) -> None:
    for attempt, steps in enumerate(([1, 2, 3], [1])):
        board = TensorBoard()
        board.open(str(tmp_path), 0, Trial({}, {}))
        for step in steps:
            board.scalars(step, {"train/loss": float(attempt)})
        board.close(RunOutcome("failed"))
        (file,) = tmp_path.glob("events.out.tfevents.??*")
        file.rename(tmp_path / f"events.out.tfevents.{attempt}")  # TensorBoard orders them by the time in their names
    assert [(event.step, event.value) for event in read_events(tmp_path).Scalars("train/loss")] == [(1, 1.0)]


def test_a_run_has_hparams_for_its_overrides_and_a_layout(tmp_path: Path) -> None:
    options = ("max_steps=1", "optimizer.lr=1e-2", "checkpoint.keep=1", "logger.tensorboard.images=false")
    made = run(tmp_path, 1, *SMALL, *options)
    words = read_hparams(made.path)
    assert words["optimizer.lr"] == 0.01 and words["model"] == "mlp" and words["checkpoint.keep"] == 1
    assert not {"outputs", "logger", "threads"} & set(words)
    board = read_events(made.path)
    assert len(list(made.path.rglob("events.out.tfevents.*"))) == 1  # no second run for the hparams
    assert "_hparams_/session_end_info" in board.Tags()["tensors"] and not board.Tags()["images"]
    layout = board.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    assert b"train/loss" in layout and b"val/loss" in layout


def test_a_trial_has_the_overrides_that_vary_in_the_sweep(tmp_path: Path) -> None:
    requested = ["model=mlp", "optimizer.lr=0.1,0.2", "seed=0,1"]
    write_lines(tmp_path, {"sweep": {"typed": requested, "config_dirs": [], "command": [], "shared": {}}})
    jobs = [["model=mlp", f"optimizer.lr={lr}", f"seed={seed}"] for lr in (0.1, 0.2) for seed in (0, 1)]
    for number, words in enumerate(jobs):
        write_lines(tmp_path, {"number": number, "label": str(number), "overrides": words})
    varied = {"optimizer.lr": ["0.1", "0.2"], "seed": ["0", "1"]}
    assert read_trial(tmp_path / "2") == Trial({"optimizer.lr": "0.2", "seed": "0"}, varied)


@pytest.mark.thorough
def test_predictions_are_those_of_one_process(tmp_path: Path) -> None:
    words = (*SMALL, "max_steps=5", "batch_size=50")  # 360 samples: the last batch is smaller
    expected = read_images(run(tmp_path / "none", 1, *words).path)
    assert set(expected) == {"val/confusion", "val/predictions"}
    for mode, world_size in (("ddp", 2), ("pipeline", 2)):
        assert read_images(run(tmp_path / mode, world_size, *words, f"parallel={mode}").path) == expected, mode


def test_predictions_for_samples_that_are_no_images_are_not_drawn(tmp_path: Path) -> None:
    folder = Path(__file__).parents[1] / "experiments" / "sequences"
    made = run(tmp_path, 1, f"--config-dir={folder}", "experiment=sequences", "max_steps=2")
    assert set(read_images(made.path)) == {"val/confusion"}
    assert "is disabled" not in (made.path / "log.txt").read_text()


def test_a_model_may_have_more_outputs_than_classes_and_samples_beyond_eval_batches_are_not_drawn() -> None:
    data = [(torch.zeros(1, 2, 2), torch.tensor(n % 2)) for n in range(20)]
    seen = Predictions(Source.of(data), 2, torch.device("cpu"))
    seen.add(torch.eye(3)[[0, 1, 2, 2]], torch.tensor([0, 1, 0, 1]), range(4))
    seen.add(torch.eye(3)[[0, 1]], torch.tensor([-1, -1]), (16, 17))  # loss.ignore_index=-1
    seen.gather(World(RankInfo(), None, Backend()))
    assert seen.confusion.tolist() == [[1, 0], [0, 1]]
    assert [(true, guess) for _, true, guess in seen.samples()] == [(0, 0), (1, 1), (0, 2), (1, 2)]
    seen = Predictions(Source.of(data), 20, torch.device("cpu"))
    seen.add(torch.eye(20), torch.arange(20, dtype=torch.uint8), range(20))  # 19 * 20 is too large for uint8
    assert torch.equal(seen.confusion, torch.eye(20, dtype=torch.int64))


class Samples(list[Any]):
    """Samples of any form, collated as `kind` says."""

    def __init__(self, kind: str):
        images = [torch.full((3, 4, 4), number / 20) for number in range(20)]
        items: dict[str, Any] = {
            "mappings": [{"image": image, "label": 1, "weight": 0.5} for image in images],
            "pairs in mappings": [{"image": image, "label": "left"} for image in images],
            "triples": [(image, 1, 2) for image in images],
            "several targets": [(image, torch.tensor([1, 0])) for image in images],
            "no targets": images,
            "texts": [(image, "left") for image in images],
            "sizes": [(torch.zeros(3, 4 + number % 2, 4), 1) for number, _ in enumerate(images)],
            "points": [(torch.zeros(3, 4, 4) if number else torch.zeros(0, 4, 4), 1) for number in range(20)],
        }
        super().__init__(items[kind])


@pytest.mark.parametrize(
    ("kind", "draws"),
    [
        *[(kind, False) for kind in ("mappings", "pairs in mappings", "triples")],
        *[(kind, True) for kind in ("no targets", "several targets", "texts", "sizes", "points")],
    ],
)
def test_samples_that_cannot_be_drawn_are_left_out_and_the_metrics_continue(
    kind: str, draws: bool, tmp_path: Path
) -> None:
    """A custom objective may return classes for data of any form; an image is drawn with the class that it returned."""
    seen = Predictions(Source.of(Samples(kind)), 2, torch.device("cpu"))
    seen.add(torch.eye(2)[[0, 1, 0]], torch.tensor([0, 0, 1]), range(3))
    seen.add(torch.eye(2)[[0, 1, 0, 0]], torch.tensor([0, 0, 1, 1]), (3, 4))  # of four nodes in two graphs
    seen.gather(World(RankInfo(), None, Backend()))
    assert [(true, guess) for _, true, guess in seen.samples()] == [(0, 0), (0, 1), (1, 0)]
    logger = CompositeLogger({"tensorboard": TensorBoard()})
    logger.open(str(tmp_path), 0, Trial({}, {}))
    logger.predictions(1, seen)
    logger.scalars(1, {"val/loss": 0.5})
    logger.close(RunOutcome("finished"))
    assert set(read_images(tmp_path)) == {"val/confusion", *(["val/predictions"] if draws else [])}
    assert [event.value for event in read_events(tmp_path).Scalars("val/loss")] == [0.5]


def test_an_error_in_predictions_disables_only_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Removed(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise OSError("the file was removed")

    seen = Predictions(Source(Removed(range(4))), 2, torch.device("cpu"))
    seen.add(torch.eye(2), torch.tensor([0, 1]), range(2))
    logger = CompositeLogger({"tensorboard": TensorBoard()})
    logger.open(str(tmp_path), 0, Trial({}, {}))
    for step in (1, 2):
        logger.predictions(step, seen)
        logger.scalars(step, {"val/loss": 0.5})
    logger.close(RunOutcome("finished"))
    assert [event.step for event in read_events(tmp_path).Scalars("val/loss")] == [1, 2]
    assert caplog.text.count("logger=tensorboard shows no more predictions after an error: OSError: the file") == 1


def test_the_confusion_matrix_is_shaded_by_row() -> None:
    counts = torch.tensor([[30, 0], [10, 30]])
    image = draw_confusion(counts)
    assert image.shape == (44 + 60 + 4, 44 + 60 + 4, 3)
    cell = {(t, p): image[44 + t * 30 + 2, 44 + p * 30 + 2].tolist() for t in (0, 1) for p in (0, 1)}
    assert cell[0, 0] == [35, 95, 255] and cell[0, 1] == [255, 255, 255]
    assert cell[1, 0] == [200, 215, 255] and cell[1, 1] == [90, 135, 255]
    assert draw_confusion(torch.eye(150, dtype=torch.int64)).shape[0] > 500
    grid = draw_samples([(torch.rand(3, 8, 8), 1, 1), (torch.rand(3, 8, 8), 1, 0)])
    assert grid.shape == (56 + 18, 2 * 60, 3)
    assert is_image(torch.zeros(1, 28, 28)) and not is_image(torch.zeros(10))
