"""How long operators and messages take: measured on this machine, or by the data sheet of another device."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch.utils.flop_counter import flop_registry

from runner.distributed.machine import allowed_cores
from runner.errors import InputError, did_you_mean
from runner.planning.timeline import Message, Operator, Shape
from runner.records.result import read_result

THIS = "this"
MIN_S, MAX_REPEATS = 2e-3, 50  # an operator is repeated for so long, or so often
KERNEL_S = 2e-6  # of an operator on a GPU, at least
PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Link(NamedTuple):
    """A connection between two ranks: bytes per second, and seconds per message."""

    bandwidth: float
    latency_s: float


@dataclass(frozen=True)
class Device:
    """A data sheet: a file of conf/device.

    Attributes:
        memory_gib: The memory of a rank; None for that of this machine, which its ranks divide.
        ranks_per_machine: The number of ranks that are connected by `link`; others are connected by `network`.
        operator_s: The time in which the processor starts an operator, while the device may compute earlier ones.
        step_s: The time of a step besides its operators and messages.
        link: Between ranks of a machine.
        network: Between machines.
        flops: The peak operations per second, by precision. Empty if operators are measured.
        memory_bandwidth: Bytes per second.
    """

    name: str
    memory_gib: float | None
    ranks_per_machine: float | None
    operator_s: float
    step_s: float
    link: Link
    network: Link
    flops: Mapping[str, float]
    memory_bandwidth: float

    @property
    def is_measured(self) -> bool:
        return not self.flops


def data_sheets(directories: list[Path]) -> dict[str, Path]:
    """Return the data sheet of each device; that of a later directory takes precedence."""
    return {path.stem: path for folder in directories for path in sorted((folder / "device").glob("*.yaml"))}


def load_device(name: str, directories: list[Path]) -> Device:
    """Read the data sheet of a device. Raise InputError if no directory has a valid one."""
    files = data_sheets(directories)
    if name not in files:
        raise InputError(
            f"device={name}: no such data sheet{did_you_mean(name, files)}; there are {', '.join(sorted(files))}; "
            f"to add it, write device/{name}.yaml into a --config-dir, with the keys of conf/device/h100.yaml"
        )
    try:
        sheet = dict(yaml.safe_load(files[name].read_text()))
        links = {key: Link(**{of: float(value) for of, value in sheet.pop(key).items()}) for key in ("link", "network")}
        flops = {key: float(value) for key, value in (sheet.pop("flops") or {}).items()}
        numbers = {key: None if value is None else float(value) for key, value in sheet.items()}
        return Device(name=name, **links, flops=flops, **numbers)  # type: ignore[arg-type]
    except (TypeError, ValueError, KeyError, yaml.YAMLError) as error:
        raise InputError(f"device={name}: {files[name]} is no data sheet: {error}") from None


def with_measured_link(device: Device, run: Path) -> Device:
    """Return the data sheet with the link that a run of task=collectives has measured, by its all_reduce.

    It is the network if the run had more ranks than a machine of the device. Raises InputError if it is no such run.
    """
    result = read_result(run) or {}
    seconds, rates = (_by_size(result, f"all_reduce/{name}/") for name in ("seconds", "bus_gb_s"))
    if not seconds or not rates:
        raise InputError(f"plan.collectives={run} has not measured all_reduce; name a run of task=collectives")
    size = int(result["world_size"])
    link = Link(1e9 * rates[max(rates)], seconds[min(seconds)] / _rounds("all_reduce", size))
    is_near = device.ranks_per_machine is None or size <= device.ranks_per_machine
    return replace(device, link=link) if is_near else replace(device, network=link)


def _by_size(result: Mapping[str, Any], prefix: str) -> dict[int, float]:
    """Return the metrics whose names are the prefix and a number of bytes."""
    named = result.get("metrics", {}).items()
    return {int(name.removeprefix(prefix)): value for name, value in named if name.startswith(prefix)}


def _rounds(kind: str, num_ranks: int) -> int:
    """Return the number of messages that follow each other in a collective: one for each doubling of the ranks."""
    return max(1, (num_ranks - 1).bit_length()) * (2 if kind == "all_reduce" else 1)


class Costs:
    """The time of operators and messages in a world of ranks on a device, in seconds.

    threads: The threads of a rank; None for an equal part of this machine's.
    """

    def __init__(self, device: Device, world_size: int, threads: int | None = None):
        self._device = device
        cores = len(allowed_cores())
        self._threads = threads or max(1, cores // world_size)
        self._contention = max(1.0, world_size / cores) if device.is_measured else 1.0
        self._known: dict[Operator, float] = {}

    @property
    def on_gpu(self) -> bool:
        return not self._device.is_measured

    @property
    def step_s(self) -> float:
        return self._device.step_s * self._contention

    def operators(self, counts: Counter[Operator]) -> float:
        """Return the time of operators that follow each other."""
        seconds = sum(self.operator(operator) * count for operator, count in counts.items())
        start_s = counts.total() * self._device.operator_s
        return seconds + start_s * self._contention if self._device.is_measured else max(seconds, start_s)

    def operator(self, operator: Operator) -> float:
        if operator not in self._known:
            estimate = self._measure if self._device.is_measured else self._estimate
            self._known[operator] = estimate(operator) * self._contention
        return self._known[operator]

    def message(self, message: Message) -> float:
        """Return the time from the start of a message, or of a collective on the slowest rank, to its end.

        A collective moves its bytes over the busiest link as in a ring, and takes a latency for each doubling of ranks.
        """
        size, n = self._device.ranks_per_machine, message.ranks
        is_near = size is None or message.span[0] // size == message.span[1] // size
        link = self._device.link if is_near else self._device.network
        if message.peer is not None or message.kind == "rpc":
            return link.latency_s + message.num_bytes / link.bandwidth
        moved = message.num_bytes * (n - 1) / n * (2 if message.kind == "all_reduce" else 1)
        return _rounds(message.kind, n) * link.latency_s + moved / link.bandwidth

    def _measure(self, operator: Operator) -> float:
        """Return the time of a call with as many threads as a rank has, or the estimate if it cannot be called."""
        num_threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            args, kwargs = operator.arguments(_make)
            times = list[float]()
            with torch.no_grad():
                operator.function(*args, **kwargs)
                while len(times) < MAX_REPEATS and sum(times) < MIN_S:
                    start = time.perf_counter()
                    operator.function(*args, **kwargs)
                    times.append(time.perf_counter() - start)
            return min(times)
        except Exception:  # for example an operator that checks values
            return self._estimate(operator)
        finally:
            torch.set_num_threads(num_threads)

    def _estimate(self, operator: Operator) -> float:
        """Return the time by the data sheet: that of the computation, or that of reading and writing the memory."""
        if _is_view(operator.function):
            return 0.0
        seconds = sum(shape.num_bytes for shape in operator.shapes) / self._device.memory_bandwidth
        if (formula := flop_registry.get(operator.function.overloadpacket)) is not None and self._device.flops:
            args, kwargs = operator.arguments(lambda shape: torch.Size(shape.size))
            outputs = [torch.Size(each.size) if isinstance(each, Shape) else each for each in operator.outputs]
            flops = formula(*args, **kwargs, out_val=outputs[0] if len(outputs) == 1 else outputs)
            precision = PRECISIONS.get(operator.shapes[0].dtype, "fp32")
            seconds = max(seconds, flops / self._device.flops[precision])
        return max(seconds, KERNEL_S)


def _make(shape: Shape) -> torch.Tensor:
    """Return a tensor whose values most operators accept: positive numbers, or the indices 0."""
    tensor = torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype)
    if 0 in shape.stride or not shape.dtype.is_floating_point:
        return tensor.zero_() if 0 not in shape.stride else torch.zeros((), dtype=shape.dtype).expand(shape.size)
    return tensor.uniform_(0.1, 1.0)


def _is_view(function: Any) -> bool:
    """Return True if an operator only returns another view of its argument."""
    aliases = [result.alias_info for result in function._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
