"""A model in parts on several devices of a rank: the parts change no number, with one process and under DDP."""

from pathlib import Path

import pytest
import torch
from ranks import RankError
from torch import nn
from worlds import run

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.machine import choose_devices
from runner.distributed.world import World
from runner.errors import InputError
from runner.training.model.device_map import place_submodules

WORDS = ("precision=fp64", "optimizer.lr=0.01", "max_steps=4", "logger=none", "batch_size=700")
MLP = ("data.sample_shape=[1,8,8]", "model@model.model=mlp", "model.model.hidden=[16]", "model.model.batch_norm=true")


def test_parts_change_no_number(tmp_path: Path) -> None:
    words = (*WORDS, "model=mlp", "model.hidden=[16]", "model.batch_norm=true", "data.sample_shape=[1,8,8]")
    whole = run(tmp_path / "whole", 1, *words)
    for world_size, mode in ((1, "none"), (2, "ddp")):
        words = (*WORDS, "model=split", *MLP, f"parallel={mode}", "backend.devices_per_rank=2")
        parts = run(tmp_path / mode, world_size, *words)
        assert parts.losses == pytest.approx(whole.losses, rel=1e-9)
        assert parts.weights.keys() == whole.weights.keys()
        for name, tensor in whole.weights.items():
            torch.testing.assert_close(parts.weights[name], tensor, rtol=1e-9, atol=1e-9, msg=name)
        assert parts.result["metrics"] == pytest.approx(whole.result["metrics"], rel=1e-9)
        assert "model=split: all submodules are on the CPU" in (parts.path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model=toy", "backend.devices_per_rank=2"), "backend.devices_per_rank=2 has no effect on model=toy"),
        (("model=split", "model@model.model=toy", "backend.devices_per_rank=3"), "devices_per_rank=3: .* one per part"),
    ],
)
def test_devices_that_do_not_fit_are_refused(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=message):
        run(tmp_path, 1, "data=toy", "logger=none", *words)


class Parts(nn.Module):
    """Two parts, which note where they are put."""

    def __init__(self, devices: list[str] | None = None) -> None:
        super().__init__()
        self.devices = None if devices is None else [torch.device(device) for device in devices]

    def place(self, devices: list[torch.device]) -> None:
        self.devices = devices


def gpu_world(monkeypatch: pytest.MonkeyPatch, num_gpus: int, local_rank: int, each: int) -> tuple[World, list[str]]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    backend = Backend(device="cuda", devices_per_rank=each)
    world = World(RankInfo(local_rank, local_rank, 2, 2, source="test"), None, backend)
    return world, choose_devices(world)


def test_rank_takes_the_devices_of_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    world, messages = gpu_world(monkeypatch, 4, 1, 2)
    assert messages == []
    assert world.devices == [torch.device("cuda:2"), torch.device("cuda:3")] and world.device == world.devices[0]
    module = Parts()
    assert place_submodules(module, {}, True, world) == []
    assert module.devices == world.devices
    _, (message,) = gpu_world(monkeypatch, 3, 1, 2)
    assert message.startswith("2 ranks on this machine need 2 GPUs each, 4 together, but there are 3; start fewer")


@pytest.mark.parametrize(
    ("named", "each", "spans", "message"),
    [
        (None, 2, False, "parallel=tp has one device per rank; try parallel=ddp"),
        (["cuda:1", "cuda:2"], 2, True, "the devices of a single rank"),
        (["cuda:1", "cuda:2"], 1, True, "the devices of a single rank; try .* backend.devices_per_rank=2"),
        (["cpu", "cpu"], 1, True, "must begin with the device cuda:1"),
    ],
)
def test_unsuitable_devices_are_refused(
    named: list[str] | None, each: int, spans: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, _ = gpu_world(monkeypatch, 4, 1, each)
    with pytest.raises(InputError, match=message):
        place_submodules(Parts(named), {"parallel": "tp", "model": "split"}, spans, world)
