"""The network interface of the ranks."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from commands import is_loopback, listening
from worlds import run

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.network import (
    GLOO,
    LOOPBACK,
    NCCL,
    TENSORPIPE,
    address_towards,
    choose_interface,
    environment_variables,
    interface_of,
    loopback_only,
)
from runner.errors import InputError
from runner.training.trainer import Trainer


def test_ranks_on_one_machine_use_the_loopback() -> None:
    master = RankInfo(0, 0, 1, 1, master_addr="localhost", on_one_machine=False)
    for rank_info in (RankInfo(), master):
        assert choose_interface(rank_info, None, lambda own: [own]) == {GLOO: LOOPBACK, TENSORPIPE: LOOPBACK}


def test_external_interface_is_used_if_the_masters_name_is_its_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"localhost": "127.0.0.1", "10.9.8.7": "10.9.8.1"}
    monkeypatch.setattr("runner.distributed.network.address_towards", own.__getitem__)
    monkeypatch.setattr("runner.distributed.network._addresses_of", lambda name: ["10.9.8.1"] if name == "lo" else [])
    rank_info = RankInfo(0, 0, 2, 1, master_addr="localhost", on_one_machine=False)
    chosen = choose_interface(rank_info, None, lambda own: [own, "10.9.8.7"])
    assert chosen == dict.fromkeys((GLOO, NCCL, TENSORPIPE), "lo")


def test_requested_interface_is_used_and_an_unknown_one_refused() -> None:
    assert choose_interface(RankInfo(), "eth7", lambda own: [own]) == dict.fromkeys((GLOO, NCCL, TENSORPIPE), "eth7")
    (message,) = Backend(name="gloo", device="cpu", interface="eth7").check()
    assert message.startswith("backend.interface=eth7: this machine has no such network interface, only ")
    assert LOOPBACK in message
    assert Backend(name="gloo", device="cpu", interface=LOOPBACK).check() == []


def test_addresses_belong_to_interfaces() -> None:
    assert interface_of(address_towards("localhost")) == LOOPBACK
    assert interface_of("192.0.2.1") is None  # of a range that no machine has
    with pytest.raises(
        InputError, match=f"MASTER_ADDR=no-such-host.invalid cannot be reached from {socket.gethostname()}"
    ):
        address_towards("no-such-host.invalid")


def test_interface_in_the_environment_is_kept_unless_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO, "mine")
    monkeypatch.delenv(TENSORPIPE, raising=False)
    with environment_variables(loopback_only(), override=False):
        assert (os.environ[GLOO], os.environ[TENSORPIPE]) == ("mine", LOOPBACK)
    with environment_variables(loopback_only()):
        assert os.environ[GLOO] == LOOPBACK
    assert os.environ[GLOO] == "mine" and TENSORPIPE not in os.environ


@pytest.mark.parametrize("mode", ["ddp", "pipeline"])  # ps: test_parameter_server.py
def test_ranks_listen_only_on_the_loopback(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer.step

    def note(self: Trainer, *args: Any) -> dict[str, float]:
        with (tmp_path / f"rank-{self.world.rank}").open("a") as file:
            file.write("\n".join([*listening([os.getpid()]), ""]))
        return step(self, *args)

    monkeypatch.setattr(Trainer, "step", note)
    run(tmp_path / "outputs", 2, "model=mlp", "logger=none", f"parallel={mode}", "max_steps=3", "batch_size=200")
    for rank in range(2):
        addresses = (tmp_path / f"rank-{rank}").read_text().split()
        assert addresses and all(map(is_loopback, addresses)), (mode, addresses)
