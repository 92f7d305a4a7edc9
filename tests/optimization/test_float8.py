"""precision=float8, emulated on the CPU."""

import sys
from pathlib import Path

import pytest
import torch
from parity import EXPERIMENTS
from torch import nn
from worlds import build_experiment, run

from runner.errors import InputError
from runner.optimization.float8 import convert_linears

WORDS = (*EXPERIMENTS["transformer"], "epochs=9", "max_steps=4", "logger=none", "precision=float8")


def test_modes_agree_because_scales_belong_to_rows(tmp_path: Path) -> None:
    """bf16 differs by 1e-3."""
    one = run(tmp_path / "one", 1, *WORDS)
    bf16 = run(tmp_path / "bf16", 1, *WORDS, "precision=bf16")
    assert max(abs(one.losses[step] - bf16.losses[step]) for step in one.losses) > 2e-3
    log = (one.path / "log.txt").read_text()
    assert "float8   embed, blocks.0.attention.query, blocks.0.attention.key and 10 more; the numbers differ " in log
    assert "emulated on this CPU; in bf16: head" in log
    for mode in ("ddp", "fsdp"):  # fsdp creates the weights after the conversion
        made = run(tmp_path / mode, 2, *WORDS, f"parallel={mode}")
        assert made.losses == pytest.approx(one.losses, rel=1e-4)
        assert made.grad_norms == pytest.approx(one.grad_norms, rel=0.005)


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
