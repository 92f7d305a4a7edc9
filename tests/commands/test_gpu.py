"""Tests that need a GPU: nccl, torch's SyncBatchNorm, DataParallel, the gradient scaler, CUDA graphs, and hung ranks.

`pytest --device cuda -m gpu` runs them. Jobs run in new processes, because a fork cannot use CUDA after its parent has
initialized it.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.input.device_copies import DeviceCopies, one_ahead

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none here"),
]

SMALL = ("data.sample_shape=[1,8,8]", "model.channels=[4,8]", "logger=none")
BRIEF = (*SMALL, "batch_size=350", "max_steps=10", "precision=fp64", "optimizer.lr=0.01")
LONG = (*SMALL, "batch_size=64", "max_steps=100")


def train(folder: Path, *overrides: str, nproc: int = 1) -> tuple[dict[str, Any], list[float]]:
    """Train, and return result.json and the losses of the run."""
    start = [sys.executable, "-m", "runner"]
    if nproc > 1:
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc), "-m", "runner"]
    folder.mkdir(exist_ok=True)
    done = subprocess.run([*start, *overrides], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (folder / "outputs" / "run").iterdir()
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return json.loads((path / "result.json").read_text()), [x["train/loss"] for x in lines if "train/loss" in x]


def test_gpu_and_cpu_produce_the_same_numbers(tmp_path: Path) -> None:
    _, expected = train(tmp_path / "cpu", *BRIEF, "backend=gloo")
    for parallel in ("none", "ddp", "allreduce", "dp"):
        _, losses = train(tmp_path / parallel, *BRIEF, f"parallel={parallel}")
        assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        ("loader.num_workers=2",),
        ("loader.pin_memory=false", "micro_batches=2"),
        ("transforms=flip_crop",),
        ("keep_samples=device",),
        ("keep_samples=device", "transforms=flip_crop"),
        ("cudnn_benchmark=true", "memory_format=contiguous"),
    ],
)
def test_input_on_the_gpu_and_other_kernels_keep_the_numbers(options: tuple[str, ...], tmp_path: Path) -> None:
    only_on_cpu = [word for word in options if word.startswith(("transforms", "micro_batches"))]
    _, expected = train(tmp_path / "cpu", *BRIEF, "backend=gloo", *only_on_cpu)
    _, losses = train(tmp_path / "gpu", *BRIEF, *options)
    assert losses == pytest.approx(expected, rel=1e-9)


CONVNET = (*SMALL, "max_steps=50", "batch_size=64")
MLP = ("model=mlp", "data.sample_shape=[1,8,8]", "model.batch_norm=true", "model.dropout=0.3", "logger=none")
MLP += ("max_steps=50", "batch_size=64", "precision=fp64")
GPT = ("model=gpt", "model.dim=8", "model.depth=2", "model.heads=2", "data=text", "data.sample_shape=[16]")
CAPTURED = {
    "convnet": (*CONVNET, "precision=fp64", "optimizer.momentum=0.9", "clip_grad_norm=0.5", "log_every=3"),
    "adam": (*MLP, "optimizer=adam", "scheduler=step", "scheduler.every_epochs=1", "ema.decay=0.9"),
    "accumulation": (*MLP, "micro_batches=3", "scheduler=cosine"),
    "skip": (*MLP, "on_nonfinite=skip", "keep_samples=device"),
    "bf16": (*CONVNET, "precision=bf16", "memory_format=channels_last"),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_steps_give_the_numbers_of_the_ordinary_run(name: str, tmp_path: Path) -> None:
    """The last batch of the first epoch is smaller; the draws of dropout are those of the samples."""
    expected, losses = train(tmp_path / "ordinary", *CAPTURED[name])
    captured, captured_losses = train(tmp_path / "captured", *CAPTURED[name], "cuda_graph=true")
    tolerance = 1e-2 if name == "bf16" else 1e-9  # some kernels add in an order that differs from run to run
    assert captured_losses == pytest.approx(losses, rel=tolerance)
    loss = expected["metrics"]["val/loss"]
    assert captured["metrics"]["val/loss"] == pytest.approx(loss, rel=tolerance)


def test_captured_gpt_resumes_with_the_numbers_of_the_ordinary_run(tmp_path: Path) -> None:
    words = (*GPT, "model.dropout=0.1", "optimizer=adamw", "batch_size=8", "eval_batches=2", "logger=none")
    words += ("precision=fp64",)
    _, losses = train(tmp_path / "ordinary", *words, "max_steps=20")
    _, first = train(tmp_path / "first", *words, "max_steps=10", "cuda_graph=true")
    (part,) = (tmp_path / "first" / "outputs" / "run").iterdir()
    _, all_losses = train(tmp_path / "first", f"resume={part}", "max_steps=20")
    assert all_losses == pytest.approx(losses, rel=1e-9) and all_losses[:10] == first


READS = """
import torch
from torch import nn

class Reads(nn.Module):
    def __init__(self, sample_shape, num_outputs):
        super().__init__()
        self.layer = nn.Linear(sample_shape[0], num_outputs)

    def forward(self, inputs):
        if len(inputs) > 2:  # not in dry runs
            return self.layer(inputs) * (1.0 if inputs.sum().item() < 1e9 else 2.0)
        return self.layer(inputs)
"""


def test_code_that_reads_a_value_of_the_gpu_is_named_if_a_step_is_captured(tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text(READS)
    words = ("data=toy", "model=linear", "model._target_=reads.Reads", "cuda_graph=true", "logger=none")
    start = [sys.executable, "-m", "runner", *words]
    done = subprocess.run(start, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "a step cannot be captured in a CUDA graph" in done.stdout + done.stderr
    assert "reads.py:12" in done.stdout + done.stderr, done.stdout + done.stderr


def test_tf32_changes_matrix_products_only_if_it_is_selected(tmp_path: Path) -> None:
    words = ("model=mlp", "data.sample_shape=[1,8,8]", "logger=none", "batch_size=350", "max_steps=2")
    _, expected = train(tmp_path / "cpu", *words, "backend=gloo")
    for tf32, tolerance in (("convolutions", 1e-5), ("false", 1e-5), ("true", 1e-2)):
        _, losses = train(tmp_path / tf32, *words, f"tf32={tf32}")
        assert losses == pytest.approx(expected, rel=tolerance)


def test_a_transform_that_draws_on_the_gpu_is_refused(tmp_path: Path) -> None:
    words = ("keep_samples=device", "transforms.noise._target_=torchvision.transforms.v2.GaussianNoise")
    start = [sys.executable, "-m", "runner", *SMALL, *words]
    done = subprocess.run(start, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "transforms.noise draws random numbers on cuda:0, which are not those of the CPU" in done.stderr


def test_copies_are_read_after_they_are_complete_and_their_memory_is_reused_after_they_are_read() -> None:
    """The stream that computes is slow, so that the host is several batches ahead."""
    device = torch.device("cuda", 0)
    copies, size = DeviceCopies(device), 2**20
    batches = [torch.full((size + number % 3,), float(number)).pin_memory() for number in range(40)]

    def start(batch: torch.Tensor) -> Callable[[], Any]:
        return copies.start((batch, batch[:64].view(1, 1, 8, 8)), torch.float64, torch.channels_last)

    torch.cuda.reset_peak_memory_stats(device)
    sums = []
    for vector, image in one_ahead(iter(batches), start):
        torch.cuda._sleep(10_000_000)  # some milliseconds
        sums.append(torch.stack([vector.mean(), vector.max(), image.mean()]))
        torch.full((size,), float("nan"), device=device, dtype=torch.float64)  # into memory that was freed
    assert torch.stack(sums).cpu().tolist() == [[float(number)] * 3 for number in range(40)]
    assert torch.cuda.max_memory_allocated(device) < 8 * 8 * size  # not 40 batches


def test_fp16_scales_its_gradients_and_learns(tmp_path: Path) -> None:
    args = (*LONG, "precision=fp16", "clip_grad_norm=5.0")
    for parallel in ("none", "ddp"):
        result, _ = train(tmp_path / parallel, *args, f"parallel={parallel}")
        assert result["metrics"]["val/accuracy"] > 0.8


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_compiled_in_channels_last_it_learns(precision: str, tmp_path: Path) -> None:
    args = (*LONG, "compile=true", "memory_format=channels_last")
    result, _ = train(tmp_path, f"precision={precision}", *args, "loader.drop_last=true")
    assert result["metrics"]["val/accuracy"] > 0.8


WITHOUT_WAITING = """
import runpy, sys, torch
from runner.training.trainer import Trainer

step = Trainer.step

def watched(self, batch):  # the first steps allocate memory, compare buffers, and are captured
    torch.cuda.set_sync_debug_mode("error" if self.state.step > 8 else "default")
    try:
        step(self, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")

Trainer.step = watched
sys.argv[0] = "runner"
runpy.run_module("runner", run_name="__main__")
"""


@pytest.mark.parametrize(
    "parallel", ["none", "none cuda_graph=true", "dp", "ddp", "allreduce", "fsdp", "zero", "local_sgd"]
)
@pytest.mark.parametrize(
    "options",
    [
        ("log_every=1",),
        ("clip_grad_norm=1.0", "precision=bf16", "log_every=2"),
        ("keep_samples=device", "tf32=true", "cudnn_benchmark=true"),
    ],
)
def test_no_step_waits_for_the_gpu(parallel: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """torch raises an exception for each operator that synchronizes."""
    words = (*SMALL, "batch_size=64", "max_steps=16", *f"parallel={parallel}".split(), *options)
    start = [sys.executable, "-c", WITHOUT_WAITING, *words]
    done = subprocess.run(start, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


RECORDED = """
import datetime, os, time, torch, torch.distributed as dist
from runner.distributed.failures.flight_recorder import BUFFER, oldest_pending

os.environ.update(BUFFER)
start = time.time_ns()
store = dist.HashStore()
dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
dist.group.WORLD._get_backend(torch.device("cuda", 0))._set_default_timeout(datetime.timedelta(seconds=60))
sums = torch.ones(9, device="cuda")
dist.all_reduce(sums)
torch.cuda.synchronize()
torch.cuda._sleep(10**10)  # cycles: some seconds, in which the next collective cannot begin

def call_late():
    dist.all_reduce(sums)

called_ns = time.time_ns()
call_late()
pending = oldest_pending(called_ns)
assert pending.name == "nccl:all_reduce" and pending.shapes == [[9]] and " in call_late" in pending.called_at, pending
torch.cuda.synchronize()
end = time.monotonic() + 60
while oldest_pending(start) and time.monotonic() < end:  # NCCL's thread has to notice
    time.sleep(0.1)
assert oldest_pending(start) is None
dist.destroy_process_group()
"""


def test_flight_recorder_names_a_collective_that_has_not_completed(tmp_path: Path) -> None:
    words = [sys.executable, "-c", RECORDED]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


RANK_1_HANGS = """
import os, runpy, sys, time
from runner.training.trainer import Trainer

step = Trainer.step

def hang_or_step(self, batch):
    if os.environ["RANK"] == "1" and self.state.step > 5:
        time.sleep(600)
    step(self, batch)

Trainer.step = hang_or_step
sys.argv[0] = "runner"
runpy.run_module("runner", run_name="__main__")
"""


@pytest.mark.parametrize(
    "backend",
    [
        ("backend=gloo", "backend.device=cuda"),  # two ranks share a GPU
        pytest.param(
            ("backend=nccl",), marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
        ),
    ],
)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_hung_rank_is_named_with_the_collective(parallel: str, backend: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text(RANK_1_HANGS)
    words = (*SMALL, "batch_size=64", "max_steps=20", f"parallel={parallel}", *backend, "backend.timeout_s=10")
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "hang.py"]
    done = subprocess.run([*start, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    (path,) = (tmp_path / "outputs" / "run").iterdir()
    result = json.loads((path / "result.json").read_text())
    assert result["state"] == "failed"
    lines = result["error"].splitlines()
    assert lines[-1].startswith("no response from rank 1 on ") and " in hang_or_step; its stacks are in" in lines[-1]
    assert any(line.startswith("rank 0 waited for other ranks, in step ") for line in lines)
    assert backend[0] != "backend=nccl" or "nccl:" in lines[0], lines[0]


@pytest.mark.parametrize("parallel", ["ddp", "allreduce", "fsdp", "zero", "local_sgd"])
def test_two_ranks_of_gloo_share_a_gpu(parallel: str, tmp_path: Path) -> None:
    warmup = ("parallel.warmup_steps=100",) if parallel == "local_sgd" else ()
    _, expected = train(tmp_path / "cpu", *BRIEF, "backend=gloo")
    options = (f"parallel={parallel}", *warmup, "backend=gloo", "backend.device=cuda")
    _, losses = train(tmp_path / "gpu", *BRIEF, *options, nproc=2)
    assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_batch_norm_is_synchronized_over_gpus(tmp_path: Path) -> None:
    _, expected = train(tmp_path / "one", *BRIEF)
    for parallel in ("ddp", "allreduce"):
        _, losses = train(tmp_path / parallel, *BRIEF, f"parallel={parallel}", nproc=2)
        assert losses == pytest.approx(expected, rel=1e-9)


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    count = torch.cuda.device_count() + 1
    args = ["launcher=spawn", f"launcher.nproc_per_node={count}", "parallel=ddp", "batch_size=350"]
    done = subprocess.run(
        [sys.executable, "-m", "runner", *args], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert f"{count} ranks on this machine need a GPU each" in done.stderr
    assert list(tmp_path.iterdir()) == []
