"""Runs with an IterableDataset: the numbers of a map-style dataset, resuming, and refusals."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import COMMON, assert_equal
from sample_log import samples_of
from streams import NUM_TRAIN, Split, Stateful, Toy, Walk, overrides
from worlds import Run, build_experiment, run

from runner import InputError
from runner.input.loader import Loader
from runner.input.rng import seeded
from runner.input.sampler import Sampler
from runner.input.source import Source
from runner.input.stream import Position, Stream
from runner.training.metrics.confusion import Predictions


class Sized(Toy):
    def __len__(self) -> int:
        return len(self.samples)


class Overrated(Toy):
    def __len__(self) -> int:
        return 2 * len(self.samples)


class Unsafe(Stateful):
    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "path": Path("somewhere")}


class SplitSized(Split):
    def __len__(self) -> int:
        return len(self.samples)


class Contiguous(Split):
    """Splits into contiguous parts."""

    def __iter__(self) -> Iterator[Any]:
        index, count = self.part
        size = len(self.samples)
        return (self.samples[number] for number in range(index * size // count, (index + 1) * size // count))


class Shortened(Split):
    """Returns correct parts, without their last samples."""

    def __iter__(self) -> Iterator[Any]:
        end = len(self.samples) - (30 if self.part[1] > 1 else 0)
        return (self.samples[number] for number in range(self.part[0], end, self.part[1]))


class Empty(Walk):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


class Nested(Walk):
    """Changes an object inside the dataset."""

    def __init__(self, train: bool):
        super().__init__(train)
        self.left = [2.0, 1.0, 0.0]

    def __iter__(self) -> Iterator[Any]:
        while self.left:
            yield torch.zeros(10), self.left.pop()


class Opened(Walk):
    """Contains an object that cannot be copied."""

    def __init__(self, train: bool):
        super().__init__(train)
        self.lock = threading.Lock()


def train(folder: Path, ranks: int, kind: str, *more: str, size: int = 90) -> Run:
    mode = ["parallel=ddp"] if ranks > 1 else []
    options = (f"batch_size={size}", "+callbacks.log._target_=sample_log.SampleLog", *mode, *more)
    return run(folder, ranks, *overrides(folder.parent / kind, f"test_stream.{kind}", *options))


@pytest.mark.parametrize("kind", ["Toy", pytest.param("Sized", marks=pytest.mark.thorough)])
def test_a_stream_trains_like_a_map_style_dataset_on_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    shapes = (f"data.num_train={NUM_TRAIN}", "data.num_val=50", "loader.shuffle=false", "batch_size=90")
    expected = run(tmp_path / "map", 1, "model=toy", "data=toy", *shapes, *COMMON, "micro_batches=2")
    one = train(tmp_path / "one", 1, kind, "micro_batches=2")
    assert one.result["weights_sha256"] == expected.result["weights_sha256"]
    for ranks, workers in ((2, 2), (3, 0)):
        other = train(tmp_path / str(ranks), ranks, kind, f"loader.num_workers={workers}", "micro_batches=2")
        assert_equal(other, expected)
        steps = samples_of(other)
        assert list(steps) == [(step, step // 3) for step in range(10)]
        for (step, _), pairs in steps.items():
            sizes = range(step % 3 * 90, min(step % 3 * 90 + 90, NUM_TRAIN))
            assert [index for index, _ in pairs] == list(sizes)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["Walk", "Stateful"])
def test_a_resumed_run_reads_the_same_samples(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random samples in mid-epoch, on 2 ranks with 2 workers, then on 3 ranks without."""
    monkeypatch.chdir(tmp_path)
    whole = train(tmp_path / "whole", 2, kind, "loader.num_workers=2", size=6)
    expected = samples_of(whole)
    assert [index for pairs in expected.values() for index, _ in pairs] == list(range(60))
    assert all(target[4] == index for pairs in expected.values() for index, target in pairs)
    for ranks, workers in ((2, 2), (3, 0)):
        first = train(tmp_path / f"first{ranks}", 2, kind, "loader.num_workers=2", "max_steps=4", size=6)
        if kind == "Stateful":
            (tmp_path / "resumed").touch()
        again = run(
            tmp_path / f"again{ranks}",
            ranks,
            f"resume={first.path}",
            "max_steps=10",
            f"loader.num_workers={workers}",
        )
        (tmp_path / "resumed").unlink(missing_ok=True)
        assert samples_of(again) == expected
        if ranks == 2:
            assert again.result["weights_sha256"] == whole.result["weights_sha256"]
        else:
            assert again.result["metrics"] == pytest.approx(whole.result["metrics"], rel=1e-9)
    log = (again.path / "log.txt").read_text()
    assert "a stream of training and a stream of validation samples" in log
    assert ("loads the state of the stream" in log) == (kind == "Stateful")


@pytest.mark.parametrize("kind", ["Split", pytest.param("SplitSized", marks=pytest.mark.thorough)])
def test_each_rank_reads_its_part_of_a_stream_that_can_be_split(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step of an epoch has one sample, so two of three ranks have none; the run resumes on two ranks."""
    monkeypatch.chdir(tmp_path)
    whole = train(tmp_path / "whole", 1, kind, "micro_batches=2")
    three = train(tmp_path / "three", 3, kind, "micro_batches=2", "loader.num_workers=1")
    assert_equal(three, whole)
    assert samples_of(three) == samples_of(whole)
    for path in tmp_path.glob("part-*-3-*"):
        index = int(path.name.split("-")[1])
        assert {int(line) % 3 for line in path.read_text().split()} == {index}
    assert len(list(tmp_path.glob("part-*-3-*"))) >= 3
    assert "each of 3 ranks x 1 worker reads 1/3 of it" in (three.path / "log.txt").read_text()
    first = train(tmp_path / "first", 3, kind, "micro_batches=2", "max_steps=4")
    again = run(tmp_path / "again", 2, f"resume={first.path}", "max_steps=10", "loader.num_workers=2")
    assert samples_of(again) == samples_of(whole)
    assert again.result["metrics"] == pytest.approx(whole.result["metrics"], rel=1e-9)


def test_a_part_that_is_too_short_is_refused() -> None:
    stream = Stream(Shortened(True))
    stream.use_part(1, 2)
    with pytest.raises(
        ValueError, match=r"split\(1, 2\) ended after 75 samples, but the stream has at least 152; split"
    ):
        stream.load(140, 20)


def test_the_end_of_parts_is_that_of_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank finds the size of each step and the last step, for all remainders of the length."""
    monkeypatch.chdir(tmp_path)
    for length in range(1, 14):
        dataset = Split(True)
        dataset.samples = [(torch.tensor([number]), number) for number in range(length)]  # type: ignore[assignment]
        for count in (1, 2, 3):
            for index in range(count):
                stream = Stream(dataset)
                stream.use_part(index, count)
                for first in range(0, length + 4, 4):
                    left = max(0, length - first)
                    assert stream.load(first, 4)[::2] == (min(4, left), left <= 4), (length, count, index, first)
                    for position in range(first, first + min(4, left)):
                        assert stream[position][1] == position


def test_a_stream_that_is_shorter_than_its_length_fails() -> None:
    with seeded(0):
        stream = Stream(Overrated(True)).in_epoch(0)
    assert stream.load(170, 10)[::2] == (10, False)
    message = "the stream ended after 181 samples, but the stream's length is 362; correct __len__"
    with pytest.raises(ValueError, match=message):
        stream.load(180, 10)


def test_positions_are_read_in_any_order_and_the_end_is_detected() -> None:
    stream = Stream(Stateful(False))
    with seeded(0):
        stream.in_epoch(3)
    expected = [stream[position][1][4].item() for position in range(20)]
    assert expected == list(range(20))
    whole = torch.stack([stream[position][1] for position in range(20)])
    assert torch.equal(stream[7][1], whole[7]) and torch.equal(stream[3][1], whole[3])
    before = torch.get_rng_state()
    found, state, is_last = stream.load(5, 10)
    assert (found, state["number"], is_last) == (10, 15, False) and torch.equal(torch.get_rng_state(), before)
    assert stream.load(15, 5)[::2] == (5, True) and stream.load(15, 6)[::2] == (5, True)
    assert stream.load(25, 5)[::2] == (0, True)
    assert stream.load(15, 2, Position(15, state))[0] == 2
    assert torch.equal(stream[16][1], whole[16])


def test_each_iteration_starts_with_the_dataset_as_it_was_constructed() -> None:
    stream = Stream(Nested(True))
    with seeded(0):
        assert [stream.in_epoch(epoch)[position][1][4].item() for epoch in range(2) for position in range(3)] == [
            *(0.0, 1.0, 2.0, 0.0, 1.0, 2.0)
        ]
        assert [Stream(Opened(True))[position][1][4].item() for position in range(2)] == [0.0, 1.0]


def test_the_drawn_predictions_show_the_samples_that_were_evaluated() -> None:
    class Noise(Walk):
        def decode(self, sample: Any) -> Any:
            return sample[0] + torch.rand(10), 0

    source, cpu = Source.of(Stream(Noise(True))), torch.device("cpu")
    loader = Loader(source, Sampler(len(source), 4, seed=5), torch.float32, cpu)
    (batch,) = next(loader.steps(0)).micro_batches
    predictions = Predictions(source, 2, cpu, seed=5)
    predictions.add(torch.eye(2)[[0, 1, 0, 1]], batch.targets, batch.indices)
    assert torch.equal(torch.stack([sample for sample, *_ in predictions.samples()]), batch.inputs)


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("Toy", ["max_steps=null"], "max_steps=null: data=mine is a stream without a length; try max_steps=1000"),
        ("Toy", ["val_fraction=0.1"], "val_fraction=0.1 has no effect"),
        ("Toy", ["keep_samples=true"], "keep_samples=true needs map-style datasets, and data=mine is a stream"),
        ("Toy", ["loader.drop_last=true"], "loader.drop_last=true needs a stream with a length; define __len__"),
        ("Toy", ["loader.weights=data"], "loader.weights=data needs a map-style dataset"),
        ("Toy", ["scheduler=step"], "scheduler=step counts epochs, and data=mine is a stream without a length"),
        ("Unsafe", [], "data=mine: its state_dict cannot be stored; use only tensors"),
        ("Walk", ["eval_batches=null"], "eval_batches=null: data=mine is a stream without a length; define __len__"),
        (
            "Contiguous",
            [],
            r"data=mine: split\(0, 2\) does not return the sample at position 2; split\(index, count\) must yield the "
            "samples at the positions p with p % count == index, in their order, or be left out",
        ),
        ("Empty", [], "data=mine: its train split has no samples"),
    ],
)
def test_unsuitable_streams_and_keys_are_refused(kind: str, more: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        build_experiment(*overrides(tmp_path / kind, f"test_stream.{kind}", *more))
