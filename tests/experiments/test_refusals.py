"""Custom components that do not work together are refused in one or two lines with the fix, and nothing is written."""

import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import Commands
from ranks import RankError
from worlds import run

HERE = Path(__file__).parent
BASE = {
    "model": "net_of_two",
    "data": "points",
    "logger": "none",
    "max_steps": "3",
    "batch_size": "8",
    "backend": "gloo",
    "threads": "1",
}
# Overrides, and parts of the message in their order, separated by `...`.
TABLE = {
    # samples
    "data=threes": "needs samples (inputs, targets) ... [tensor [1, 4], tensor [1], tensor [1]] ... custom objective",
    "data=mappings": "needs samples (inputs, targets) ... {point: tensor [1, 4], kind: tensor [1]} ... custom",
    "data=raising": "its first samples cannot be collated into a batch with: KeyError: 'no sample 0' ... wrongs.py:",
    "data=dropping": "collate of Dropping got 2 samples ... a batch must contain every sample",
    "data=uncut_ahead": "a row for each of its 2 samples ... (tensor [2, 4], tensor [2], tensor []) ... leave",
    # losses
    "loss=vector": "loss=vector must return a scalar tensor, the mean ... not tensor [1]; set its reduction",
    "loss=floating": "loss=floating must return a scalar tensor, the mean ... not float; ... without calling item()",
    "loss._target_=torch.nn.CrossEntropyLoss +loss.reduction=sum": "loss.reduction=sum must be mean: ... try",
    "loss._target_=torch.nn.CrossEntropyLoss +loss.reduction=none": "must return a scalar tensor ... reduction to mean",
    "model.kind=mapping": "loss=auto: outputs are a dict, for which no loss is known",
    "model.kind=mapping loss=of_mapping metrics=accuracy": "metrics.accuracy: ... one tensor of outputs",
    "model.kind=square data=square": "loss.class_dim=null: ... [3, 3] ... first or last; set loss.class_dim=1 or -1",
    "loss=vector data.dtype=int16": "RuntimeError: ... the data contain int16: let the dataset convert ... long()",
    "data=bytes model=linear": "RuntimeError: ... inputs are integers: set data.divisor=1, or 255 for bytes",
    "data=bytes model=convnet 'data.sample_shape=[1,4,4]'": "(long int) ... integers: set data.divisor=1, or 255",
    "model.kind=one": "loss=auto: integer targets are classes, but for targets [] the model returns [1] ... loss=mse",
    # training mode
    "model.kind=auxiliary": "loss=auto fails for ... model=net_of_two in training, "
    "Outputs(classes: tensor [2, 3], auxiliary: tensor [2, 3]), with: ... write a custom objective",
    "model.kind=failing": "do not fit: in training for a sample ... KeyError: 'in training' (at ... wrongs.py:",
    # objectives
    "objective=one_number": "TypeError: OneNumber.loss must return (sum, weight) ... not Tensor",
    "objective=no_weight": "TypeError: NoWeight.loss must return (sum, weight) ... NoneType",
    "objective=failing": "TypeError: list indices must be integers ... (at ... wrongs.py:",
    "objective=not_one": "objective._target_=wrongs.NotOne: derive it from runner.Objective",
    "objective=fine loss=mse": "loss=mse has no effect on objective=fine, which takes none",
    "objective=fine metrics=accuracy": "metrics.accuracy: the objective returns no outputs ... or set metrics=none",
    # the names and patterns of losses
    "objective=missing": "AttributeError: 'Missing' object has no attribute 'discriminator'",
    "objective=listed": "Listed.losses=['loss'] must map names of losses to regular",
    "objective=no_losses": "NoLosses.losses={} must map names of losses",
    "objective=patterns 'objective.first=\"^third\"'": "losses['loss']='^third' matches no trained parameter; there",
    "objective=patterns 'objective.first=\"[\"'": "losses['loss']='[' is not a regular expression: unterminated",
    "objective=patterns 'objective.first=\"^first.bias\"'": "trains all parameters except first.weight; add it to",
    "objective=one_pattern 'objective.pattern=\"^first\"'": "trains all parameters except second.weight; add it to",
    "objective=one_pattern 'objective.pattern=\"^third\"'": "losses['loss']='^third' matches no trained parameter",
    # modes
    "objective=fine parallel=pipeline": "calls the model itself ... parallel=pipeline ... try ... ddp",
    "objective=patterns parallel=tp": "has 2 losses, which parallel=tp does not support; try ... ddp ... fsdp",
}


def args(line: str) -> list[str]:
    typed = shlex.split(line)
    chosen = {word.partition("=")[0] for word in typed}
    base = [f"{key}={value}" for key, value in BASE.items() if key not in chosen]
    return [f"--config-dir={HERE / 'wrong'}", *base, *typed]


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield


@pytest.mark.parametrize("line", TABLE)
def test_custom_components_are_refused_with_their_message(
    line: str, here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = here(*args(line))
    out, err = capfd.readouterr()
    assert (status, out) == (2, ""), err
    assert 1 <= err.count("\n") <= 3 and "Traceback" not in err
    assert_says(TABLE[line], err)
    assert not list(tmp_path.iterdir())


def test_a_collate_that_drops_samples_later_fails_with_its_message(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"collate of Dropping got 8 samples.*a batch must contain every sample"):
        run(tmp_path, 1, *args("data=dropping data.least=8"))


@pytest.mark.parametrize("task", [(), pytest.param(("task=evaluate",), marks=pytest.mark.thorough)])
def test_pipeline_refuses_samples_of_many_shapes_and_names_other_modes(task: tuple[str, ...], tmp_path: Path) -> None:
    typed = args("data=ragged parallel=pipeline")
    if task:  # a run trained in another mode
        typed.append(f"run={run(tmp_path, 1, *args('data=ragged')).path}")
    with pytest.raises(RankError, match=r"sends tensors of one shape.*try parallel=ddp, fsdp or tp"):
        run(tmp_path, 2, *typed, *task)


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_raises_later_fails_the_run_with_its_line(num_workers: int, commands: Commands) -> None:
    typed = args(f"data=raising_later loader.num_workers={num_workers}")
    done = commands.forked(*typed)
    assert done.returncode == 1
    assert "wrongs.py" in done.stdout and done.stdout.rstrip().endswith("KeyError: 'no sample 20'")


def assert_says(args: str, text: str) -> None:
    place = 0
    for part in args.split(" ... "):
        assert part in text[place:], f"{part!r} in {text[place:]!r}"
        place = text.index(part, place) + len(part)
