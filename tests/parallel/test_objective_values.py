"""Named terms, logged values and losses over the whole batch, compared with one process and with a plain torch loop."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mode_cases import tier
from parity import COMMON, assert_equal
from torch import Tensor
from worlds import Run, build_experiment, configure, run

from runner import InputError, Objective

# An epoch has five steps; the last one has a single sample, so that the other ranks have none.
DIGITS = (
    "model=mlp",
    "model.hidden=[16]",
    "data.sample_shape=[1,8,8]",
    "batch_size=359",
    "loader.shuffle=false",
    *COMMON,
)
HERE = "objective._target_=test_objective_values"
MODES = ("none", "ddp", "allreduce", "zero", "fsdp")


class Detection(Objective):
    """The class of each image, and numbers of the images that contain an object."""

    logged = ("objects",)

    def __init__(self, box: float = 0.3):
        self.terms = {"classes": 1.0, "boxes": box}

    def loss(self, model: Any, batch: Any) -> Any:
        outputs, found = model(batch[0]), batch[1] < 3
        self.log("objects", found.sum(), len(found))
        classes = F.binary_cross_entropy_with_logits(outputs[:, 0], found.to(outputs), reduction="sum")
        boxes = ((outputs[found, 1:5] - batch[0].flatten(1)[found, 30:34]) ** 2).sum()
        return {"classes": (classes, len(found)), "boxes": (boxes, found.sum())}


class Contrast(Objective):
    """InfoNCE: which of the other views of all samples belongs to a sample."""

    gathers = True

    def loss(self, model: Any, batch: Any) -> Any:
        one, other = model(batch[0]), model(batch[0].flip(-1))
        others, first = self.gather(other)
        targets = first + torch.arange(len(one))
        return F.cross_entropy(one @ others.T, targets, reduction="sum"), len(one)


class Ungathered(Contrast):
    gathers = False

    def gather(self, rows: Tensor) -> Any:
        return rows, 0


def of(objective: type, *overrides: str) -> tuple[str, ...]:
    return (*DIGITS, f"{HERE}.{objective.__name__}", *overrides)


def marked(mode: str, size: int, micro_batches: int = 1) -> Any:
    by_default = (mode, size, micro_batches) in (("fsdp", 2, 2), ("none", 1, 2), ("ddp", 3, 1))
    return pytest.param(
        mode, size, micro_batches, marks=tier(by_default, (size, micro_batches) == (3, 1) and mode != "allreduce")
    )


CELLS = [(mode, size) for mode in MODES for size in ((1,) if mode == "none" else (2, 3))]


@pytest.mark.parametrize(
    ("mode", "size", "micro_batches"), [marked(*cell, number) for cell in CELLS for number in (1, 2)]
)
def test_terms_and_logged_values_equal_one_process(
    mode: str, size: int, micro_batches: int, one_process: Callable[..., Run], tmp_path: Path
) -> None:
    made = run(tmp_path, size, *of(Detection), f"parallel={mode}", f"micro_batches={micro_batches}")
    assert_equal(made, one_process(*of(Detection)))
    for name in ("train/classes", "train/boxes", "train/objects", "val/objects", "val/boxes"):
        assert made.values(name) == pytest.approx(one_process(*of(Detection)).values(name), rel=1e-9)


@pytest.mark.parametrize(("mode", "size", "micro_batches"), [marked(*cell) for cell in CELLS if cell[0] != "none"])
def test_a_loss_over_the_whole_batch_equals_one_process(
    mode: str, size: int, micro_batches: int, one_process: Callable[..., Run], tmp_path: Path
) -> None:
    assert_equal(run(tmp_path, size, *of(Contrast), f"parallel={mode}"), one_process(*of(Contrast)))


def loss_of_detection(outputs: Tensor, images: Tensor, targets: Tensor, model: Any) -> Tensor:
    found = targets < 3
    classes = F.binary_cross_entropy_with_logits(outputs[:, 0], found.to(outputs))
    boxes = (outputs[found, 1:5] - images.flatten(1)[found, 30:34]) ** 2
    return classes + 0.3 * (boxes.sum(1).mean() if found.any() else 0.0)


def loss_of_contrast(outputs: Tensor, images: Tensor, targets: Tensor, model: Any) -> Tensor:
    return F.cross_entropy(outputs @ model(images.flip(-1)).T, torch.arange(len(images)))


@pytest.mark.parametrize(
    ("objective", "loss"), [(Detection, loss_of_detection), (Contrast, loss_of_contrast)], ids=["terms", "gathered"]
)
def test_the_losses_are_those_of_a_torch_loop(
    objective: type, loss: Callable[..., Tensor], one_process: Callable[..., Run]
) -> None:
    made = one_process(*of(objective))
    experiment = build_experiment(*of(objective))
    model = experiment.recipe.module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for step in [*experiment.train_loader.steps(0, 0), *experiment.train_loader.steps(1, 0)]:
        (micro_batch,) = step.micro_batches
        value = loss(model(micro_batch.inputs), micro_batch.inputs, micro_batch.targets, model)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert [*made.losses.values()] == pytest.approx(losses, rel=1e-12)


def test_a_loss_that_compares_samples_is_detected() -> None:
    (warning,) = build_experiment(*of(Ungathered)).warnings
    assert "the loss of two samples is" in warning and "self.gather" in warning
    assert build_experiment(*of(Contrast)).warnings == build_experiment(*of(Detection)).warnings == []


class LocalMixup(Objective):
    """Mixes the rows of a rank, in training only."""

    def loss(self, model: Any, batch: Any) -> Any:
        inputs, targets = batch
        fraction = torch.distributions.Beta(0.2, 0.2).sample().item() if model.training else 1.0
        outputs = model(fraction * inputs + (1 - fraction) * inputs.flip(0))
        losses = [F.cross_entropy(outputs, each, reduction="sum") for each in (targets, targets.flip(0))]
        return fraction * losses[0] + (1 - fraction) * losses[1], len(targets)


class Separate(Objective):
    """Noise, dropout and BatchNorm, and a number that all samples share."""

    def loss(self, model: Any, batch: Any) -> Any:
        noisy = batch[0] + 0.1 * torch.randn_like(batch[0]) if model.training else batch[0]
        scale = torch.rand(()) if model.training else 1.0
        return scale * F.cross_entropy(model(noisy), batch[1], reduction="sum"), len(batch[1])


class Net(torch.nn.Module):
    """A network that shifts its features in training by those of the next sample of the rank."""

    def __init__(self, batch_norm: bool, dropout: float, shift: float = 0.0, **_: Any):
        super().__init__()
        norm = torch.nn.BatchNorm1d(16, track_running_stats=batch_norm)
        self.first = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), norm, torch.nn.Dropout(dropout))
        self.last, self.shift = torch.nn.Linear(16, 10), shift

    def forward(self, images: Tensor) -> Tensor:
        features = self.first(images)
        return self.last(features + self.shift * features.roll(1, 0) if self.training else features)


NORM = ("model.dropout=0.5", "model.batch_norm=true", "batch_size=360")  # a single sample would be refused
NET = (*DIGITS, "batch_size=360", "model._target_=test_objective_values.Net", "model.dropout=0.5")


def test_a_loss_that_compares_samples_only_in_training_is_detected() -> None:
    (warning,) = build_experiment(*of(LocalMixup)).warnings
    assert "the loss of two samples in training is" in warning and "self.gather" in warning
    (warning,) = build_experiment(*of(LocalMixup, *NORM)).warnings
    assert "the loss of two samples in training is" in warning
    (warning,) = build_experiment(*NET, "+model.shift=0.5").warnings
    assert warning.startswith("model=") and "the loss of two samples in training is" in warning


def test_random_numbers_and_batch_norm_do_not_count_as_a_comparison_of_samples() -> None:
    assert not build_experiment(*of(Separate, *NORM)).warnings
    for tracks in ("true", "false"):
        assert not build_experiment(*NET, f"model.batch_norm={tracks}", f"{HERE}.Separate").warnings
        assert not build_experiment(*NET, f"model.batch_norm={tracks}").warnings


class Mixup(Objective):
    """Zhang et al., "mixup", 2018. The partner of a sample may be on another rank."""

    gathers = True

    def loss(self, model: Any, batch: Any) -> Any:
        inputs, targets = batch
        fraction = torch.distributions.Beta(0.2, 0.2).sample().item() if model.training else 1.0
        outputs = model(fraction * inputs + (1 - fraction) * self.partners(inputs))
        losses = [F.cross_entropy(outputs, each, reduction="sum") for each in (targets, self.partners(targets))]
        return fraction * losses[0] + (1 - fraction) * losses[1], len(targets)

    def partners(self, rows: Tensor) -> Tensor:
        """Return the partner of each local row: the rows of all ranks in reverse order."""
        of_all_ranks, first = self.gather(rows)
        return of_all_ranks.flip(0)[first : first + len(rows)]


@pytest.mark.parametrize("size", [2, 3])
def test_mixup_with_gathered_partners_equals_one_process(
    size: int, one_process: Callable[..., Run], tmp_path: Path
) -> None:
    assert_equal(run(tmp_path, size, *of(Mixup, "parallel=ddp")), one_process(*of(Mixup)))


@pytest.mark.parametrize(
    ("objective", "overrides", "message"),
    [
        (Contrast, ["micro_batches=2"], "^micro_batches=2 splits the samples that .* try micro_batches=1"),
        (Contrast, ["parallel=tp"], "needs all samples of a step, which parallel=tp .*=none, ddp, allreduce, zero"),
        (Detection, ["monitor=val/objects"], "set monitor_direction=max or monitor_direction=min"),
        (Detection, ["parallel=local_sgd"], "has named terms, which parallel=local_sgd does not support"),
    ],
)
def test_unsupported_options_of_an_objective_are_refused(objective: type, overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_experiment(*of(objective, *overrides))


class Wrong(Objective):
    terms: Mapping[str, float] = {"one": 1.0}

    def loss(self, model: Any, batch: Any) -> Any:
        return {"two": (model(batch[0]).sum(), 1)}


class Undeclared(Objective):
    def loss(self, model: Any, batch: Any) -> Any:
        self.log("speed", 1.0)
        return model(batch[0]).sum(), len(batch[0])


class Grouped(Objective):
    def loss(self, model: Any, batch: Any) -> Any:
        return model(batch[0]).sum() * torch.distributed.get_rank(), len(batch[0])


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (Wrong, r"Wrong.loss must return {name: \(sum, weight\)} with the names \['one'\]"),
        (Undeclared, "add 'speed' to Undeclared.logged"),
        (Grouped, "a dry run has no process group: to gather rows of all ranks, use Objective.gather"),
    ],
)
def test_mistakes_in_an_objective_are_reported_before_the_run(objective: type, message: str) -> None:
    configure(*of(objective))
    with pytest.raises(InputError, match=message):
        build_experiment(*of(objective))


class Distillation(Objective, torch.nn.Module):
    """Imitates a teacher with dropout, which the constructor puts in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.Dropout())
        self.teacher.eval().requires_grad_(False)

    def loss(self, model: Any, batch: Any) -> Any:
        return ((model(batch[0]) - self.teacher(batch[0])) ** 2).sum(), len(batch[0])


def test_a_teacher_in_an_objective_stays_in_evaluation_mode(tmp_path: Path) -> None:
    options = (*DIGITS, f"{HERE}.Distillation", "max_steps=3", "metrics=none")
    never, always = (run(tmp_path / n, 1, *options, f"eval_every_steps={n}") for n in ("9", "1"))
    assert always.result["weights_sha256"] == never.result["weights_sha256"]
