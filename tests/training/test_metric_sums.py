"""Metrics over ranks: the same value at any world size, also for torchmetrics and for rows of single samples."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from ranks import run_ranks

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.errors import InputError
from runner.input.sampler import Sampler
from runner.training.metrics.class_counts import F1
from runner.training.metrics.classification import Accuracy
from runner.training.metrics.contract import Rows
from runner.training.metrics.metric_sums import MetricSums
from runner.training.metrics.torchmetrics_adapter import TorchMetric

pytestmark = pytest.mark.skipif(find_spec("torchmetrics") is None, reason="needs the extra metrics")

NUM_SAMPLES, NUM_CLASSES = 61, 5


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=generator)
    scores = torch.randn(NUM_SAMPLES, NUM_CLASSES, generator=generator)
    return (scores + 2 * torch.nn.functional.one_hot(targets, NUM_CLASSES)).softmax(-1), targets


class Spearman:
    """The rank correlation of all samples in their order, which cannot be computed from sums."""

    higher_is_better = None

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
        return {"pairs": Rows(torch.stack([outputs[:, 0].double(), targets.double()], dim=1))}

    def compute(self, sums: dict[str, torch.Tensor]) -> dict[str, Any]:
        pairs = sums["pairs"]
        places = pairs.argsort(dim=0).argsort(dim=0).double()
        return {"it": torch.corrcoef(places.T)[0, 1], "first": pairs[0, 0], "last": float(pairs[-1, 0])}


def spread_over(world_size: int, make: Callable[[], Mapping[str, Any]], idle_rank: bool = False) -> dict[str, float]:
    """Return the metrics that each rank computes. An idle rank has no outputs, as in a pipeline."""
    outputs, targets = samples()
    data_ranks = world_size - idle_rank

    def evaluate(rank: int, world_size: int) -> dict[str, float]:
        world = World(RankInfo(rank, rank, world_size, world_size), None, Backend())
        sums = MetricSums(make(), outputs[:1], targets[:1])
        sums.add(outputs, targets, range(NUM_SAMPLES))  # sums of an earlier evaluation must not count
        sums.reset(world.device)
        sampler = Sampler(
            NUM_SAMPLES, 7, data_rank=rank if rank < data_ranks else None, data_ranks=data_ranks, shuffle=False
        )
        for share in sampler.local_batches(0):
            if share:
                sums.add(outputs[share], targets[share], share)
        return sums.compute(world.collectives.sum(sums.flat()), world)

    if world_size == 1:
        return evaluate(0, 1)
    first, *others = run_ranks(evaluate, world_size)
    assert all(other == first for other in others)
    return first


def of_torchmetrics() -> dict[str, Any]:
    from torchmetrics_examples import torchmetrics_by_name

    return torchmetrics_by_name(NUM_CLASSES)


def test_metrics_do_not_depend_on_the_world_size_and_equal_those_of_all_samples_at_once() -> None:
    """Built-in metrics are bit-identical. An idle rank has no outputs."""

    def make() -> dict[str, Any]:
        built_in = {"accuracy": Accuracy(), "f1": F1(per_class=True), "spearman": Spearman()}
        return built_in | {name: TorchMetric(name, metric) for name, metric in of_torchmetrics().items()}

    outputs, targets = samples()
    expected: dict[str, float] = {}
    for name, metric in of_torchmetrics().items():
        value = metric(outputs, targets)
        if isinstance(value, dict):
            expected[f"{name}/sum"] = value["sum"].item()
            continue
        expected |= {f"{name}/{n}": v.item() for n, v in enumerate(value)} if value.dim() else {name: value.item()}
    alone = spread_over(1, make)
    assert {name: alone[name] for name in expected} == pytest.approx(expected, rel=1e-7)
    assert alone["accuracy"] == (outputs.argmax(-1) == targets).double().mean().item()
    assert alone["spearman/first"] == outputs[0, 0].item() and alone["spearman/last"] == outputs[-1, 0].item()
    for world_size, idle_rank in ((2, False), (3, True)):
        spread = spread_over(world_size, make, idle_rank)
        assert spread == pytest.approx(alone, abs=1e-12)
        assert {name: spread[name] for name in alone if name not in expected} == {
            name: value for name, value in alone.items() if name not in expected
        }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torchmetrics_accepts_outputs_in_reduced_precision(dtype: torch.dtype) -> None:
    outputs, targets = samples()
    outputs = outputs.to(dtype)
    sums = MetricSums({name: TorchMetric(name, m) for name, m in of_torchmetrics().items()}, outputs[:1], targets[:1])
    sums.add(outputs, targets, range(NUM_SAMPLES))
    values = sums.compute(sums.flat(), World(RankInfo(), None, Backend()))
    assert values["detections/sum"] == of_torchmetrics()["detections"](outputs, targets)["sum"].item()


def test_rows_have_the_precision_of_the_evaluation() -> None:
    third = torch.full((4, 1), 1 / 3, dtype=torch.float64)

    def evaluate(rank: int, world_size: int) -> dict[str, float]:
        world = World(RankInfo(rank, rank, world_size, world_size), None, Backend())
        mine = Given(lambda o, t: Rows(o[:, 0]), lambda rows: rows.max())
        sums = MetricSums({"mine": mine}, third[:1].float(), third[:1])
        if rank:  # the first rank has no outputs
            sums.add(third, third, range(4))
        return sums.compute(world.collectives.sum(sums.flat()), world)

    assert run_ranks(evaluate, 2) == [{"mine": 1 / 3}] * 2


class Given:
    """A metric that returns a given value."""

    higher_is_better = True

    def __init__(self, update: Callable[[torch.Tensor, torch.Tensor], Any], compute: Callable[[Any], Any] = float):
        self.update, self.compute = update, compute


REFUSED = {
    "update must return a tensor of sums, or a pytree of them, not [float]": Given(lambda o, t: [1.0]),
    "update must return a tensor of sums, or a pytree of them, not Rows(tensor: tensor [])": Given(
        lambda o, t: Rows(torch.tensor(1.0))
    ),
    "update returned tensor [2], and another structure or shape for one sample; sum over the samples of a batch": Given(
        lambda o, t: o.argmax(-1) == t
    ),
    "update must return twice the values for a batch of one sample twice; return sums over the samples, and divide in "
    "compute": Given(lambda o, t: o.mean()),
    "compute must return a number, or a mapping of numbers by name, not a value of type str": Given(
        lambda o, t: o.sum(), lambda sums: "good"
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_class_that_is_not_a_metric_is_refused_with_its_name(message: str) -> None:
    outputs, targets = samples()
    with pytest.raises(InputError) as raised:
        MetricSums({"good": Accuracy(), "mine": REFUSED[message]}, outputs[:1], targets[:1])
    assert raised.value.messages == [f"metrics.mine: {message}"]


def test_an_exception_of_a_custom_metric_is_reported_with_its_line() -> None:
    def lookup(outputs: torch.Tensor) -> Any:
        return outputs.missing  # type: ignore[attr-defined]

    outputs, targets = samples()
    with pytest.raises(InputError) as raised:
        MetricSums({"mine": Given(lambda o, t: o.sum(), lookup)}, outputs[:1], targets[:1])
    assert raised.value.messages == [
        "metrics.mine: compute fails for one sample with: AttributeError: 'Tensor' object has no attribute 'missing' "
        f"(at {__file__}:{lookup.__code__.co_firstlineno + 1})"
    ]
    sums = MetricSums({"mine": Given(lambda o, t: o.sum() if len(t) < 9 else o)}, outputs[:1], targets[:1])
    with pytest.raises(ValueError, match=r"update returned tensor \[61, 5\], and another") as later:
        sums.add(outputs, targets, range(NUM_SAMPLES))
    assert later.value.__notes__ == ["raised by metrics.mine in update"]
