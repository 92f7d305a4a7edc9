"""A table with several labels per row, and its evaluation on the test split, on two ranks as on one process."""

import csv
import random
from pathlib import Path

import pytest
from worlds import Run, run

WORDS = (
    *("data=table", "data.target=[rain,wind]", "data.num_outputs=2", "data.sample_shape=[3]", "val_fraction=0.2"),
    *("model=mlp", "model.hidden=[16]", "loss=bce", "metrics=f1", "batch_size=50", "epochs=3", "precision=fp64"),
    "logger=none",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder, draw = tmp_path_factory.mktemp("table"), random.Random(0)
    for name, count in (("train", 230), ("test", 61)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["a", "b", "c", "rain", "wind"])
            for _ in range(count):
                a, b, c = (draw.gauss(10, 3) for _ in range(3))
                writer.writerow([a, b, c, int(a > 10), int(b + c > 20)])
    return (f"data.files.train={folder}/train.csv", f"data.files.test={folder}/test.csv")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, files: tuple[str, ...]) -> Run:
    return run(tmp_path_factory.mktemp("one"), 1, *WORDS, *files)


@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp", marks=pytest.mark.thorough)])
def test_several_labels_are_learned_alike_on_two_ranks(
    mode: str, one: Run, files: tuple[str, ...], tmp_path: Path
) -> None:
    two = run(tmp_path, 2, *WORDS, *files, f"parallel={mode}")
    assert two.losses == pytest.approx(one.losses, rel=1e-9)
    assert two.result["metrics"] == pytest.approx(one.result["metrics"], rel=1e-9)
    assert two.result["metrics"]["val/f1"] > 0.6  # half of the labels are 1: a guess has 0.5

    words = (f"run={one.path}", "task=evaluate", "split=test")
    alone = run(tmp_path / "alone", 1, *words, f"outputs={tmp_path / 'alone'}").result["metrics"]
    both = run(tmp_path / "both", 2, *words, f"parallel={mode}", f"outputs={tmp_path / 'both'}").result["metrics"]
    assert both == pytest.approx(alone, rel=1e-12) and set(alone) == {"test/loss", "test/f1"}
