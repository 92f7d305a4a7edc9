"""Values that are read from the device later: their order, and no step that waits for the device.

A GPU is imitated: tensors on the CPU count as those of a device that is still computing when an operator has returned.
"""

import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from mode_cases import tier
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import run

from runner.distributed import readings
from runner.distributed.readings import Readings
from runner.input.batch import StepBatch
from runner.training.trainer import Trainer

TINY = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=200", "logger=none")
TINY += ("precision=fp64", "max_steps=10", "log_every=2", "eval_every_steps=5", "checkpoint.every_steps=3")
# Functions that may read: values that are copied, checkpoints, and the comparison of buffers in steps 1, 2, 4, 8, ...
MAY_WAIT = {"_use_first", "_save", "gather_objects"}
WAITS = {
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "equal",
    "masked_select",
}  # .item(), .tolist(), bool() and others


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "ASYNCHRONOUS", {"cpu"})


class NoWaiting(TorchDispatchMode):
    """Raises AssertionError if the host reads a value in a function that may not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in WAITS:
            stack = traceback.extract_stack()
            assert any(frame.name in MAY_WAIT for frame in stack), "".join(traceback.format_list(stack[-8:]))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch, like_a_gpu: None) -> None:
    step = Trainer.step

    def watched(self: Trainer, batch: StepBatch) -> None:
        with NoWaiting() if self.state.step else nullcontext():  # the first step of a pipeline waits for its peers
            step(self, batch)

    monkeypatch.setattr(Trainer, "step", watched)


def test_values_are_used_in_order_at_the_end_of_the_next_step(like_a_gpu: None) -> None:
    late, used = Readings(), list[Any]()
    for step in range(3):
        values = torch.tensor([float(step)])
        late.add(values, lambda values: used.extend(values.tolist()))
        values.fill_(-1)
        late.end_step()
        late.then(lambda step=step: used.append(f"after {step}"))  # type: ignore[misc]
        assert len(used) == 2 * step
    late.flush()
    assert used == [0, "after 0", 1, "after 1", 2, "after 2"]
    late.then(lambda: used.append("at once"))
    assert used[-1] == "at once"


def test_after_an_error_nothing_is_used(like_a_gpu: None) -> None:
    late, used = Readings(), list[Any]()
    late.add(torch.zeros(1), lambda values: 1 / 0)  # type: ignore[arg-type, return-value]
    late.add(torch.ones(1), lambda values: used.append(values))
    with pytest.raises(ZeroDivisionError):
        late.flush_complete()
    late.flush()
    assert not used


def test_on_the_cpu_values_are_used_at_once() -> None:
    used = list[Any]()
    Readings().add(torch.ones(1), lambda values: used.append(values.item()))
    assert used == [1]


@pytest.mark.cpu("imitates a GPU, whose values are read a step later")
@pytest.mark.parametrize(
    ("mode", "ranks"),
    [
        ("none", 1),
        ("ddp", 2),
        *(pytest.param(m, 2, marks=tier(m == "pipeline", m in ("fsdp", "tp"))) for m in ("allreduce", "zero", "fsdp")),
        *(pytest.param(m, 2, marks=tier(m == "pipeline", m == "tp")) for m in ("tp", "pipeline", "local_sgd")),
    ],
)
def test_no_step_waits_for_the_device_and_the_records_are_equal(
    mode: str, ranks: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    words = (*TINY, f"parallel={mode}", "clip_grad_norm=1.0", "loss_spike=50", "loader.drop_last=true")
    words = words[: -2 if mode == "local_sgd" else None]
    at_once = run(tmp_path / "cpu", ranks, *words)
    request.getfixturevalue("no_waiting")
    late = run(tmp_path / "gpu", ranks, *words)

    def records(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in lines]

    assert records(late.lines) == records(at_once.lines)
    assert [line.keys() for line in late.lines] == [line.keys() for line in at_once.lines]
    assert late.result["weights_sha256"] == at_once.result["weights_sha256"]
    assert late.result["metrics"] == at_once.result["metrics"]
