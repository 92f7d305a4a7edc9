"""The times of operators and messages: measured on this machine, or estimated from the data sheet of another device."""

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch.utils.flop_counter import flop_registry

from runner.errors import InputError, did_you_mean
from runner.planning.memory import GIB
from runner.planning.timeline import Message, Operator, Shape
from runner.process.cores import allowed_cores
from runner.records.run_record import find_run

THIS = "this"  # this machine: the data sheet of its GPU, or else that of its CPU
MIN_S, MAX_REPEATS = 2e-3, 50  # an operator is timed for MIN_S seconds, but at most MAX_REPEATS times
LONG_S = 3e-2  # a first call is only timed if it takes this long
NUM_DRAWN = 2**20  # the random numbers of the inputs of measured operators
ALIGNED = 64  # elements: the memory of a tensor begins at a multiple of them
KERNEL_S = 2e-6  # the shortest estimate, about the time of an empty kernel on a GPU
REACHED = 0.75  # the fraction of a data sheet's rates that operators reach, measured on an H100
UNKNOWN_GPU = "a100"
LINKS = ("link", "group_link", "network")
PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
PRECISIONS |= {torch.float8_e4m3fn: "float8", torch.float8_e5m2: "float8"}


class Link(NamedTuple):
    """A connection between two ranks: bytes per second, and seconds per message."""

    bandwidth: float
    latency_s: float


@dataclass(frozen=True)
class Device:
    """A data sheet: a file of conf/device, in which h100.yaml and this.yaml explain the keys."""

    name: str
    memory_gib: float | None
    ranks_per_machine: float | None
    operator_s: float  # a GPU computes earlier operators meanwhile
    step_s: float
    link: Link
    group_link: Link  # by default `link`
    network: Link
    flops: Mapping[str, float]
    memory_bandwidth: float

    @property
    def is_measured(self) -> bool:
        return not self.flops


def data_sheets(directories: list[Path]) -> dict[str, Path]:
    """Return the file of each device's data sheet, by name; a later directory takes precedence."""
    return {path.stem: path for parent in directories for path in sorted((parent / "device").glob("*.yaml"))}


def load_device(name: str, directories: list[Path], key: str = "plan.device", kind: str = "cpu") -> Device:
    """Read the data sheet of a device, which `key` names. Raise InputError if no directory has a valid one.

    kind: cpu or cuda, for a device named THIS. The memory is then that of the GPU; UNKNOWN_GPU is the data sheet of a
    GPU that has none.
    """
    files = data_sheets(directories)
    if name == THIS and kind == "cuda" and torch.cuda.is_available():
        gpu = name_of_gpu(directories) or UNKNOWN_GPU
        return replace(load_device(gpu, directories, key), memory_gib=torch.cuda.mem_get_info()[1] / GIB)
    if name not in files:
        raise InputError(
            f"{key}={name}: no such data sheet{did_you_mean(name, sorted(files))}; to add it, write "
            f"device/{name}.yaml into a --config-dir, with the keys of conf/device/h100.yaml"
        )
    try:
        sheet = dict(yaml.safe_load(files[name].read_text()))
        links = {
            key: Link(**{of: float(value) for of, value in sheet.pop(key).items()}) for key in LINKS if key in sheet
        }
        links.setdefault("group_link", links["link"])
        flops = {key: float(value) for key, value in (sheet.pop("flops") or {}).items()}
        if flops and "fp32" not in flops:
            raise KeyError("flops.fp32")  # the rate of every precision that the sheet does not list
        numbers = {key: None if value is None else float(value) for key, value in sheet.items()}
        return Device(name=name, **links, flops=flops, **numbers)  # type: ignore[arg-type]
    except (TypeError, ValueError, KeyError, yaml.YAMLError) as error:
        raise InputError(f"{key}={name}: {files[name]} is not a valid data sheet: {error}") from None


def name_of_gpu(directories: list[Path]) -> str | None:
    """Return the name of the data sheet of this machine's GPU, or None if no directory has one."""
    if not torch.cuda.is_available():
        return None
    words = torch.cuda.get_device_name().lower().replace("-", " ").split()
    return next((sheet for sheet in data_sheets(directories) if sheet in words), None)


def count_flops(function: Any, *args: Any, out: Any, **kwargs: Any) -> int:
    """Return the floating-point operations of a call, of tensors or sizes; 0 if the operator is not counted.

    Matrix products, convolutions and attention are counted, by the formulas of torch.utils.flop_counter.
    """
    formula = flop_registry.get(function.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def peak_rate(flops: Mapping[str, float], precision: str, function: Any, tf32: bool | str) -> float:
    """Return the FLOPs per second of a data sheet for an operator that computes in this precision.

    tf32: the fp32 operators that use TensorFloat-32: all, none, or "convolutions".
    """
    if precision == "fp32" and (tf32 is True or (tf32 and "convolution" in function.__name__)):
        precision = "tf32"
    if precision == "float8" and precision not in flops:
        precision = "bf16"
    return flops.get(precision, flops["fp32"])


def with_measured_link(device: Device, run: Path) -> Device:
    """Return the data sheet with the bandwidth and latency of all_reduce that a run of task=collectives has measured.

    They replace `network` if the run had more ranks than a machine of the device, otherwise `link`. Raises InputError
    if the run has not measured them.
    """
    record = find_run(run)
    seconds, rates = (_by_size(record.metrics, f"all_reduce/{name}/") for name in ("seconds", "bus_gb_s"))
    if not seconds or not rates:
        raise InputError(f"plan.collectives={run} has not measured all_reduce; name a run of task=collectives")
    size = record.world_size
    link = Link(1e9 * rates[max(rates)], seconds[min(seconds)] / _rounds("all_reduce", size))
    is_near = device.ranks_per_machine is None or size <= device.ranks_per_machine
    return replace(device, link=link, group_link=link) if is_near else replace(device, network=link)


def _by_size(metrics: Mapping[str, float], prefix: str) -> dict[int, float]:
    """Return the metrics with this prefix, by the number of bytes with which their names end."""
    return {int(name.removeprefix(prefix)): value for name, value in metrics.items() if name.startswith(prefix)}


def _rounds(kind: str, num_ranks: int) -> int:
    """Return the number of successive messages in a collective: one per doubling of the ranks, two in all_reduce."""
    return max(1, (num_ranks - 1).bit_length()) * (2 if kind == "all_reduce" else 1)


class Costs:
    """The times of operators and messages of a rank, in seconds.

    If operators are measured, the ranks divide the cores of this machine. threads: the number of threads of a rank;
    None for its part of the cores. tf32: the fp32 operators that use TensorFloat-32 on a GPU, as in `peak_rate`.
    """

    def __init__(self, device: Device, world_size: int, threads: int | None = None, tf32: bool | str = "convolutions"):
        self._device, self._tf32 = device, tf32
        cores = len(allowed_cores())
        self._threads = threads or max(1, cores // world_size)
        self._contention = max(1.0, world_size / cores) if device.is_measured else 1.0
        self._known: dict[tuple[Any, ...], float] = {}  # by what the time depends on
        self._drawn: dict[torch.dtype, torch.Tensor] = {}

    @property
    def step_s(self) -> float:
        return self._device.step_s * self._contention

    def operators(self, counts: Counter[Operator]) -> float:
        """Return the time of successive operators, given the number of calls of each."""
        seconds = sum(self.operator(operator) * count for operator, count in counts.items())
        start_s = counts.total() * self._device.operator_s
        return seconds + start_s * self._contention if self._device.is_measured else max(seconds, start_s)

    def operator(self, operator: Operator) -> float:
        key: tuple[Any, ...] = (operator.function,)
        # The place of a view, the name of a range in a profile, and the factors of an optimizer change no time.
        if not (_is_view(operator.function) or operator.function.namespace == "profiler"):
            key += (operator.outputs, *(leaf for leaf in operator.leaves if not isinstance(leaf, float)))
        if key not in self._known:
            estimate = self._measure if self._device.is_measured else self._estimate
            self._known[key] = estimate(operator) * self._contention
        return self._known[key]

    def message(self, message: Message) -> float:
        """Return the time of a message, or of a collective from the moment at which all its ranks have started it.

        A collective takes the time that the bytes of a ring algorithm take on the link, and a latency per round.
        """
        size, n = self._device.ranks_per_machine, message.ranks
        is_near = size is None or message.span[0] // size == message.span[1] // size
        near = self._device.group_link if message.uses_group else self._device.link
        link = near if is_near else self._device.network
        if message.peer is not None or message.kind == "rpc":
            return link.latency_s + message.num_bytes / link.bandwidth
        moved = message.num_bytes * (n - 1) / n * (2 if message.kind == "all_reduce" else 1)
        return _rounds(message.kind, n) * link.latency_s + moved / link.bandwidth

    def _measure(self, operator: Operator) -> float:
        """Return the measured time of a call with the threads of a rank, or the estimate if the call fails."""
        num_threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            args, kwargs = self._inputs(operator)
            with torch.no_grad():
                first = _seconds(operator, args, kwargs)
                times = [first] if first > LONG_S else []
                while len(times) < MAX_REPEATS and sum(times) < MIN_S:
                    times.append(_seconds(operator, args, kwargs))
            return min(times)
        except Exception:  # for example an operator that checks values
            return self._estimate(operator)
        finally:
            torch.set_num_threads(num_threads)

    def _inputs(self, operator: Operator) -> tuple[Any, Any]:
        """Return arguments that most operators accept: floats are positive, integers and expanded tensors are zeros.

        The tensors of operators that write nothing are different parts of the same numbers, which are drawn once.
        """
        if _is_view(operator.function):  # reads no values; memory that nothing writes or reads costs nothing
            return operator.arguments(_empty)
        used = Counter[torch.dtype]()

        def create(shape: Shape) -> torch.Tensor:
            if 0 in shape.stride:
                return torch.zeros((), dtype=shape.dtype).expand(shape.size)
            if not shape.dtype.is_floating_point:
                return _empty(shape).zero_()
            start, length = used[shape.dtype], shape.extent
            used[shape.dtype] += ALIGNED * math.ceil(length / ALIGNED)
            tensor = self._numbers(shape.dtype, used[shape.dtype]).as_strided(shape.size, shape.stride, start)
            return _empty(shape).copy_(tensor) if operator.function._schema.is_mutable else tensor

        return operator.arguments(create)

    def _numbers(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return at least `count` positive numbers, copies of a block, because drawing them takes 50 times as long."""
        if dtype not in self._drawn:
            self._drawn[dtype] = torch.empty(NUM_DRAWN, dtype=dtype).uniform_(0.1, 1.0)
        numbers = self._drawn[dtype]
        if len(numbers) < count:
            count = max(count, 2 * len(numbers))
            numbers = self._drawn[dtype] = numbers[:NUM_DRAWN].repeat(math.ceil(count / NUM_DRAWN))
        return numbers

    def _estimate(self, operator: Operator) -> float:
        """Return the time according to the data sheet: the larger of the times of computation and memory accesses."""
        if _is_view(operator.function):
            return 0.0
        num_bytes = sum(shape.num_bytes for shape in operator.shapes)
        seconds = num_bytes / (REACHED * self._device.memory_bandwidth)
        if operator.function.overloadpacket in flop_registry and self._device.flops:
            args, kwargs = operator.arguments(lambda shape: torch.Size(shape.size))
            outputs = [torch.Size(each.size) if isinstance(each, Shape) else each for each in operator.outputs]
            out = outputs[0] if len(outputs) == 1 else outputs
            flops = count_flops(operator.function, *args, out=out, **kwargs)
            precision = PRECISIONS.get(operator.shapes[0].dtype, "fp32")
            peak = peak_rate(self._device.flops, precision, operator.function, self._tf32)
            seconds = max(seconds, flops / (REACHED * peak))
        return max(seconds, KERNEL_S)


def _seconds(operator: Operator, args: Any, kwargs: Any) -> float:
    """Return the time of one call."""
    start = time.perf_counter()
    operator.function(*args, **kwargs)
    return time.perf_counter() - start


def _empty(shape: Shape) -> torch.Tensor:
    return torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype)


def _is_view(function: Any) -> bool:
    """Return True if an operator only returns another view of its argument."""
    aliases = [result.alias_info for result in function._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
