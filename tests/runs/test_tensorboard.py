"""What TensorBoard is given: one value per step, hparams, a layout, and predictions that are those of all ranks."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from worlds import run

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.runs.ledger import write_lines
from runner.runs.loggers.pictures import draw_confusion, draw_samples, is_image
from runner.runs.loggers.tensorboard import TensorBoard
from runner.runs.records import Trial, read_trial
from runner.training.confusion import NUM_SAMPLES, Predictions

SMALL = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "precision=fp64", "logger=tensorboard")


def events(path: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def session(path: Path) -> dict[str, Any]:
    data = events(path).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = metadata.parse_session_start_info_plugin_data(data)
    return {key: getattr(value, str(value.WhichOneof("kind"))) for key, value in start.hparams.items()}


def pictures(path: Path) -> dict[str, list[bytes]]:
    board = events(path)
    return {tag: [image.encoded_image_string for image in board.Images(tag)] for tag in board.Tags()["images"]}


@pytest.mark.fault("a restart, in TensorBoard", outcome="survived")
def test_a_run_that_restarted_has_one_value_per_tag_and_step(tmp_path: Path) -> None:
    first = run(tmp_path, 1, *SMALL, "max_steps=8", "checkpoint.every_steps=3")
    shutil.rmtree(first.path / "checkpoints" / "step_8")  # as if it had been killed before it saved
    run(tmp_path, 1, f"resume='{first.path}'", "max_steps=12")
    board = events(first.path)
    for tag in ("train/loss", "perf/step_time_s"):
        assert [event.step for event in board.Scalars(tag)] == list(range(1, 13)), tag
    assert [event.step for event in board.Scalars("val/loss")] == [12]
    assert board.Scalars("val/loss")[0].value == pytest.approx(first.result["metrics"]["val/loss"])
    assert [event.step for event in board.Images("val/confusion")] == [12]


def test_a_run_that_starts_anew_in_its_directory_forgets_what_it_had_logged(tmp_path: Path) -> None:
    first = run(tmp_path, 1, *SMALL, "max_steps=4")
    (file,) = first.path.glob("events.out.tfevents.*")
    file.rename(file.with_name("events.out.tfevents.1"))  # TensorBoard reads them by the second in their names
    again = TensorBoard()
    again.open(str(first.path), 0, Trial({}, {}))
    again.scalars(1, {"train/loss": 0.5})
    again.close(finished=True)
    assert [(event.step, event.value) for event in events(first.path).Scalars("train/loss")] == [(1, 0.5)]


def test_a_run_has_a_session_of_what_was_typed_and_a_layout(tmp_path: Path) -> None:
    made = run(tmp_path, 1, *SMALL, "max_steps=1", "optimizer.lr=1e-2", "checkpoint.keep=1")
    words = session(made.path)
    assert words["optimizer.lr"] == 0.01 and words["model"] == "mlp" and words["checkpoint.keep"] == 1
    assert not {"outputs", "logger", "threads"} & set(words)
    board = events(made.path)
    assert len(list(made.path.rglob("events.out.tfevents.*"))) == 1  # no run of its own for the hparams
    assert "_hparams_/session_end_info" in board.Tags()["tensors"]
    layout = board.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    assert b"train/loss" in layout and b"val/loss" in layout


def test_the_words_that_vary_are_those_that_tell_jobs_apart(tmp_path: Path) -> None:
    typed = ["model=mlp", "optimizer.lr=0.1,0.2", "seed=0,1"]
    write_lines(tmp_path, {"sweep": {"typed": typed, "config_dir": None, "command": [], "shared": {}}})
    jobs = [["model=mlp", f"optimizer.lr={lr}", f"seed={seed}"] for lr in (0.1, 0.2) for seed in (0, 1)]
    for number, words in enumerate(jobs):
        write_lines(tmp_path, {"number": number, "label": str(number), "overrides": words})
    varied = {"optimizer.lr": ["0.1", "0.2"], "seed": ["0", "1"]}
    assert read_trial(tmp_path / "2") == Trial({"optimizer.lr": "0.2", "seed": "0"}, varied)


@pytest.mark.parametrize(("mode", "world_size"), [("ddp", 3), ("pipeline", 2), ("ps", 3), ("fsdp", 2)])
def test_predictions_are_those_of_one_process(mode: str, world_size: int, tmp_path: Path) -> None:
    words = (*SMALL, "max_steps=5", "batch_size=50")  # 360 samples: the last batch is a short one
    alone = run(tmp_path / "none", 1, *words)
    spread = run(tmp_path / mode, world_size, *words, f"parallel={mode}")
    expected = pictures(alone.path)
    assert set(expected) == {"val/confusion", "val/predictions"}
    assert pictures(spread.path) == expected


def test_each_sample_is_counted_once_and_the_first_are_kept() -> None:
    data = [(torch.full((1, 2, 2), float(n)), torch.tensor(n % 3)) for n in range(20)]

    def of(rank: int, world_size: int) -> tuple[list[list[int]], list[tuple[int, int]]]:
        world = World(RankInfo(rank, rank, world_size, world_size), None, Backend())
        seen = Predictions(data, 3, torch.device("cpu"))
        share = list(range(20))[rank::2] if world_size == 2 else list(range(20))
        guesses = torch.tensor([n % 2 for n in share])
        seen.add(torch.nn.functional.one_hot(guesses, 3).float(), torch.tensor([n % 3 for n in share]), share)
        seen.gather(world)
        return seen.confusion.tolist(), [(true, guess) for _, true, guess in seen.samples()]

    counts = [[sum(n % 3 == t and n % 2 == p for n in range(20)) for p in range(3)] for t in range(3)]
    kept = [(n % 3, n % 2) for n in range(NUM_SAMPLES)]
    assert run_ranks(of, 2) == [(counts, kept)] * 2
    assert run_ranks(of, 3) == [(counts, kept)] * 3  # three ranks that all saw everything


def test_more_outputs_than_classes_are_no_error() -> None:
    data = [(torch.zeros(1, 2, 2), torch.tensor(n % 2)) for n in range(4)]
    seen = Predictions(data, 2, torch.device("cpu"))
    seen.add(torch.eye(3)[[0, 1, 2, 2]], torch.tensor([0, 1, 0, 1]), range(4))
    seen.gather(World(RankInfo(), None, Backend()))
    assert seen.confusion.tolist() == [[1, 0], [0, 1]]
    assert [guess for _, _, guess in seen.samples()] == [0, 1, 2, 2]


def test_no_predictions_of_a_regression_and_none_for_no_logger(tmp_path: Path) -> None:
    assert pictures(run(tmp_path / "toy", 1, "model=toy", "data=toy", "max_steps=2").path) == {}
    assert (
        set(pictures(run(tmp_path / "off", 1, *SMALL, "max_steps=2", "logger.tensorboard.images=false").path)) == set()
    )


def test_pictures_show_what_was_counted() -> None:
    counts = torch.tensor([[30, 0], [10, 30]])
    picture = draw_confusion(counts)
    assert picture.shape == (44 + 60 + 4, 44 + 60 + 4, 3)
    cell = {(t, p): picture[44 + t * 30 + 2, 44 + p * 30 + 2].tolist() for t in (0, 1) for p in (0, 1)}
    assert cell[0, 0] == [35, 95, 255] and cell[0, 1] == [255, 255, 255]
    assert cell[1, 0] == [200, 215, 255] and cell[1, 1] == [90, 135, 255]
    assert draw_confusion(torch.eye(150, dtype=torch.int64)).shape[0] > 500
    grid = draw_samples([(torch.rand(3, 8, 8), 1, 1), (torch.rand(3, 8, 8), 1, 0)])
    assert grid.shape == (56 + 18, 2 * 60, 3)
    assert is_image(torch.zeros(1, 28, 28)) and not is_image(torch.zeros(10))
