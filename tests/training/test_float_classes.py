"""A hint at classes that are floating-point numbers, in which loss=auto sees a regression; none about a regression."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from custom_files import write_files
from torch.utils.data import IterableDataset

from runner.input.source import Source
from runner.input.stream import Stream
from runner.training.float_classes import hint_at_classes

CUSTOM = {
    "mine/labels.py": """\
        import torch
        from torch.utils.data import Dataset


        class Labels(Dataset):
            def __init__(self, kind: str, num_outputs: int = 1, split: str = "train"):
                self.kind = kind

            def __len__(self):
                return 40

            def __getitem__(self, index):
                inputs = torch.full((4,), index / 40)
                return inputs, {"labels": float(index >= 20), "numbers": index / 7, "classes": index // 20}[self.kind]
        """,
    "mine/data/labels.yaml": """\
        _target_: labels.Labels
        sample_shape: [4]
        num_outputs: 1
        kind: labels
        """,
}
RUN = ("--config-dir=mine", "data=labels", "model=linear", "logger=none", "threads=1", "max_steps=2")


def test_float_labels_of_a_custom_dataset_are_named(
    here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path, CUSTOM)
    warning = "warning: loss=auto: the targets are whole numbers in floating point, so the loss is mse; "
    for words, expected in {
        (): f"{warning}if they are classes, set loss=bce, or let the dataset return them as integers and give the "
        "model an output per class; if they are not, set loss=mse",
        ("data.kind=numbers",): "",
        ("loss=mse",): "",
        ("loss=bce",): "",  # as the warning advises
        ("data.kind=classes", "data.num_outputs=2"): "",
    }.items():
        assert here(*RUN, *words) == 0
        lines = [line for line in "".join(capsys.readouterr()).splitlines() if "loss=" in line]
        assert lines == ([expected] if expected else []), words
    assert here(*RUN, "data.num_outputs=2") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "the model returns [2] and the data []; change the model's num_outputs; if the targets are classes, let the "
        "dataset return them as integers"
    )


class Numbers:
    """A map-style dataset of the targets."""

    def __init__(self, *targets: object):
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(3), torch.as_tensor(self.targets[index], dtype=torch.float32)


class Endless(IterableDataset):
    def __iter__(self):
        return (Numbers(0, 1)[number % 2] for number in range(10**9))


def hint(dataset: object, outputs: int = 1) -> str:
    source = Source.of(dataset)
    targets = source.read([0])[1]
    return hint_at_classes(source, torch.zeros(1, outputs), targets)


def test_classes_and_regressions_get_different_hints() -> None:
    per_class = "let the dataset return them as integers and give the model an output per class"
    assert hint(Numbers(*[0] * 50, *[1] * 50)) == f"set loss=bce, or {per_class}"  # sorted
    assert hint(Numbers(*[[each // 30] for each in range(90)])) == per_class  # three classes, (1,)
    assert hint(Numbers(*[each // 30 for each in range(90)]), 3) == "let the dataset return them as integers"
    assert hint(Numbers([1, 0, 0], [0, 1, 0], [0, 0, 1]), 3) == "set loss=cross_entropy"
    assert hint(Numbers([1, 1, 0], [0, 1, 0], [0, 0, 0]), 3) == "set loss=bce"
    assert hint(Numbers([[[1, 0], [0, 0]]], [[[1, 1], [0, 0]]]), 4) == "set loss=bce"  # a mask of an image
    assert hint(Stream(Endless())).startswith("set loss=bce")
    for targets in (
        [0, 0, 0, 0],  # placeholders
        [*range(40)],  # counts
        [0, 1, 0.5, 1] * 8,
        [0, 1, float("inf"), 1] * 8,
        [float("nan")] * 8,
        [1],
    ):
        assert hint(Numbers(*targets)) == "", targets
    assert hint(Numbers([1, 0, 2], [0, 1, 0]), 3) == ""


def test_a_dataset_that_describes_itself_gets_no_second_hint() -> None:
    table = Numbers(0, 1, 0, 1)
    assert hint(table)
    table.header_lines = ["y contains numbers; if they are classes, set data.kind=classes"]  # type: ignore[attr-defined]
    assert hint(table) == ""


def test_samples_that_cannot_be_read_are_left_to_training() -> None:
    assert hint(Numbers(0, "x")) == ""
