"""parallel=ps beyond the parity matrix: its options, where it listens, and what happens when a rank dies."""

import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import Commands
from ranks import run_ranks
from torch.distributed import rpc
from worlds import Run, configure, run

from runner.distributed import ending, watch
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.errors import JobFailed
from runner.launchers.job import run_job
from runner.parallel import ps_ranks
from runner.parallel.ps import ParameterServer, Serving, Training
from runner.parallel.ps_server import join_rpc
from runner.training.saved_state import HeldState, Piece

TOY = ("model=toy", "data=toy", "data.num_train=350", "batch_size=90", "precision=fp64", "epochs=9", "logger=none")
DEEP = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=350", *TOY[4:])
BATCH_NORM = (*DEEP, "model.batch_norm=true")
UNEVEN = ("model=toy", "data=toy", "data.num_train=33", "batch_size=16", "micro_batches=2", *TOY[4:])
REMOTE, ASYNC = "parallel.forward=remote", "parallel.updates=async"


def assert_equal(one: Run, reference: Run) -> None:
    assert one.losses == pytest.approx(reference.losses, rel=1e-9)
    assert one.weights.keys() == reference.weights.keys()
    for name, tensor in reference.weights.items():
        torch.testing.assert_close(one.weights[name], tensor, rtol=1e-9, atol=1e-9, msg=name)
    assert one.result["metrics"] == pytest.approx(reference.result["metrics"], rel=1e-9)


@pytest.mark.parametrize(
    ("world_size", "words", "options"),
    [
        (3, (*BATCH_NORM, "micro_batches=3", "clip_grad_norm=0.1", "scheduler=cosine"), ()),
        (3, (*TOY, "optimizer=adamw"), ()),
        (4, UNEVEN, ()),  # the last step of an epoch has one sample for three trainers
        (3, (*DEEP, "micro_batches=3", "clip_grad_norm=0.1"), (REMOTE,)),
        (4, UNEVEN, (REMOTE,)),
        # One trainer is never behind.
        (2, (*BATCH_NORM, "micro_batches=2", "scheduler=cosine"), (ASYNC,)),
        (2, (*DEEP, "micro_batches=2", "scheduler=cosine"), (ASYNC, REMOTE)),
    ],
    ids=["sync", "adamw", "uneven", "remote", "remote-uneven", "async", "async-remote"],
)
def test_it_equals_one_process(
    world_size: int, words: tuple[str, ...], options: tuple[str, ...], tmp_path: Path
) -> None:
    one = run(tmp_path / "1", 1, *words, "max_steps=8")
    assert_equal(run(tmp_path / "n", world_size, *words, "max_steps=8", "parallel=ps", *options), one)
    assert [line["train/grad_norm"] for line in one.lines if "train/loss" in line] != [0.0] * 8


@pytest.mark.parametrize("options", [(), pytest.param((REMOTE,), marks=pytest.mark.thorough)], ids=["local", "remote"])
def test_asynchronous_updates_train(options: tuple[str, ...], tmp_path: Path) -> None:
    """Three trainers' updates at weights that the others have changed: another run, that comes to about the same."""
    words = (*TOY, "optimizer.lr=0.02", "optimizer.momentum=0", "max_steps=30", "epochs=30")
    one = run(tmp_path / "1", 1, *words)
    four = run(tmp_path / "4", 4, *words, "parallel=ps", ASYNC, *options)
    assert four.losses.keys() == one.losses.keys()
    assert four.losses[1] == pytest.approx(one.losses[1], rel=0.1)  # a trainer may have fetched after an update
    loss, expected = four.result["metrics"]["val/loss"], one.result["metrics"]["val/loss"]
    start = run(tmp_path / "start", 1, *words, "max_steps=1", "optimizer.lr=1e-12").result["metrics"]["val/loss"]
    # Each trainer's share of the gradient is applied once: the way is as long, but for what is stale.
    assert abs(loss - expected) < 0.2 * (start - expected)


@pytest.mark.thorough
def test_checkpoints_go_to_and_from_other_modes(tmp_path: Path) -> None:
    words = (*BATCH_NORM, "optimizer.lr=0.01")
    whole = run(tmp_path / "whole", 1, *words, "max_steps=10")
    part = run(tmp_path / "part", 3, *words, "max_steps=3", "parallel=ps")
    for number, (world_size, mode) in enumerate([(2, "ps"), (2, "ddp"), (3, "ps")], start=1):
        out = tmp_path / str(number)
        run(out, world_size, f"resume={part.path}", f"max_steps={3 + 2 * number}", f"parallel={mode}")
    run(tmp_path / "last", 1, f"resume={part.path}", "max_steps=10", "parallel=none")
    assert_equal(part, whole)
    evaluated = run(tmp_path / "evaluated", 3, "task=evaluate", f"run={part.path}", "parallel=ps", ASYNC)
    assert evaluated.result["metrics"]["val/loss"] == pytest.approx(whole.result["metrics"]["val/loss"], rel=1e-9)


@pytest.mark.parametrize("options", [(), (ASYNC, REMOTE)], ids=["sync", "async-remote"])
def test_a_process_can_run_one_job_after_another(options: tuple[str, ...], tmp_path: Path) -> None:
    config, request = configure(*TOY, "max_steps=5", "parallel=ps", *options, f"outputs={tmp_path}", "name=twice")

    def twice(rank: int, world_size: int) -> list[dict[str, float]]:
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / "store"), world_size)
        world = World(RankInfo(rank, rank, world_size, world_size), store, as_backend(config.backend))
        return [run_job(config, request, world) for _ in range(2)]

    one = run(tmp_path / "1", 1, *TOY, "max_steps=5").result["metrics"]
    first, second = run_ranks(twice, 2)[0]
    assert first == pytest.approx(one, rel=1e-9)
    assert second == pytest.approx(one, rel=1e-9)


def test_it_listens_on_loopback_alone(tmp_path: Path) -> None:
    def addresses(rank: int, world_size: int) -> tuple[set[str], set[str]]:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)  # as for a user
        store = dist.FileStore(str(tmp_path / "store"), world_size)
        world = World(RankInfo(rank, rank, world_size, world_size), store, as_backend({"timeout_s": 20.0}))
        world.begin_job(world.backend)
        before = listening()
        join_rpc(world, None, allow_network=False)
        assert rpc.rpc_sync("rank0", int, args=("7",)) == 7
        opened = listening() - before
        world.group.leave(went_well=not world.ending.failed)
        return opened, listening() - before

    for opened, left in run_ranks(addresses, 2):
        assert opened
        assert {address.split(":")[0] for address in opened} == {"0100007F"}  # 127.0.0.1 as the kernel writes it
        assert not left


def listening() -> set[str]:
    """Where this process's sockets listen, address:port in hexadecimal."""
    links = (os.readlink(entry.path) for entry in list(os.scandir("/proc/self/fd")) if os.path.islink(entry.path))
    inodes = {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()
    ]
    return {words[1] for words in lines if words[3] == "0A" and words[9] in inodes}


@pytest.mark.fault("kill -9 of the parameter server or a trainer", outcome="refused")
@pytest.mark.parametrize("victim", [0, 1], ids=["server", "trainer"])
@pytest.mark.parametrize("updates", ["sync", pytest.param("async", marks=pytest.mark.thorough)])
def test_all_ranks_end_when_one_dies(updates: str, victim: int, tmp_path: Path) -> None:
    timeout_s = 30
    words = (*TOY, "parallel=ps", f"parallel.updates={updates}", f"backend.timeout_s={timeout_s}")
    config, request = configure(*words, f"outputs={tmp_path}")

    def rank_of(rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        # What ends a loop that waits for a rank which has failed, long before the time-out.
        watch.QUIET_S, ending.PATIENCE_S = 1.0, 1.5
        if rank == victim:
            kind = Serving if rank == 0 else Training
            steps, step = iter(range(99)), kind.step

            def die_in_the_fourth(*args: Any, **options: Any) -> float | None:
                return step(*args, **options) if next(steps) < 3 else os.kill(os.getpid(), signal.SIGKILL)

            kind.step = die_in_the_fourth
        world = World(
            RankInfo(rank, rank, 3, 3), dist.FileStore(str(tmp_path / "store"), 3), as_backend(config.backend)
        )
        try:
            run_job(config, request, world)
        except JobFailed:
            raise SystemExit(1) from None

    ranks = [multiprocessing.get_context("fork").Process(target=rank_of, args=(rank,)) for rank in range(3)]
    try:
        for rank in ranks:
            rank.start()
        ranks[victim].join(300)
        assert ranks[victim].exitcode == -signal.SIGKILL
        deadline = time.monotonic() + timeout_s + 120
        for rank in ranks:
            rank.join(deadline - time.monotonic())
        assert [rank.exitcode for number, rank in enumerate(ranks) if number != victim] == [1, 1]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


@pytest.mark.thorough
def test_the_command_ends_cleanly(commands: Commands) -> None:
    """A fresh interpreter per rank: what outlives the job would abort it at its exit."""
    words = ("launcher=spawn", "launcher.nproc_per_node=2", "parallel=ps", ASYNC, *TOY, "max_steps=3")
    done = commands.finish(commands.start("-m", "runner", *words))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("mode", "words", "message"),
    [
        (ParameterServer(updates="async"), ("clip_grad_norm=1.0",), "clip_grad_norm=1.0: parallel.updates=async never"),
        (ParameterServer(forward="remote"), (), "parallel.forward=remote: BatchNorm on the server would see one"),
        (ParameterServer(forward="remote"), ("compile=true",), "compile=true: parallel.forward=remote replaces"),
        (ParameterServer(), ("precision=fp16",), "precision=fp16: parallel=ps has no loss scale"),
    ],
)
def test_what_cannot_be_is_refused(mode: ParameterServer, words: tuple[str, ...], message: str) -> None:
    config, _ = configure(*words)
    assert any(told.startswith(message) for told in mode.check(config, torch.nn.BatchNorm1d(3)))
    assert not ParameterServer().check(configure()[0], torch.nn.BatchNorm1d(3))


def test_it_needs_a_server_and_a_trainer() -> None:
    with pytest.raises(ValueError, match="parallel=ps needs at least 2 ranks, a server and a trainer, but the world"):
        ParameterServer().axes(1)
    axes = ParameterServer().axes(4)
    assert (axes.data_ranks, [axes.data_rank(rank) for rank in range(4)]) == (3, [None, 0, 1, 2])


@pytest.mark.parametrize(("forward", "kept"), [("remote", 0.0), ("local", 9.0)])
def test_a_forward_on_the_server_writes_into_no_checkpoint(
    forward: str, kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainers' next step begins when all have settled, and that may be before the state is copied."""
    module = torch.nn.Module()
    module.register_buffer("seen", torch.zeros(3))
    state = HeldState({"model.seen": Piece.of(module.seen)})
    server: Any = SimpleNamespace(module=module, replica=SimpleNamespace(state=lambda: state))
    collectives = SimpleNamespace(sum=lambda tensor: module.seen.fill_(9.0))
    world: Any = SimpleNamespace(collectives=collectives, device=torch.device("cpu"))
    mode: Any = SimpleNamespace(forward=forward, updates="sync")
    monkeypatch.setattr(ps_ranks, "_share_buffers", lambda module, mode: None)
    held = Serving(server, world, mode).state()
    assert held.pieces["model.seen"].tensor.tolist() == [kept] * 3
