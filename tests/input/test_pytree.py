"""Batches of any structure are collated, mapped, split and described."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from runner.input.pytree import collate, describe, map_tensors, num_rows, split, tensors
from runner.input.source import Source
from runner.tasks.prediction_files import columns_of


@dataclass
class Pair:
    left: torch.Tensor
    right: dict[str, torch.Tensor]


class Encoding(UserDict[str, Any]):
    """Like Hugging Face's BatchEncoding."""


class Named(dict[str, Any]):
    """Has an attribute that its constructor does not accept."""

    scale = 1.0


@pytest.mark.parametrize(
    ("samples", "batch"),
    [
        ([(torch.ones(2), 1), (torch.zeros(2), 2)], [torch.tensor([[1.0, 1], [0, 0]]), torch.tensor([1, 2])]),
        (
            [{"a": 1.5, "b": [1, 2]}] * 2,
            {"a": torch.tensor([1.5, 1.5]), "b": [torch.tensor([1, 1]), torch.tensor([2, 2])]},
        ),
        ([(np.ones((2, 2), np.float32), np.int64(3))], [torch.ones(1, 2, 2), torch.tensor([3])]),
        (
            [Pair(torch.tensor(1), {"k": torch.ones(3)}), Pair(torch.tensor(2), {"k": torch.zeros(3)})],
            Pair(torch.tensor([1, 2]), {"k": torch.tensor([[1.0] * 3, [0.0] * 3])}),
        ),
        (
            [(Pair(torch.tensor(1), {}), {"deep": Pair(torch.tensor(2), {})})],
            (Pair(torch.tensor([1]), {}), {"deep": Pair(torch.tensor([2]), {})}),
        ),
    ],
)
def test_samples_are_collated_into_a_batch_of_the_same_structure(samples: list[Any], batch: Any) -> None:
    made = collate(samples)
    assert [tensor.tolist() for tensor in tensors(made)] == [tensor.tolist() for tensor in tensors(batch)]
    assert num_rows(made) == len(samples)


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        (Encoding(values=torch.ones(4), inner=[torch.zeros(4)]), Encoding),
        (Named(values=torch.ones(4), inner=Encoding(a=torch.zeros(4))), Named),
    ],
)
def test_custom_dict_classes_are_mapped_split_and_joined(batch: Any, kind: type) -> None:
    if kind is Named:
        batch.scale = 3.0
    doubled = map_tensors(lambda tensor: 2 * tensor, batch)
    assert getattr(doubled, "scale", 3.0) == 3.0 and batch["values"].tolist() == [1.0] * 4
    assert type(doubled) is kind and doubled["values"].tolist() == [2.0] * 4
    assert num_rows(batch) == 4 and len(tensors(batch)) == len(batch)
    assert [num_rows(part) for part in split(batch, [1, 3])] == [1, 3]


def test_predictions_in_custom_dict_classes_become_columns() -> None:
    outputs = Encoding(size=torch.tensor([[2.0], [3.0]]), inner=Named(on=torch.tensor([True, False])))
    columns = columns_of(outputs, Encoding(), [4, 0])
    assert columns["output.size"].flatten().tolist() == [2.0, 3.0]
    assert columns["output.inner.on"].tolist() == [True, False]


def test_split_returns_aligned_tensors() -> None:
    batch = Pair(torch.arange(12.0).reshape(6, 2), {"of": torch.arange(6)})
    parts = split(batch, [1, 3, 2])
    assert [num_rows(part) for part in parts] == [1, 3, 2]
    assert [part.left.tolist() for part in parts] == [[[0, 1]], [[2, 3], [4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert all(tensor.data_ptr() % 64 == 0 for part in parts for tensor in tensors(part))
    for whole in ((torch.ones(6), torch.tensor(1)), (torch.ones(6), torch.ones(5)), (torch.ones(6), list("abcdef"))):
        with pytest.raises(ValueError, match=r"a row for each of its 6 samples, but it is \(tensor \[6\], "):
            split(whole, [1, 3, 2])


def test_describe_names_structure_and_shapes() -> None:
    tree = (torch.ones(2, 3), {"a": 1, "b": [torch.tensor(1)]}, Pair(torch.ones(1), {}), np.ones(4))
    assert describe(tree) == "(tensor [2, 3], {a: int, b: [tensor []]}, Pair(left: tensor [1], right: {}), ndarray [4])"


class Ragged:
    """Sequences of different lengths, which the dataset pads."""

    def __init__(self, keeps: bool = True):
        self.keeps = keeps

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index + 1,), float(index))

    def collate(self, samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = samples if self.keeps else samples[:1]
        padded = torch.nn.utils.rnn.pad_sequence(kept, batch_first=True)
        return {"padded": padded, "lengths": torch.tensor([len(sample) for sample in kept])}


def test_a_dataset_may_collate() -> None:
    batch = Source.of(Ragged()).read([3, 0])
    assert batch["padded"].tolist() == [[3, 3, 3, 3], [0, 0, 0, 0]]
    assert batch["lengths"].tolist() == [4, 1]


def test_a_collate_that_drops_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="collate of Ragged got 2 samples, but none of the tensors"):
        Source.of(Ragged(keeps=False)).read([3, 0])


def test_an_empty_local_micro_batch_is_the_first_sample() -> None:
    for dataset in (Ragged(), TensorDataset(torch.arange(4.0), torch.arange(4))):
        batch = Source.of(dataset).read([])
        assert num_rows(batch) == 1 and describe(batch) == describe(Source.of(dataset).read([0]))
