"""precision=float8, emulated on the CPU."""

import sys
from pathlib import Path

import pytest
import torch
from parity import EXPERIMENTS
from torch import nn
from worlds import Run, build_experiment, run

from runner.errors import InputError
from runner.optimization.float8 import convert_linears

WORDS = (*EXPERIMENTS["transformer"], "epochs=9", "max_steps=4", "logger=none", "precision=float8")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of one process."""
    return run(tmp_path_factory.mktemp("one"), 1, *WORDS)


def test_only_the_layers_in_the_header_differ_from_bf16(one: Run, tmp_path: Path) -> None:
    bf16 = run(tmp_path, 1, *WORDS, "precision=bf16")
    assert max(abs(one.losses[step] - bf16.losses[step]) for step in one.losses) > 2e-3
    log = (one.path / "log.txt").read_text()
    assert "float8   embed, blocks.0.attention.query, blocks.0.attention.key and 10 more; the numbers differ " in log
    assert "emulated on this CPU; in bf16: head" in log


@pytest.mark.parametrize(
    ("num_ranks", "words", "tolerance"),
    [
        (2, "parallel=ddp micro_batches=5", 3e-4),
        (2, "parallel=fsdp activation_checkpointing=full", 3e-4),  # creates the weights after the conversion
        (2, "parallel=pipeline", 3e-4),
        (2, "parallel=zero", 3e-4),
        (3, "parallel=ps", 3e-4),
        (2, "parallel=fsdp parallel.mixed_precision=true", 3e-3),
        pytest.param(1, "compile=true", 3e-3, marks=pytest.mark.soak),
    ],
)
def test_modes_agree_because_scales_belong_to_rows(
    num_ranks: int, words: str, tolerance: float, one: Run, tmp_path: Path
) -> None:
    """The loss of bf16 differs by 1e-3."""
    made = run(tmp_path, num_ranks, *WORDS, *words.split())
    assert made.losses == pytest.approx(one.losses, rel=tolerance)
    assert made.grad_norms == pytest.approx(one.grad_norms, rel=30 * tolerance)


def test_adapters_and_an_evaluation_on_other_ranks(tmp_path: Path) -> None:
    one = run(tmp_path / "one", 1, *WORDS, "adapters=lora")
    two = run(tmp_path / "two", 2, *WORDS, "adapters=lora", "parallel=fsdp")
    assert two.losses == pytest.approx(one.losses, rel=3e-4)
    evaluated = run(tmp_path / "evaluated", 2, "task=evaluate", f"run={one.path}", "parallel=fsdp")
    assert evaluated.result["metrics"]["val/loss"] == pytest.approx(one.result["metrics"]["val/loss"], rel=1e-5)


def test_hooks_and_tied_weights_stay() -> None:
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 32, bias=False), nn.Linear(32, 16), nn.Linear(16, 5))
    model[2].weight = model[0].weight
    called = []
    model[0].register_forward_hook(lambda *_: called.append(0))
    (line,) = convert_linears(model, torch.device("cpu"))
    assert line.startswith("float8   0, 1, 2; ") and line.endswith("; in bf16: 3")
    inputs = torch.randn(3, 4, 32).transpose(0, 1)  # not contiguous
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(inputs)
    outputs.float().sum().backward()
    assert called == [0] and model[2].weight is model[0].weight and model[0].weight.grad is not None
    assert outputs.dtype == torch.bfloat16
    assert torch.equal(model[0](input=inputs), model[0](inputs))


def test_what_cannot_be_converted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"no nn\.Linear whose sizes are multiples of 16; try precision=bf16"):
        build_experiment(*EXPERIMENTS["toy"], "precision=float8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(InputError, match="precision=float8 needs a GPU with float8, such as an H100 or L4, not A100"):
        convert_linears(nn.Sequential(nn.Linear(16, 16)), torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(InputError, match=r"needs torchao; pip install 'experiment-runner\[float8\]'"):
        convert_linears(nn.Sequential(nn.Linear(16, 16)), torch.device("cpu"))
