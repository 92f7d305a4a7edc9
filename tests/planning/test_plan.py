"""task=plan: what imagined ranks need and exchange is what real ranks need and exchange."""

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from commands import Commands, wait_until
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from runner.checkpoints.layout import TrainState
from runner.config.schema import Config
from runner.errors import InputError
from runner.input.datasets import load_data
from runner.input.source import Source
from runner.paths import CONF
from runner.planning import forwards as forwards_module
from runner.planning import modes as modes_module
from runner.planning import timeline
from runner.planning.cell import Cell, add_times, distinct_ranks, plan_cell
from runner.planning.costs import Costs, load_device, with_measured_link
from runner.planning.forwards import Forwards
from runner.planning.imagined_rank import ModeConfig, RankPlan, plan_rank, without_forward
from runner.planning.memory import KINDS, MemoryTracker
from runner.planning.modes import plan_modes
from runner.planning.simulation import simulate
from runner.planning.timeline import Message, Timeline
from runner.tasks.plan import start_command
from runner.training.build import build
from runner.training.callbacks.contract import Callbacks
from runner.training.callbacks.ema import EMA
from runner.training.mode import Axes
from runner.training.throughput import ThroughputMeter
from runner.training.trainer import Trainer

MLP = ("model=mlp", "model.hidden=[16,16,16]", "data.sample_shape=[1,8,8]", "batch_size=16")
WITH_BATCH_NORM = ("model=convnet", "model.channels=[4,8]", "data.sample_shape=[1,8,8]", "batch_size=16")
GPT = ("model=gpt", "model.dim=16", "model.depth=2", "data=text", "data.sample_shape=[16]", "batch_size=16")
MODES = ("allreduce", "ddp", "fsdp", "local_sgd", "pipeline", "ps", "tp", "zero")


def composed_with(*overrides: str) -> tuple[ModeConfig, tuple[Source, Source]]:
    config, request = worlds.configure(*overrides)
    data = load_data(config, request.command.choices, worlds.unconnected())
    return ModeConfig(config, request.command.choices), data


def plan(rank: int, world_size: int, *overrides: str) -> RankPlan:
    return plan_rank(*composed_with(*overrides), rank, world_size)


class UnitCosts(Costs):
    """One second for each operator, and `message_s` for each message."""

    def __init__(self, num_ranks: int, message_s: float):
        super().__init__(load_device("this", [CONF]), num_ranks)
        self._message_s = message_s

    def operators(self, counts: Counter[Any]) -> float:
        return float(counts.total())

    def message(self, message: Message) -> float:
        return self._message_s


def bytes_of(metrics: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("bytes_per_step/"): of for name, of in metrics.items() if name.startswith("bytes_per")}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("model", "num_ranks"),
    [
        pytest.param(MLP, 2, id="mlp-2"),
        pytest.param((*MLP, "clip_grad_norm=1"), 2, id="mlp-2-clipped"),
        pytest.param(MLP, 4, id="mlp-4", marks=pytest.mark.soak),
        pytest.param(WITH_BATCH_NORM, 2, id="convnet-2", marks=pytest.mark.soak),
        pytest.param(GPT, 2, id="gpt-2", marks=pytest.mark.thorough),
        pytest.param(GPT, 4, id="gpt-4", marks=pytest.mark.soak),
    ],
)
def test_it_exchanges_what_real_ranks_exchange(
    model: tuple[str, ...], num_ranks: int, mode: str, tmp_path: Path
) -> None:
    check_bytes(tmp_path, num_ranks, *model, f"parallel={mode}")


@pytest.mark.parametrize("mode", ["ddp", "zero"])
def test_a_world_of_one_rank_broadcasts_no_statistics(mode: str, tmp_path: Path) -> None:
    check_bytes(tmp_path, 1, *WITH_BATCH_NORM, f"parallel={mode}")


def test_the_average_over_three_steps_is_not_rounded_to_float32(tmp_path: Path) -> None:
    check_bytes(tmp_path, 2, *MLP, "parallel=local_sgd", "parallel.every=3")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh",
    [
        ("fsdp", "replicate=2"),
        ("mesh", "shard=2", "tensor=2"),
        ("mesh", "shard=2", "stage=2"),
        ("mesh", "shard=2", "sequence=2"),
        ("mesh", "shard=1", "replicate=2", "sequence=2"),
    ],
)
def test_meshes_exchange_what_real_ranks_exchange(mesh: tuple[str, ...], tmp_path: Path) -> None:
    for clipping in ((), ("clip_grad_norm=1",)):
        folder = tmp_path / "-".join(["mesh", *clipping])
        check_bytes(folder, 4, *GPT, f"parallel={mesh[0]}", *(f"parallel.{size}" for size in mesh[1:]), *clipping)


def check_bytes(path: Path, num_ranks: int, *overrides: str) -> None:
    options = ("task=measure", "task.timed_steps=1", "task.compared_steps=1", "log_every=1000", "logger=none")
    measured = worlds.run(path, num_ranks, *overrides, *options).result["metrics"]
    ranks = [plan(rank, num_ranks, *overrides) for rank in range(num_ranks)]
    assert Cell("", num_ranks, ranks=ranks).bytes_per_step == bytes_of(measured)


def test_a_stage_or_a_server_has_the_memory_of_its_own_tensors() -> None:
    whole, *stages = (plan(rank, size, *MLP, "parallel=pipeline") for rank, size in ((0, 1), (0, 2), (1, 2)))
    for kind in ("parameters", "optimizer state"):
        assert sum(stage.memory[kind] for stage in stages) == whole.memory[kind]
    server = plan(0, 3, *MLP, "parallel=ps").memory
    assert server["activations"] == 0
    # Of each trainer and of their sum, besides the gradients that the optimizer reads.
    assert server["communication buffers"] >= 2 * server["gradients"] > 0


@pytest.mark.parametrize("mode", ["allreduce", "ddp", "fsdp", "local_sgd", "zero", "tp"])
def test_a_model_whose_forward_cannot_run_needs_parameters_gradients_and_optimizer_state(mode: str) -> None:
    config, request = worlds.configure(*MLP, "loss=cross_entropy", f"parallel={mode}")
    data = load_data(config, request.command.choices, worlds.unconnected())
    composed = ModeConfig(config, request.command.choices)
    least = plan_rank(without_forward(composed), data, 0, 2)
    usual = plan_rank(composed, data, 0, 2)
    for kind in ("parameters", "optimizer state"):
        assert least.memory[kind] == usual.memory[kind] > 0
    assert least.memory["gradients"] >= usual.memory["gradients"]  # of which not all exist at the peak


@pytest.mark.parametrize(
    "module", [nn.Sequential(nn.BatchNorm2d(64), nn.MaxPool2d(2), nn.Flatten()), nn.Conv2d(64, 512, 3)]
)
def test_copies_inside_of_operators_are_counted(module: nn.Module) -> None:
    images = torch.randn(8, 64, 14, 14, requires_grad=True).to(memory_format=torch.channels_last)
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def step() -> None:
        module(images).square().sum().backward()

    step()  # creates the gradients
    with MemoryTracker(on_cpu=True) as tracker:
        tracker.reset_peak()
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    allocated = itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]")
    assert sum(tracker.peak().values()) == pytest.approx(max(allocated), rel=0.02)


def test_it_needs_the_memory_of_real_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for overrides in ((*MLP, "ema.decay=0.9"), (*GPT, "micro_batches=2", "activation_checkpointing=full")):
        imagined = plan(0, 1, *overrides)
        config, request = worlds.configure(*overrides)
        data = load_data(config, request.command.choices, worlds.unconnected())
        monkeypatch.setattr("runner.training.build.load_data", lambda *_, data=data: data)  # outside of the tracker
        with MemoryTracker() as tracker:
            steps = real_steps(config, request.command.choices)
            next(steps)
            tracker.reset_peak()
            next(steps)
        real = sum(tracker.peak().values())
        assert imagined.peak == pytest.approx(real, rel=0.02)
        assert imagined.memory["parameters"] > 0 and imagined.memory["optimizer state"] > 0


def real_steps(config: Config, choices: Any) -> Iterator[None]:
    """Make a step of training with one process each time."""
    world = worlds.unconnected()
    experiment = build(config, choices, world)
    parallel_model = experiment.parallel.prepare(experiment.recipe, world)
    callbacks = Callbacks([])
    if config.ema.decay is not None:
        callbacks.add("ema", EMA(parallel_model, experiment.recipe.module, config.ema.decay))
    start = TrainState(step=0, epoch=0, step_in_epoch=0, batch_size=config.batch_size)
    config = replace(config, log_every=1000)
    trainer = Trainer(config, experiment, parallel_model, world, start, ThroughputMeter(), callbacks)
    for batch in experiment.train_loader.steps(0):
        trainer.step(batch)
        yield


def test_a_shard_of_1024_ranks_is_a_1024th_and_nothing_is_left_behind() -> None:
    apply = nn.Module._apply
    overrides = ("model=mlp", "model.hidden=[1024,1024]", "data.sample_shape=[1,8,8]", "batch_size=1024")
    one, many = (plan(0, size, *overrides, "parallel=fsdp") for size in (1, 1024))
    for kind in ("parameters", "optimizer state"):
        # The last layer has 10 rows, each of which is the shard of a rank.
        assert one.memory[kind] / 1024 <= many.memory[kind] < one.memory[kind] / 500
    assert many.axes == Axes(shard=1024)
    assert nn.Module._apply is apply and not torch.distributed.is_initialized()
    assert torch.nn.Linear(2, 2).weight.sum().item() != 0  # tensors have values again


def test_the_bubble_of_a_pipeline_is_that_of_its_schedule() -> None:
    """GPipe with m micro-batches on s stages: (s - 1) / (m + s - 1) of a step (Huang et al., "GPipe", 2019)."""
    micro_batches, stages = 4, 3

    def passing(stage: int, kind: str, peer: int) -> list[Message]:
        return [Message(kind, 1, 2, (0, stages - 1), peer)] if 0 <= peer < stages else []

    def events(stage: int) -> list[Any]:
        forward = [*passing(stage, "receive", stage - 1), Counter([0]), *passing(stage, "send", stage + 1)]
        backward = [*passing(stage, "receive", stage + 1), Counter([0]), *passing(stage, "send", stage - 1)]
        return [*forward * micro_batches, *backward * micro_batches]

    step_s, bubble = simulate({stage: events(stage) for stage in range(stages)}, UnitCosts(stages, message_s=0.0))
    assert step_s == 2 * (micro_batches + stages - 1)
    assert bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_messages_of_a_parameter_server_take_time_once() -> None:
    sent = Message("rpc", 1, 3, (0, 2))
    server = [Counter([0]), sent, sent]
    trainer = [Counter([0, 0]), sent]
    assert simulate({0: server, 1: trainer, 2: trainer}, UnitCosts(3, message_s=10.0)) == (23, 0)


def test_messages_take_as_long_as_a_run_has_measured(tmp_path: Path) -> None:
    metrics = {"all_reduce/seconds/8": 4e-6, "all_reduce/bus_gb_s/8": 1.0, "all_reduce/bus_gb_s/4096": 20.0}
    device = load_device("h100", [CONF])
    for size, name in ((4, "link"), (16, "network")):
        (tmp_path / "result.json").write_text(json.dumps({"world_size": size, "metrics": metrics}))
        measured = with_measured_link(device, tmp_path)
        assert getattr(measured, name) == (20e9, 4e-6 / (2 * size.bit_length() - 2))  # two rounds per doubling
        other = {"link": "network", "network": "link"}[name]
        assert getattr(measured, other) == getattr(device, other)


def test_messages_of_a_process_group_may_take_longer() -> None:
    near = Message("all_reduce", 10**6, 2, (0, 1))
    for name, is_slower in (("this", True), ("h100", False)):
        costs = Costs(load_device(name, [CONF]), 2)
        assert (costs.message(replace(near, uses_group=True)) > costs.message(near)) == is_slower


@pytest.mark.parametrize(
    ("gpu", "sheet"), [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-40GB", "a100"), ("Quadro", "a100")]
)
def test_a_gpu_is_planned_by_its_data_sheet(gpu: str, sheet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 40 * 2**30))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device = load_device("this", [CONF], kind="cuda")
    assert (device.name, device.memory_gib) == (sheet, 40)
    assert load_device("this", [CONF]).name == "this"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load_device("this", [CONF], kind="cuda").name == "this"  # a plan for GPUs on a machine without one


def test_convolutions_on_gpus_use_tf32() -> None:
    device = load_device("h100", [CONF])
    times = []
    for flops in (device.flops, {**device.flops, "tf32": device.flops["fp32"]}):
        costs = Costs(replace(device, flops=flops), 1)
        events = plan(0, 1, "model=convnet", "data.sample_shape=[1,28,28]", "batch_size=1000", "parallel=none").events
        counts = [event for event in events if isinstance(event, Counter)]
        times.append(sum(costs.operator(operator) for count in counts for operator in count))
    assert times[0] < times[1]


def test_products_in_float8_are_planned_at_their_rate() -> None:
    words = ("model=mlp", "model.hidden=[8192,8192]", "data.sample_shape=[1,8,8]", "batch_size=1024")
    events = plan_rank(*composed_with(*words, "precision=float8"), 0, 1, on_gpu=True).events
    device, times = load_device("h100", [CONF]), list[list[float]]()
    for flops in (device.flops, {"fp32": 1e12, "bf16": 989e12}):
        costs, times = Costs(replace(device, flops=flops), 1), [*times, []]
        for operator in (each for counts in events if isinstance(counts, Counter) for each in counts.elements()):
            if operator.function is torch.ops.aten._scaled_mm.default:
                times[-1].append(costs.operator(operator))
    large = sorted(times[0])[-2:]  # of the second layer: its outputs, and the gradients of its inputs
    assert large == pytest.approx(2 * [2 * 1024 * 8192**2 / (0.75 * 1979e12)]) and len(times[0]) == 4
    assert max(times[1]) == pytest.approx(large[0] * 1979 / 989)


def test_operators_are_measured_once_per_shape_with_numbers_that_are_drawn_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs, measured = Costs(load_device("this", [CONF]), 1), list[Any]()
    measure = costs._measure
    monkeypatch.setattr(costs, "_measure", lambda operator: (measured.append(operator), measure(operator))[1])
    with Timeline() as timeline:
        tensor = torch.ones(64, 4096)
        for number in range(1, 5):
            tensor[number].mul_(1 / number)  # of other rows, by other factors
    (counts,) = timeline.events
    draws = Counter[str]()
    with monkeypatch.context() as patch:
        uniform = torch.Tensor.uniform_
        patch.setattr(
            torch.Tensor, "uniform_", lambda self, *limits: (draws.update(["uniform"]), uniform(self, *limits))[1]
        )
        assert costs.operators(counts) > 0
    names = [operator.function.__name__ for operator in measured]
    assert names.count("select.int") == names.count("mul_.Tensor") == 1
    assert draws == {"uniform": 1}


def functions_of(rank: RankPlan) -> list[Any]:
    """Return the events, with the number of calls by operator; handles of the profiler differ in each step."""
    return [
        Counter(operator.function for operator in event.elements()) if isinstance(event, Counter) else event
        for event in rank.events
    ]


def test_ranks_that_build_the_same_model_need_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards, counts = Forwards(), Counter[str]()
    run = forwards_module.run_forward
    monkeypatch.setattr(forwards_module, "run_forward", lambda *args: (counts.update(["forward"]), run(*args))[1])
    for mode in ("allreduce", "ddp", "fsdp"):  # fsdp shards matrices, and therefore needs to know more
        composed, data = composed_with(*WITH_BATCH_NORM, f"parallel={mode}")
        for rank in (0, 1):
            plans = plan_rank(composed, data, rank, 2, forwards=forwards), plan_rank(composed, data, rank, 2)
            shared, alone = (replace(each, events=functions_of(each)) for each in plans)
            assert shared == alone
    assert counts["forward"] == 6 + 2
    plan_rank(composed_with(*WITH_BATCH_NORM, "seed=1")[0], data, 0, 1, forwards=forwards)
    assert counts["forward"] == 6 + 3


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_cached_results_are_those_of_the_operators(mode: str) -> None:
    FakeTensorMode.cache_clear()
    with torch._dynamo.config.patch(fake_tensor_cache_crosscheck_enabled=True):  # compares them
        plan(1, 2, *WITH_BATCH_NORM, f"parallel={mode}")
    assert FakeTensorMode.cache_info().hits > 100


def test_few_of_many_ranks_are_planned() -> None:
    assert distinct_ranks(Axes(replicate=4), 4) == [0, 1, 2, 3]
    assert distinct_ranks(Axes(replicate=64), 64) == [0]
    assert distinct_ranks(Axes(replicate=7, servers=1), 8) == [0, 1]
    assert distinct_ranks(Axes(replicate=2, stage=8, tensor=2), 32) == [0, 2, 8, 14]


def test_each_rank_is_planned_with_the_most_samples_of_a_rank() -> None:
    assert plan(0, 64, *MLP, "parallel=ddp", "batch_size=65").rows == 2  # in a run, those of the last rank


def test_asking_tensors_for_their_device_is_no_work() -> None:
    events = plan(0, 2, *MLP, "parallel=allreduce").events
    assert not [op for event in events if isinstance(event, Counter) for op in event if op.function.namespace == "prim"]


def test_stages_that_are_not_planned_take_part_in_the_step(tmp_path: Path) -> None:
    overrides = ("model=mlp", "model.hidden=[16,16,16,16,16]", "data.sample_shape=[1,8,8]", "parallel=pipeline")
    config, request = worlds.configure(*overrides, "parallel.stages=6")
    data = load_data(config, request.command.choices, worlds.unconnected())
    composed = ModeConfig(config, request.command.choices)
    cell = plan_cell(composed, data, "pipeline", 6, 1e9, on_gpu=True)
    add_times(cell, Costs(load_device("h100", [CONF]), 6))
    assert [rank.rank for rank in cell.ranks] == [0, 1, 3, 5]
    assert 0.3 < cell.bubble < 0.8  # of equal stages it is 5/9


def test_one_command_writes_tables_a_plot_and_a_command_to_copy(here: Callable[..., int], tmp_path: Path) -> None:
    modes = "plan.modes=[none,ddp,fsdp,tp,local_sgd]"
    words = (*MLP[:3], modes, "plan.world_sizes=[1,64]", "plan.device=h100", "batch_size=64")
    assert here(f"--config-dir={CONF}", "task=plan", *words) == 0
    (path,) = (tmp_path / "outputs" / "run").iterdir()
    content = json.loads((path / "plan.json").read_text())
    cells = {(cell["mode"], cell["world_size"]): cell for cell in content["cells"]}
    assert len(cells) == 10
    assert "parallel=none is for one process" in cells["none", 64]["reason"]
    assert cells["fsdp", 64]["mesh"]["shard"] == 64 and cells["tp", 64]["mesh"]["tensor"] == 2
    for cell in (cell for cell in cells.values() if "reason" not in cell):
        assert cell["fits"] and cell["step_time_s"] > 0 and cell["largest_micro_batch"] > 1000
        assert set(cell["memory_bytes"]["0"]) == set(KINDS)
    command = content["command"]
    assert f" --config-dir={CONF} " in command and "batch_size=64" in command
    assert "parallel=local_sgd" not in command and "plan." not in command
    assert (path / "plan.png").stat().st_size > 1000
    assert f"`{command}`" in (path / "plan.md").read_text()
    assert json.loads((path / "result.json").read_text())["state"] == "finished"


@pytest.mark.parametrize(
    ("num_ranks", "start"),
    [
        (1, "python -m runner"),
        (8, "torchrun --nproc-per-node=8 -m runner"),
        (12, "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 --nproc-per-node=6 -m runner"),
        (64, "torchrun --nnodes=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 --nproc-per-node=8 -m runner"),
    ],
)
def test_the_command_to_copy_starts_all_ranks(num_ranks: int, start: str) -> None:
    assert start_command(num_ranks, load_device("h100", [CONF])) == start
    nodes, ranks = (re.search(rf"--{option}=(\d+)", start) for option in ("nnodes", "nproc-per-node"))
    assert int(nodes[1] if nodes else 1) * int(ranks[1] if ranks else 1) == num_ranks


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("plan.device=h10",), "no such data sheet; did you mean h100"),
        (("plan.device=odd",), "odd.yaml is not a valid data sheet"),
        (("plan.collectives=custom",), "plan.collectives=custom has not measured all_reduce"),
        (("plan.modes=[dpp]",), "unknown mode dpp; did you mean d"),
        (("plan.world_sizes=[0]",), "must list numbers of at least 1; try [1]"),
        (("plan.modes=[none]", "plan.world_sizes=[2]"), "none: parallel=none is for one process"),
        (
            ("plan.modes=[ddp]", "plan.memory_gib=1e-6"),
            "=1e-06: no mode fits into 1e-06 GiB per rank: the",
        ),
        (("plan.memory_gib=0",), "plan.memory_gib=0 must be above 0 and finite, or null; try 40"),
        (("plan.modes=[ddp]", "model=reading"), "odd_models.py:12); without activations, a rank needs "),
    ],
)
def test_wrong_input_is_refused(
    overrides: tuple[str, ...],
    message: str,
    here: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    custom = tmp_path / "custom"
    for folder in ("device", "model"):
        (custom / folder).mkdir(parents=True)
    (custom / "device" / "odd.yaml").write_text("memory_gib: 1\n")
    (custom / "model" / "reading.yaml").write_text("_target_: odd_models.Reading\n")
    (custom / "odd_models.py").write_text(
        """from torch import nn


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        y = self.layer(x.flatten(1))
        if True:
            y = y * y.mean().item()
        return y
"""
    )
    model = () if any(each.startswith("model=") for each in overrides) else MLP[:2]
    assert here(f"--config-dir={custom}", "task=plan", *model, *MLP[2:], *overrides) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()


def test_a_mode_that_the_command_line_refuses_is_a_cell_with_the_reason() -> None:
    cells = plan_modes({"tp": InputError("no plan")}, {1: 1e9, 2: 1e9}, load_device("h100", [CONF]))
    assert [(cell.mode, cell.world_size, cell.reason) for cell in cells] == [("tp", 1, "no plan"), ("tp", 2, "no plan")]
    assert all(cell.is_refused and not cell.ranks for cell in cells)


def unknown(*fields: Any) -> Any:
    raise AttributeError("no such operator in this process")


@pytest.mark.parametrize("problem", [None, "operator", "memory"])
def test_two_processes_plan_what_one_plans(problem: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a worker exits, or sends an operator that this process does not know, this process plans again."""
    modes = {mode: composed_with(*WITH_BATCH_NORM, f"parallel={mode}")[0] for mode in ("ddp", "fsdp", "none")}
    arguments = modes, {1: 1e9, 64: 1e6}, load_device("this", [CONF])
    expected = plan_modes(*arguments)
    own: list[str] = []  # the modes that this process plans
    monkeypatch.setattr(modes_module, "plan_cell", lambda *args: (own.append(args[2]), plan_cell(*args))[1])
    if problem == "operator":
        monkeypatch.setattr(timeline, "_named_operator", unknown)
    elif problem == "memory":
        monkeypatch.setattr(modes_module, "_begin_worker", lambda: os._exit(1))
    cells = plan_modes(*arguments, num_processes=2)
    assert len(own) == (len(cells) if problem else 0)

    def without_times(cell: Cell) -> Cell:
        return replace(cell, step_s=0, bubble=0, samples_per_s=0)

    assert [*map(without_times, cells)] == [*map(without_times, expected)]
    assert [cell.step_s > 0 for cell in cells] == [cell.step_s > 0 for cell in expected] == 5 * [True] + [False]


def test_a_step_has_no_more_samples_than_the_data() -> None:
    few = ("model=mlp", "data=random", "data.num_train=6", "batch_size=16", "parallel=allreduce")
    config, request = worlds.configure(*few)
    data = load_data(config, request.command.choices, worlds.unconnected())
    composed = ModeConfig(config, request.command.choices)
    cell = plan_cell(composed, data, "allreduce", 5, 1e9, on_gpu=True)
    add_times(cell, Costs(load_device("h100", [CONF]), 5))
    assert [(rank.rank, rank.rows) for rank in cell.ranks] == [(0, 2)]
    assert cell.ranks[0].num_samples == 6 and cell.samples_per_s == 6 / cell.step_s


@pytest.mark.thorough
def test_no_process_is_left_if_a_plan_is_killed(commands: Commands) -> None:
    words = ("task=plan", "model=gpt", "data=text", "plan.modes=[ddp,fsdp]", "plan.device=h100", "plan.world_sizes=[8]")
    process = commands.start("-m", "runner", *words)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: bool(children.read_text()), process)
    workers = [Path("/proc", pid) for pid in children.read_text().split()]
    process.kill()
    process.wait()
    wait_until(lambda: not any(worker.exists() for worker in workers))


def test_kept_samples_and_batches_that_are_copied_ahead_are_counted() -> None:
    """A block of 16 batches is read at once, and with a GPU, the next one is copied meanwhile."""
    words = (*MLP, "data=random", "data.num_train=700", "data.num_val=20", "parallel=none")
    sample = 64 * 4 + 4  # bytes of the inputs and of the target
    plans = {
        (on_gpu, kept): plan_rank(*composed_with(*words, f"keep_samples={kept}"), 0, 1, on_gpu)
        for on_gpu in (False, True)
        for kept in ("false", "device")
    }
    for on_gpu in (False, True):
        more = plans[on_gpu, "device"].peak - plans[on_gpu, "false"].peak
        assert more == 720 * sample - on_gpu * 16 * 16 * sample
    between = [plans[True, kept].bytes_between for kept in ("device", "false")]
    assert between[0] - between[1] == 720 * sample
