"""Random experiments in random modes equal one process in float64, or are refused before the run.

fuzz_parts.py defines the data, the parts of the models and the optimizers that are not torch's.
"""

import math
import os
import random
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from fuzz_parts import PARTS, READERS
from mode_cases import mesh
from ranks import RankError
from worlds import MODES, Run, build_experiment, run

from runner.errors import InputError

# The soak tier draws FUZZ_CELLS experiments, from the seed FUZZ_SEED on.
FIRST, NUMBER, PER_TEST = int(os.environ.get("FUZZ_SEED", "0")), int(os.environ.get("FUZZ_CELLS", "2000")), 20
SEEDS = [
    *(pytest.param(range(n, n + 10), id=f"{n}-{n + 9}", marks=pytest.mark.thorough) for n in range(10, 70, 10)),
    *(
        pytest.param(range(seed, seed + PER_TEST), id=str(seed), marks=pytest.mark.soak)
        for seed in range(FIRST, FIRST + NUMBER, PER_TEST)
    ),
]


# Parts with BatchNorm, or whose state depends on the number of forward passes.
STATES = {part for part in PARTS if part.startswith("state_")}
PER_PASS = {"conv", "batch_norm", "norm_block", "norm_act"} | STATES
SHARDED = ("block", "heads", "between_dropout", "between_noise", "between_tokens")  # parts with a tensor plan
# Parts that may differ from one process after a warning of this pattern in the header: the documentation lists them.
DRAWS = "so that results depend on the number of ranks and micro_batches"
WARNED = dict.fromkeys(("rrelu", "views", "transposed", "von_mises", "vectorized", "noisy_gradient"), DRAWS)
WARNED["noisy_gradient"] += "|hooks of its gradients draw them"
WARNED["shared"] = "a stage begins with a module of another stage"  # if the model also draws random numbers
WARNED |= {"state_list": r"\bcalls\b", "state_tensor": r"\blowered\b", "state_number": r"\btemperature\b"}
WEIGHTS = [0.2 if part in WARNED else 0.5 if part in STATES else 1 for part in PARTS]

CLASSES = "loss=cross_entropy"
LOSSES = [
    "loss=mse",
    CLASSES,
    f"{CLASSES} loss.label_smoothing=0.1",
    f"{CLASSES} loss.label_smoothing=0.2 loss.weight=[1,2,3,4,5]",
    f"{CLASSES} loss.ignore_index=0 loss.weight=[1,2,0.5,1,1]",
    "objective._target_=fuzz_parts.TwoTerms",
]
DTYPES = ["int64"] * 3 + ["uint8"] * 2 + ["int8", "int16", "int32", "bool"]  # of classes; bool only of two
TORCH, ADAM = "optimizer._target_=torch.optim", "optimizer=adam optimizer.eps=0.01"
UNFUSED = f"{ADAM} ~optimizer.fused"
OWN = "~optimizer.momentum ~optimizer.nesterov ~optimizer.weight_decay optimizer._target_"
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
    *(f"{OWN}={name}" for name in ("custom_optimizers.Langevin", "fuzz_parts.Normalized", "fuzz_parts.Lars")),
]
SCHEDULES = ["scheduler=step scheduler.every_epochs=1", "scheduler=cosine scheduler.warmup_steps=2"]
OPTIONS = [
    *("clip_grad_norm=0.2", "ema.decay=0.8", "eval_every_steps=2", "freeze=['first']", "loader.drop_last=true"),
    *("loader.shuffle=false", "optimizer.groups=[{match: 'bias$', lr: 0.01},{match: 'head', lr: 0.03}]"),
]
MODE_OPTIONS = {
    "ddp": "broadcast_buffers=false gradient_as_bucket_view=false bucket_cap_mb=0.001",
    "zero": "parameters_as_bucket_view=true parameters_as_bucket_view=false",
    "fsdp": "replicate=1 reshard_after_forward=false meta_init=false",
    "tp": "tensor=null",
    "pipeline": "schedule=GPipe schedule=GPipe schedule=1F1B schedule=ZBV schedule=Interleaved1F1B",
    "ps": "forward=local forward=local forward=remote",
    "local_sgd": "warmup_steps=100",
}
EVEN = {"fsdp": "parallel.replicate=2", "tp": "parallel.tensor=2"}  # for an even number of ranks
SHARDS = {f"parallel={mode}" for mode in ("zero", "fsdp", "tp", "mesh", "pipeline")}  # each rank updates a part
MESHES = ["1 2 1 1", "2 2 1 1", "1 1 1 2", "1 2 1 2", "2 1 1 2", "1 1 2 1", "1 2 2 1", "1 1 2 2"]


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
        python = f"seed {self.seed}: PYTHONPATH=tests/support python -m runner"
        spawn = "launcher=spawn launcher.nproc_per_node"
        return "\n".join(f"{python} {shlex.join(words)}{f' {spawn}={size}' * (size > 1)}" for size, words in runs)


def draw(seed: int) -> Cell:
    """Return a random experiment. Most of the combinations are supported; the others must be refused."""
    rng = random.Random(seed)
    loss, resumes = rng.choice(LOSSES), rng.random() < 0.3
    reader = rng.choice([*READERS]) if rng.random() < 0.3 else ""
    dtype = rng.choice(DTYPES if loss == CLASSES else DTYPES[:-1]) if CLASSES in loss else ""
    modes = [*MODES, "mesh"]
    if "TwoTerms" in loss and rng.random() < 0.9:
        modes = ["ddp", "allreduce", "zero", "fsdp"]
    weights = [2 if mode in ("fsdp", "pipeline", "tp", "mesh") else 1 for mode in modes]
    split = rng.choice((1, 2, 4))  # of a pipeline
    places = [_place(rng, mode, split) for mode in rng.choices(modes, weights, k=1 + resumes)]
    chosen = {words[0] for _, words in places}
    is_split = any("parallel.micro_batches" in word for _, words in places for word in words)
    parts = _draw_parts(rng, chosen, splits_layers=any("tensor=" in word for _, words in places for word in words))
    per_pass = bool(PER_PASS & {*parts})
    # BatchNorm sees each micro-batch separately: the reference has the same ones, each of two samples or more.
    count = rng.choice((1, 1, 2, 3)) if chosen != {"parallel=none"} else rng.choice((2, 3))
    pieces = count * split if is_split else count
    if per_pass and resumes and is_split and split > 1:  # the phases would have different micro-batches
        parts, per_pass = [part for part in parts if part not in PER_PASS] or ["linear"], False
    batch_size = rng.randint(2 * pieces, 2 * pieces + 12)
    rest = rng.choice((0, rng.randint(2 * pieces if per_pass else 1, batch_size)))
    stop, steps = sorted(rng.sample(range(1, 7), 2))
    optimizers = [each for each in OPTIMIZERS if "rotary" not in parts or "fused=true" not in each]
    if chosen & SHARDS and rng.random() < 0.9:
        optimizers = [each for each in optimizers if OWN not in each]
    optimizer = rng.choice(optimizers)
    model = "Net" if is_split else rng.choice(("Net", "Net", "Unstaged", "Outer"))
    data = ("Labeled" * (CLASSES in loss) + "Sequences") if reader else "Labels" * (CLASSES in loss)
    common = [
        f"model=linear model._target_=fuzz_parts.{model} +model.parts=[{','.join(parts)}] seed={rng.randint(0, 9)}",
        f"+model.reader={reader} data.sample_shape=[3,10]" if reader else "",
        f"data=toy data.num_train={rng.randint(1, 3) * batch_size + rest} data.num_val={rng.randint(1, 20)} epochs=9",
        f"data._target_=fuzz_parts.{data}" if data else "",
        "data.num_outputs=2" if dtype == "bool" else "",
        "metrics=[accuracy,f1,perplexity]" if CLASSES in loss and rng.random() < 0.5 else "",
        "train_metrics=true" if CLASSES in loss and not is_split and rng.random() < 0.25 else "",
        f"batch_size={batch_size} precision=fp64 logger=none checkpoint.every_epochs=9 checkpoint.keep_best=0 {loss}",
        f"optimizer.lr=0.02 {optimizer} {SCHEDULES[0] if resumes else rng.choice(SCHEDULES)}",  # a cosine needs the end
    ]
    first = [f"micro_batches={count}", *([f"+data.dtype={dtype}"] if dtype else [])]
    first += ["activation_checkpointing=full"] if rng.random() < 0.2 else []
    phases = []
    for index, (size, words) in enumerate(places):
        words = [*words, f"max_steps={stop if index < len(places) - 1 else steps}"]
        find_unused = "idle" in parts and words[0] in ("parallel=ddp", "parallel=zero")
        words += ["parallel.find_unused_parameters=true"] if find_unused else []
        phases.append((size, [*words, *([] if index else first)]))
    reference = [f"max_steps={steps}", f"micro_batches={pieces if per_pass else 1}"]
    reference += ["+data.dtype=int64"] if dtype else []
    options = [option for option in OPTIONS if rng.random() < 0.25]
    if "parallel=local_sgd" in chosen:
        options = [option for option in options if not option.startswith("ema")]
    return Cell(seed, [*" ".join(common).split(), *options], reference, phases)


def _place(rng: random.Random, mode: str, split: int) -> tuple[int, list[str]]:
    """Return a number of ranks and the overrides of a mode, in which a pipeline splits a micro-batch into `split`."""
    if mode == "mesh":
        axes = zip(("replicate", "shard", "stage", "tensor"), rng.choice(MESHES).split(), strict=True)
        size, words = mesh(" ".join(f"{axis}={number}" for axis, number in axes))
        return size, [*words, *([f"parallel.micro_batches={split}"] if "parallel.stage=2" in words else [])]
    sizes = {"none": (1,), "dp": (1,), "ps": (2, 3, 4), "tp": (1, 2, 2, 4)}
    size = rng.choice(sizes.get(mode, (1, 2, 2, 3, 3, 4)))
    words = [f"parallel={mode}"]
    words += [f"parallel.{rng.choice(MODE_OPTIONS[mode].split())}"] if mode in MODE_OPTIONS else []
    if mode in EVEN and size % 2 == 0 and rng.random() < 0.3:
        words = [words[0], EVEN[mode], *(["parallel.rest=fsdp"] if mode == "tp" and size == 4 else [])]
    return size, [*words, *([f"parallel.micro_batches={split}"] if mode == "pipeline" else [])]


def _draw_parts(rng: random.Random, chosen: set[str], splits_layers: bool) -> list[str]:
    """Return the names of some parts that the modes support together."""
    parts = rng.choices([*PARTS], WEIGHTS, k=rng.randint(1, 5))
    if splits_layers or "parallel=tp" in chosen:
        parts.insert(rng.randint(0, len(parts)), rng.choice(SHARDED))
    if chosen & SHARDS and rng.random() < 0.9:  # they refuse a forward that changes a parameter
        parts = ["linear" if part == "state_tensor" else part for part in parts]
    # BatchNorm may have separate statistics there; and one process in a single phase would be the reference itself.
    if {"parallel=local_sgd", "parallel=ps"} & chosen or chosen == {"parallel=none"}:
        parts = [part for part in parts if part not in PER_PASS] or ["linear"]
    return parts


@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize("seeds", SEEDS)
def test_random_experiments_equal_one_process(
    seeds: range, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    failed, num_same = [], 0
    for cell in map(draw, seeds):
        outcome, reason = compare(cell, tmp_path / str(cell.seed))
        num_same += outcome in ("equal", "warned")
        modes = [words[0].removeprefix("parallel=") for _, words in cell.phases]
        shown = re.sub("[0-9.]+", "N", reason)[:90] if outcome in ("refused", "warned") else ""
        record_property("fuzz", f"{modes[-1]} {outcome} {shown}")
        if outcome not in ("equal", "refused", "warned"):
            failed.append(f"{cell}\n    {outcome}: {reason}")
    assert not failed, "\n".join(failed)
    assert num_same >= 0.6 * len(seeds)  # the modes refuse the others by name


def test_a_difference_is_found(tmp_path: Path) -> None:
    words = "model=linear model._target_=fuzz_parts.Net +model.parts=[norm_block] data=toy data.num_train=9 logger=none"
    cell = Cell(0, [*words.split(), "epochs=1"], ["seed=0"], [(2, ["parallel=ddp", "sync_batchnorm=false"])])
    outcome, reason = compare(cell, tmp_path / "0")
    assert outcome == "different" and "train/loss" in reason and "by " in reason


def compare(cell: Cell, folder: Path) -> tuple[str, str]:
    """Return "equal", "refused", "warned", "different" or "failed", and the reason.

    The outcome is "warned" if the numbers differ after a warning that is documented for a part of the model.
    """
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
            # The quoted exception of a model that one process trains is neither a rule nor a fix.
            return ("failed" if re.search(r"\b[A-Z][a-z]+Error: ", refused[0]) else "refused"), refused[0]
    assert made is not None
    found = differences(made, run(folder / "reference", 1, *cell.common, *cell.reference))
    if not found:
        return "equal", ""
    warnings = [line for line in (made.path / "log.txt").read_text().splitlines() if line.startswith("warning: ")]
    parts = re.search(r"model\.parts=\[(.*?)\]", " ".join(cell.common))
    patterns = [WARNED[part] for part in parts[1].split(",") if part in WARNED] if parts else []
    expected = [line for line in warnings if any(re.search(pattern, line) for pattern in patterns)]
    return ("warned", expected[0]) if expected else ("different", "; ".join(found + warnings))


def differences(made: Run, reference: Run, tolerance: float = 1e-9) -> list[str]:
    """Return what differs of the logged values, the weights and the moving average, relative to their magnitude."""
    found = []
    for name in sorted({name for line in reference.lines for name in line if name.startswith(("train/", "val/"))}):
        # A metric that is not finite is null in the file.
        values, expected = (
            {step: math.nan if value is None else value for step, value in each.values(name).items()}
            for each in (made, reference)
        )
        kept = {step: value for step, value in values.items() if step in expected}  # a stop evaluates once more
        close = kept == pytest.approx(expected, rel=tolerance, abs=1e-12, nan_ok=True)
        if not close or (name == "train/loss" and values.keys() != kept.keys()):
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
