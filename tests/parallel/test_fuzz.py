"""Random experiments in random modes equal one process in float64, or are refused before the run."""

import os
import random
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from custom_models import Block, Scale
from ranks import RankError
from runner.shipped.data.toy import ToyRegression
from torch import Tensor, nn
from worlds import MODES, Run, build_experiment, run

from runner.errors import InputError
from runner.objectives.objective import Objective

# The soak tier draws FUZZ_CELLS experiments, from the seed FUZZ_SEED on.
FIRST, NUMBER, PER_TEST = int(os.environ.get("FUZZ_SEED", "0")), int(os.environ.get("FUZZ_CELLS", "2000")), 20
SEEDS = [
    *(pytest.param(range(n, n + 10), id=f"{n}-{n + 9}", marks=pytest.mark.thorough) for n in range(10, 70, 10)),
    *(
        pytest.param(range(seed, seed + PER_TEST), id=str(seed), marks=pytest.mark.soak)
        for seed in range(FIRST, FIRST + NUMBER, PER_TEST)
    ),
]


class Labels(ToyRegression):
    """Samples whose target is the index of the largest output of the toy regression."""

    def __init__(self, train: bool, **options: Any):
        super().__init__(train, **options)
        self.targets = self.targets.argmax(1)


class TwoTerms(Objective):
    """A term of all samples, and one of the samples with a large first target."""

    terms: ClassVar = {"fit": 1.0, "size": 0.1}

    def loss(self, model: Any, batch: Any) -> Any:
        outputs, large = model(batch[0]), batch[1][:, 0] > -1
        fit = (outputs - batch[1]).square().mean(1)
        return {"fit": (fit.sum(), len(fit)), "size": (outputs[large].square().sum(), large.sum())}


class Buckets(nn.Embedding):
    """Adds the mean embedding of the rounded features."""

    def forward(self, features: Tensor) -> Tensor:
        return features + super().forward((2 * features + 6).long().clamp(0, 11)).mean(1)


class Rotary(nn.Module):
    """Rotates pairs of features by a complex buffer, and scales them by a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.polar(torch.ones(4), torch.arange(4.0)), persistent=False)
        self.scale = nn.Parameter(torch.polar(torch.ones(4), torch.full((4,), 0.5)))

    def forward(self, features: Tensor) -> Tensor:
        pairs = torch.view_as_complex(features.unflatten(1, (4, 2)))
        return torch.view_as_real(pairs * self.angles * self.scale).flatten(1)


class Noise(nn.Module):
    """Adds noise of each sample, in evaluation too, and a number that all samples share."""

    def forward(self, features: Tensor) -> Tensor:
        return features + 0.1 * torch.randn_like(features) + torch.rand(()).to(features)


class Idle(Block):
    """A block with a parameter that forward does not use."""

    def __init__(self) -> None:
        super().__init__(8)
        self.unused = nn.Parameter(torch.ones(3))


def _tokens(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 4)), *layers, nn.Flatten())


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 8, bias=False)),
    "tied": lambda: nn.Linear(8, 8),  # all of them have the same weight
    "shared": lambda: nn.Linear(8, 8),  # all of them are the same module
    "frozen": lambda: nn.Linear(8, 8).requires_grad_(False),
    "conv": lambda: _tokens(nn.Conv1d(2, 2, 3, padding=1), nn.BatchNorm1d(2), nn.Tanh()),
    "attention": lambda: _tokens(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)),
    "batch_norm": lambda: nn.BatchNorm1d(8, momentum=None, affine=False),
    "layer_norm": lambda: nn.LayerNorm(8),
    "group_norm": lambda: nn.GroupNorm(2, 8),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "buckets": lambda: Buckets(12, 8),
    "scale": Scale,
    "rotary": Rotary,
    "idle": Idle,
    "dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)),
    "noise": lambda: nn.Sequential(nn.Linear(8, 8), Noise()),
    "block": lambda: Block(8, dropout=0.2),
    "norm_block": lambda: Block(8, batch_norm=True),
}
BATCH_NORMS = {"conv", "batch_norm", "norm_block"}
RANDOM = {"attention", "dropout", "noise", "block"}


class Net(nn.Module):
    """A linear layer, some of PARTS, and a linear layer. (N, *sample_shape) -> (N, num_outputs)"""

    def __init__(self, sample_shape: Sequence[int], num_outputs: int, parts: Sequence[str]):
        super().__init__()
        self.first, self.head = nn.Linear(sample_shape[0], 8), nn.Linear(8, num_outputs)
        shared, tied = nn.Linear(8, 8), nn.Linear(8, 8).weight
        self.parts = nn.ModuleList(shared if part == "shared" else PARTS[part]() for part in parts)
        for name, part in zip(parts, self.parts, strict=True):
            if name == "tied":
                part.weight = tied

    def forward(self, inputs: Tensor) -> Tensor:
        for stage in self.stages():
            inputs = stage(inputs)
        return inputs

    def stages(self) -> list[nn.Module]:
        return [self.first, *self.parts, self.head]

    def tensor_plan(self) -> dict[str, str]:
        blocks = [index for index, part in enumerate(self.parts) if isinstance(part, Block)]
        return {f"parts.{i}.{name}": way for i in blocks for name, way in (("up", "colwise"), ("down", "rowwise"))}


CLASSES = "loss=cross_entropy data._target_=test_fuzz.Labels"
LOSSES = [
    "loss=mse",
    CLASSES,
    f"{CLASSES} loss.label_smoothing=0.2 loss.weight=[1,2,3,4,5]",
    f"{CLASSES} loss.ignore_index=0 loss.weight=[1,2,0.5,1,1]",
    "objective._target_=test_fuzz.TwoTerms",
]
TORCH, ADAM = "optimizer._target_=torch.optim", "optimizer=adam optimizer.eps=0.01"
UNFUSED = f"{ADAM} ~optimizer.fused"
# Adam and others divide a gradient by its size: a large eps hides the noise of gradients that are zero except for
# rounding, such as that of a bias before BatchNorm.
OPTIMIZERS = [
    "optimizer.nesterov=true optimizer.weight_decay=0.1",
    "optimizer.momentum=0 +optimizer.foreach=true",
    f"{ADAM} optimizer.fused=true +optimizer.amsgrad=true optimizer.weight_decay=0.1",
    f"{UNFUSED} {TORCH}.AdamW",
    f"{UNFUSED} {TORCH}.NAdam",
    f"{UNFUSED} {TORCH}.RAdam",
    f"{UNFUSED} {TORCH}.Adamax",
    f"{UNFUSED} ~optimizer.betas {TORCH}.Adagrad +optimizer.lr_decay=0.1",
    f"{UNFUSED} ~optimizer.betas {TORCH}.Adadelta",
    f"{UNFUSED} ~optimizer.betas {TORCH}.RMSprop +optimizer.momentum=0.5",
    f"~optimizer.momentum ~optimizer.nesterov {TORCH}.ASGD +optimizer.t0=2",
]
SCHEDULES = ["scheduler=step scheduler.every_epochs=1", "scheduler=cosine scheduler.warmup_steps=2"]
OPTIONS = [
    *("clip_grad_norm=0.2", "ema.decay=0.8", "eval_every_steps=2", "freeze=['^parts.0.']", "loader.drop_last=true"),
    *("loader.shuffle=false", "optimizer.groups=[{match: 'bias$', lr: 0.01},{match: '^head', weight_decay: 0.2}]"),
]
MODE_OPTIONS = {
    "ddp": "broadcast_buffers=false gradient_as_bucket_view=false bucket_cap_mb=0.001",
    "zero": "parameters_as_bucket_view=true parameters_as_bucket_view=false",
    "fsdp": "replicate=1 replicate=2 reshard_after_forward=false meta_init=false",
    "tp": "tensor=null rest=fsdp tensor=1",
    "pipeline": "schedule=GPipe schedule=GPipe schedule=1F1B schedule=ZBV schedule=Interleaved1F1B",
    "ps": "forward=local forward=local forward=remote",
    "local_sgd": "warmup_steps=100",
}


class Cell(NamedTuple):
    """The overrides of an experiment, those of its reference, and the one or two phases of a run: ranks, overrides."""

    seed: int
    common: list[str]
    reference: list[str]
    phases: list[tuple[int, list[str]]]

    def __str__(self) -> str:
        """Return the commands that repeat the reference and the run."""
        (size, first), *others = self.phases
        runs = [(1, self.common + self.reference), (size, self.common + first)]
        runs += [(size, ["resume=last", *words]) for size, words in others]
        python = f"seed {self.seed}: PYTHONPATH=tests/support:tests/parallel python -m runner"
        spawn = "launcher=spawn launcher.nproc_per_node"
        return "\n".join(f"{python} {shlex.join(words)}{f' {spawn}={size}' * (size > 1)}" for size, words in runs)


def draw(seed: int) -> Cell:
    """Return a random experiment. Most of the combinations are supported; the others must be refused."""
    rng = random.Random(seed)
    loss, resumes = rng.choice(LOSSES), rng.random() < 0.3
    # A run of one process in a single phase would be the reference itself.
    modes = [mode for mode in MODES if mode != "none" or resumes]
    if "TwoTerms" in loss and rng.random() < 0.9:
        modes = ["ddp", "allreduce", "zero", "fsdp"]
    chosen = rng.choices(modes, [2 if mode in ("fsdp", "pipeline", "tp") else 1 for mode in modes], k=1 + resumes)
    parts = rng.choices([*PARTS], k=rng.randint(1, 5)) + (["block"] if "tp" in chosen else [])
    if {"local_sgd", "ps"} & {*chosen}:  # BatchNorm may have separate statistics there
        parts = [part for part in parts if part not in BATCH_NORMS] or ["linear"]
    if RANDOM & {*parts} and parts.count("shared") > 1:  # pipeline warns that random numbers differ
        parts = ["linear" if part == "shared" else part for part in parts]
    has_norm = bool(BATCH_NORMS & {*parts})
    # BatchNorm sees each micro-batch separately: the reference has the same ones, each of two samples or more.
    count, split = rng.choice((1, 1, 2, 3)), 1 if has_norm and resumes else rng.choice((1, 2, 4))
    pieces = count * split if "pipeline" in chosen else count
    batch_size = rng.randint(2 * pieces, 2 * pieces + 12)
    rest = rng.choice((0, rng.randint(2 * pieces if has_norm else 1, batch_size)))
    stop, steps = sorted(rng.sample(range(1, 7), 2))
    optimizer = rng.choice([each for each in OPTIMIZERS if "rotary" not in parts or "fused=true" not in each])
    common = [
        f"model=linear model._target_=test_fuzz.Net +model.parts=[{','.join(parts)}] seed={rng.randint(0, 9)}",
        f"data=toy data.num_train={rng.randint(1, 3) * batch_size + rest} data.num_val={rng.randint(1, 20)} epochs=9",
        f"batch_size={batch_size} precision=fp64 logger=none checkpoint.every_epochs=9 checkpoint.keep_best=0 {loss}",
        f"optimizer.lr=0.02 {optimizer} {SCHEDULES[0] if resumes else rng.choice(SCHEDULES)}",  # a cosine needs the end
        "activation_checkpointing=full" if "block" in parts and rng.random() < 0.5 else "",
    ]
    phases = []
    for index, mode in enumerate(chosen):
        size = 1 if mode in ("none", "dp") else rng.choice((2, 3, 4) if mode == "ps" else (1, 2, 2, 3, 3, 4))
        words = [f"parallel={mode}", f"max_steps={stop if index < len(chosen) - 1 else steps}"]
        words += [f"parallel.{rng.choice(MODE_OPTIONS[mode].split())}"] if mode in MODE_OPTIONS else []
        words += [f"parallel.micro_batches={split}"] if mode == "pipeline" else []
        words += ["parallel.find_unused_parameters=true"] if mode in ("ddp", "zero") and "idle" in parts else []
        phases.append((size, [*words, *([] if index else [f"micro_batches={count}"])]))
    reference = [f"max_steps={steps}", f"micro_batches={pieces if has_norm else 1}"]
    options = [option for option in OPTIONS if rng.random() < 0.25]
    return Cell(seed, [*" ".join(common).split(), *options], reference, phases)


@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize("seeds", SEEDS)
def test_random_experiments_equal_one_process(
    seeds: range, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    failed, num_equal = [], 0
    for cell in map(draw, seeds):
        outcome, reason = compare(cell, tmp_path / str(cell.seed))
        num_equal += outcome == "equal"
        modes = [words[0].removeprefix("parallel=") for _, words in cell.phases]
        record_property("fuzz", f"{modes[-1]} {outcome} {re.sub('[0-9.]+', 'N', reason)[:90] * (outcome == 'refused')}")
        if outcome not in ("equal", "refused"):
            failed.append(f"{cell}\n    {outcome}: {reason}")
    assert not failed, "\n".join(failed)
    assert num_equal >= 0.6 * len(seeds)


def test_a_difference_is_found(tmp_path: Path) -> None:
    words = "model=linear model._target_=test_fuzz.Net +model.parts=[norm_block] data=toy data.num_train=9 logger=none"
    cell = Cell(0, [*words.split(), "epochs=1"], ["seed=0"], [(2, ["parallel=ddp", "sync_batchnorm=false"])])
    outcome, reason = compare(cell, tmp_path / "0")
    assert outcome == "different" and "train/loss" in reason and "by " in reason


def compare(cell: Cell, folder: Path) -> tuple[str, str]:
    """Return "equal", "refused", "different" or "failed", and the reason."""
    assert len(cell.phases) > 1 or "parallel=none" not in cell.phases[0][1], "the reference itself"
    folder.mkdir()
    made: Run | None = None
    for size, words in cell.phases:
        try:
            made = run(folder / "made", size, *(cell.common if made is None else [f"resume={made.path}"]), *words)
        except (InputError, RankError) as error:
            refused = [str(error)] if isinstance(error, InputError) else re.findall(r"InputError: (.*)", str(error))
            if not refused or "JobFailed" in str(error) or (made is None and list(folder.glob("made/run/*"))):
                return "failed", str(error)
            # The mode must be the reason, not the experiment, of which this would raise InputError.
            build_experiment(*cell.common, *cell.reference)
            return "refused", refused[0]
    assert made is not None
    found = differences(made, run(folder / "reference", 1, *cell.common, *cell.reference))
    return ("different", "; ".join(found)) if found else ("equal", "")


def differences(made: Run, reference: Run, tolerance: float = 1e-9) -> list[str]:
    """Return what differs of the logged values, the weights and the moving average, relative to their magnitude."""
    found = []
    for name in sorted({name for line in reference.lines for name in line if name.startswith(("train/", "val/"))}):
        values, expected = made.values(name), reference.values(name)
        kept = {step: value for step, value in values.items() if step in expected}  # a stop evaluates once more
        if kept != pytest.approx(expected, rel=tolerance, abs=1e-12) or (name == "train/loss" and values != kept):
            found.append(f"{name} {values} instead of {expected}")
    one, other = (
        {(kind, name): tensor for kind in ("model", "average") for name, tensor in state.get(kind, {}).items()}
        for state in (made.state, reference.state)
    )
    found += [f"only in one of them: {name}" for name in one.keys() ^ other.keys()]
    for name in one.keys() & other.keys():
        error = (one[name] - other[name]).abs().max().item()
        if not error <= tolerance * max(1.0, other[name].abs().max().item()):
            found.append(f"{name} by {error:.1e}")
    return found
