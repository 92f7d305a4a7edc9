"""parallel=ps beyond the parity matrix: its options, where it listens, and what happens when a rank dies."""

import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import Commands, wait_until
from parity import assert_equal
from ranks import exit_statuses, run_ranks
from torch.distributed import rpc
from torch.utils.checkpoint import checkpoint
from worlds import Run, build_experiment, configure, run

from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.failures import shutdown, watchdog
from runner.distributed.world import World
from runner.errors import InputError, JobFailed
from runner.input.batch import MicroBatch
from runner.jobs.job import run_job
from runner.optimization.precision import Precision
from runner.parallel.parameter_server import ParameterServer, ServerModel, TrainerModel
from runner.parallel.parameter_server_rpc import Server, join_rpc
from runner.training.draws.following import Draws

TOY = ("model=toy", "data=toy", "data.num_train=350", "batch_size=90", "precision=fp64", "epochs=9", "logger=none")
DEEP = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=350", *TOY[4:])
BATCH_NORM = (*DEEP, "model.batch_norm=true")
UNEVEN = ("model=toy", "data=toy", "data.num_train=33", "batch_size=16", "micro_batches=2", *TOY[4:])
REMOTE, ASYNC = "parallel.forward=remote", "parallel.updates=async"


@pytest.mark.parametrize(
    ("world_size", "overrides", "options"),
    [
        pytest.param(
            *(3, (*BATCH_NORM, "micro_batches=3", "clip_grad_norm=0.1", "scheduler=cosine"), ()),
            marks=pytest.mark.thorough,
        ),
        (3, (*UNEVEN, "optimizer=adamw"), ()),  # the last step of an epoch has one sample for two trainers
        pytest.param(3, (*UNEVEN, "clip_grad_norm=0.1"), (REMOTE,), marks=pytest.mark.thorough),
        # With one trainer, no gradient is stale.
        pytest.param(2, (*BATCH_NORM, "micro_batches=2", "scheduler=cosine"), (ASYNC,), marks=pytest.mark.thorough),
        (2, (*DEEP, "micro_batches=2", "scheduler=cosine"), (ASYNC, REMOTE)),
    ],
    ids=["sync", "uneven", "remote-uneven", "async", "async-remote"],
)
def test_numbers_equal_one_process(
    world_size: int,
    overrides: tuple[str, ...],
    options: tuple[str, ...],
    one_process: Callable[..., Run],
    tmp_path: Path,
) -> None:
    expected = one_process(*overrides, "max_steps=8")
    assert_equal(run(tmp_path, world_size, *overrides, "max_steps=8", "parallel=ps", *options), expected)


@pytest.mark.thorough
def test_a_process_can_run_several_jobs(one_process: Callable[..., Run], tmp_path: Path) -> None:
    config, request = configure(*TOY, "max_steps=5", "parallel=ps", ASYNC, REMOTE, f"outputs={tmp_path}", "name=twice")

    def run_twice(rank: int, world_size: int) -> list[dict[str, float]]:
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / "store"), world_size)
        world = World(RankInfo(rank, rank, world_size, world_size), store, as_backend(config.backend))
        return [run_job(request, world) for _ in range(2)]

    expected = one_process(*TOY, "max_steps=5").result["metrics"]
    first, second = run_ranks(run_twice, 2)[0]
    assert first == pytest.approx(expected, rel=1e-9)
    assert second == pytest.approx(expected, rel=1e-9)


def test_it_listens_only_on_loopback(tmp_path: Path) -> None:
    def opened_addresses(rank: int, world_size: int) -> tuple[set[str], set[str]]:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)  # as for a user
        store = dist.FileStore(str(tmp_path / "store"), world_size)
        world = World(RankInfo(rank, rank, world_size, world_size), store, as_backend({"timeout_s": 20.0}))
        world.begin_job(world.backend)
        before = listening()
        join_rpc(world, None, allow_network=False)
        assert rpc.rpc_sync("rank0", int, args=("7",)) == 7
        opened = listening() - before
        world.group.leave(went_well=not world.shutdown.failed)
        return opened, listening() - before

    for opened, left in run_ranks(opened_addresses, 2):
        assert opened
        assert {address.split(":")[0] for address in opened} == {"0100007F"}  # 127.0.0.1 in the kernel's notation
        assert not left


def listening() -> set[str]:
    """Return the addresses on which this process listens, as address:port in hexadecimal."""
    links = (os.readlink(entry.path) for entry in list(os.scandir("/proc/self/fd")) if os.path.islink(entry.path))
    inodes = {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()
    ]
    return {fields[1] for fields in lines if fields[3] == "0A" and fields[9] in inodes}


@pytest.mark.fault("kill -9 of the parameter server or a trainer", outcome="refused")
@pytest.mark.parametrize("victim", [0, 1], ids=["server", "trainer"])
@pytest.mark.parametrize("updates", ["sync", pytest.param("async", marks=pytest.mark.thorough)])
def test_all_ranks_exit_when_one_dies(updates: str, victim: int, tmp_path: Path) -> None:
    timeout_s = 30
    overrides = (*TOY, "parallel=ps", f"parallel.updates={updates}", f"backend.timeout_s={timeout_s}")
    config, request = configure(*overrides, f"outputs={tmp_path}")

    def rank_of(rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        # These end a loop that waits for a failed rank, long before the timeout.
        watchdog.QUIET_S, shutdown.PATIENCE_S = 1.0, 1.5
        if rank == victim:
            kind = ServerModel if rank == 0 else TrainerModel
            steps, step = iter(range(99)), kind.step

            def die_in_fourth_step(*args: Any, **options: Any) -> float | None:
                return step(*args, **options) if next(steps) < 3 else os.kill(os.getpid(), signal.SIGKILL)

            kind.step = die_in_fourth_step
        world = World(
            RankInfo(rank, rank, 3, 3), dist.FileStore(str(tmp_path / "store"), 3), as_backend(config.backend)
        )
        try:
            run_job(request, world)
        except JobFailed:
            raise SystemExit(1) from None

    statuses = exit_statuses(rank_of, 3, range(3), timeout_s + 420)
    assert statuses == [-signal.SIGKILL if rank == victim else 1 for rank in range(3)]


@pytest.mark.thorough
def test_the_command_exits_cleanly(commands: Commands) -> None:
    """A fresh interpreter per rank: whatever outlives the job would abort it at its exit."""
    overrides = ("launcher=spawn", "launcher.nproc_per_node=2", "parallel=ps", ASYNC, *TOY, "max_steps=3")
    done = commands.finish(commands.start("-m", "runner", *overrides))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_unsuitable_models_and_worlds_are_refused() -> None:
    (message,) = ParameterServer(forward="remote").check(torch.nn.BatchNorm1d(3), "none")
    assert message.startswith("parallel.forward=remote: BatchNorm would see")
    assert not ParameterServer().check(torch.nn.BatchNorm1d(3), "none")
    with pytest.raises(ValueError, match="parallel=ps needs at least 2 ranks, a server and a trainer, but the world"):
        ParameterServer().axes(1)


class Recomputing(torch.nn.Linear):
    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__(sample_shape[0], num_outputs)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(checkpoint(torch.nn.Dropout(), features, use_reentrant=False))


def test_remote_forwards_that_would_be_recomputed_are_refused() -> None:
    model = ("model=linear", "model._target_=test_parameter_server.Recomputing", "data=toy", "parallel=ps")
    with pytest.raises(InputError, match=r"parallel=ps: .* recomputation of torch\.utils\.checkpoint in model=linear"):
        build_experiment(*model, REMOTE, world_size=2)
    build_experiment(*model, world_size=2)


def test_a_remote_forward_waits_while_the_servers_loop_may_draw() -> None:
    """Between two waits of a step the loop reads samples, for example, for which it seeds the generators."""
    has_begun, is_seeded = threading.Event(), threading.Event()

    class Noisy(torch.nn.Linear):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            has_begun.set()
            assert is_seeded.wait(300)
            return features + torch.rand_like(features)

    draws = Draws(follows=True, sample_dims={("rand_like", 2): 0})
    cpu, outputs = torch.device("cpu"), []
    recipe: Any = SimpleNamespace(module=Noisy(3, 3), device=cpu, precision=Precision("fp64", cpu), draws=draws)
    update: Any = None  # not called without a gradient
    server = Server(recipe, update, num_trainers=1, is_async=False, timeout_s=300)

    def train() -> None:
        outputs.append(server.forward(torch.ones(2, 3), [5, 6], key=7))
        server.receive(1, None)

    def is_waiting() -> bool:
        frames = traceback.walk_stack(sys._current_frames()[trainer.ident or 0])
        return any(frame.f_code is threading.Condition.wait_for.__code__ for frame, _ in frames)

    trainer = threading.Thread(target=train)
    trainer.start()
    wait_until(lambda: has_begun.is_set() or is_waiting())
    torch.manual_seed(0)
    is_seeded.set()
    server.step(1.0, want_norm=False)
    trainer.join(300)
    with draws.following(MicroBatch(torch.ones(2, 3), [5, 6]), key=7):
        assert torch.equal(outputs[0], recipe.module(torch.ones(2, 3)))
