"""Batch norm over ranks against nn.BatchNorm in one process on the concatenated batch."""

import copy
import pickle
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from runner.distributed.sync_batch_norm import (
    RecordBatchNorm,
    SyncBatchNorm,
    Uncounted,
    has_batch_norm,
    is_batch_norm,
    keeps_all_buffers,
    normalizes_in_evaluation,
    synchronize_batch_norm,
    trains_batch_norm,
    use_group,
)

EXACT = 1e-12  # of float64


class BatchNormAct(nn.BatchNorm2d):
    """A layer with a forward of its own, as in timm: batch norm, dropout and an activation in place."""

    def __init__(self, num_features: int, **options: Any):
        super().__init__(num_features, **options)
        self.drop, self.act = nn.Dropout(0.0), nn.ReLU(inplace=True)

    def forward(self, input: Tensor) -> Tensor:
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1 / float(self.num_batches_tracked) if self.momentum is None else factor
        statistics = (self.running_mean, self.running_var)
        uses_batch = self.training or self.running_mean is None
        output = F.batch_norm(input, *statistics, self.weight, self.bias, uses_batch, factor, self.eps)
        return self.act(self.drop(output))


class Normalize(nn.Module):
    """A layer that derives from none of torch's, with other names, and calls torch.batch_norm."""

    def __init__(self, num_features: int):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(num_features)), nn.Parameter(torch.zeros(num_features))
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("square", torch.ones(num_features))

    def forward(self, input: Tensor) -> Tensor:
        statistics = (self.mean, self.square)
        return torch.batch_norm(input, self.scale, self.shift, *statistics, self.training, 0.3, 1e-4, False)


class ByHand(nn.BatchNorm2d):
    """A layer that computes the statistics of the batch itself."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        var, mean = torch.var_mean(input, (0, 2, 3), keepdim=True)
        return (input - mean) * (var + self.eps).rsqrt()


def check_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def check_against_one_process(
    rank: int, world_size: int, layer: nn.Module, batches: list[Tensor], sizes: list[int], tolerance: float
) -> dict[str, Tensor]:
    """Train `layer` on whole batches and, synchronized, on this rank's samples; return the latter's buffers."""
    synchronized = copy.deepcopy(layer).eval()
    with RecordBatchNorm():
        synchronized(batches[0])
    synchronize_batch_norm(synchronized.train())
    for batch in batches:
        direction = torch.randn(batch.shape, generator=torch.Generator().manual_seed(1)).to(batch)
        whole = batch.clone(memory_format=torch.preserve_format).requires_grad_()
        part = batch.split(sizes)[rank].clone(memory_format=torch.preserve_format).requires_grad_()
        expected, output = layer(whole), synchronized(part)
        check_close(output, expected.split(sizes)[rank], tolerance)
        if batch.dim() == 4 and batch.is_contiguous(memory_format=torch.channels_last):
            assert output.is_contiguous(memory_format=torch.channels_last)
        (expected * direction).sum().backward()
        (output * direction.split(sizes)[rank]).sum().backward()
        assert part.grad is not None and whole.grad is not None
        check_close(part.grad, whole.grad.split(sizes)[rank], tolerance)
    for ours, theirs in zip(synchronized.parameters(), layer.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        dist.all_reduce(ours.grad)  # each rank has its part of the sum
        check_close(ours.grad, theirs.grad, tolerance)
    buffers = dict(synchronized.named_buffers())
    for name, expected in layer.named_buffers():
        check_close(buffers[name], expected, tolerance)
    return buffers


def assert_alike(results: Iterable[dict[str, Tensor]]) -> None:
    first, *others = results
    for other in others:
        assert other.keys() == first.keys() and all(torch.equal(other[name], first[name]) for name in first)


def count_collectives(function: Callable[[], Any]) -> dict[str, int]:
    with CommDebugMode() as mode:
        function()
    return {str(operator).split(".")[1]: count for operator, count in mode.get_comm_counts().items()}


LAYERS = {
    "1d": (lambda: nn.BatchNorm1d(3), (8, 3)),
    "1d with length": (lambda: nn.BatchNorm1d(3), (8, 3, 5)),
    "2d": (lambda: nn.BatchNorm2d(3), (8, 3, 4, 5)),
    "3d": (lambda: nn.BatchNorm3d(3), (8, 3, 2, 3, 4)),
    "other constants": (lambda: nn.BatchNorm2d(3, eps=0.1, momentum=0.7), (8, 3, 4, 5)),
    "cumulative": (lambda: nn.BatchNorm2d(3, momentum=None), (8, 3, 4, 5)),
    "not affine": (lambda: nn.BatchNorm2d(3, affine=False), (8, 3, 4, 5)),
    "nothing tracked": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (8, 3, 4, 5)),
    "subclass": (lambda: BatchNormAct(3), (8, 3, 4, 5)),
    "cumulative subclass": (lambda: BatchNormAct(3, momentum=None), (8, 3, 4, 5)),
    "nothing tracked by a subclass": (lambda: BatchNormAct(3, track_running_stats=False), (8, 3, 4, 5)),
    "other class": (lambda: Normalize(3), (8, 3, 4, 5)),
}


@pytest.mark.parametrize("sizes", [[1, 7], [3, 0, 4, 1]], ids=str)
def test_training_matches_one_process(sizes: list[int]) -> None:
    def run(rank: int, world_size: int) -> dict[str, Tensor]:
        buffers = {}
        for kind, (make, shape) in LAYERS.items():
            torch.manual_seed(0)
            layer = make().double()
            for parameter in layer.parameters():
                nn.init.normal_(parameter)
            # Three batches distinguish the cumulative average from the exponential one.
            batches = [torch.randn(shape, dtype=torch.float64) * (step + 1) + step for step in range(3)]
            found = check_against_one_process(rank, world_size, layer, batches, sizes, EXACT)
            buffers.update({f"{kind} {name}": buffer for name, buffer in found.items()})
        return buffers

    assert_alike(run_ranks(run, len(sizes)))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)], ids=str)
def test_memory_formats(memory_format: torch.memory_format, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    batch = torch.randn(20, 6, 14, 14, dtype=dtype).to(memory_format=memory_format)
    # Gradients of parameters are sums over 3,920 values, too many for this tolerance in float32.
    layer = nn.BatchNorm2d(6, affine=dtype == torch.float64, dtype=dtype)
    assert_alike(run_ranks(check_against_one_process, 2, layer, [batch], [13, 7], tolerance))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
def test_statistics_are_exact_for_a_large_mean(memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(60, 4, 28, 28) + 1e4).to(memory_format=memory_format)
    batch[40:] += 1  # the second rank's mean differs

    def run(rank: int, world_size: int) -> dict[str, Tensor]:
        layer = synchronize_batch_norm(nn.BatchNorm2d(4, momentum=1.0))
        layer(batch.split([40, 20])[rank])
        return dict(layer.named_buffers())

    results = run_ranks(run, 2)
    assert_alike(results)
    var, mean = torch.var_mean(batch.double(), (0, 2, 3))
    assert_close(results[0]["running_mean"].double(), mean, rtol=0, atol=5e-3)
    assert_close(results[0]["running_var"].double(), var, rtol=1e-3, atol=0)


def test_low_precision_computes_statistics_in_float32() -> None:
    torch.manual_seed(0)
    batch = torch.randn(16, 3, 8, 8).add(3).bfloat16()
    var, mean = torch.var_mean(batch.double(), (0, 2, 3))

    def run(rank: int, world_size: int, dtype: torch.dtype) -> None:
        layer = synchronize_batch_norm(nn.BatchNorm2d(3, momentum=1.0, dtype=dtype))
        output = layer(batch.split([9, 7])[rank])
        output.sum().backward()
        assert output.dtype == torch.bfloat16
        assert all(p.grad is not None and p.grad.dtype == dtype for p in layer.parameters())
        buffers = dict(layer.named_buffers())
        for name, exact in (("running_mean", mean), ("running_var", var)):
            assert_close(buffers[name], exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)

    def run_autocast(rank: int, world_size: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            run(rank, world_size, torch.float32)
            # Gradients of the input are rounded to bfloat16's 8 bits twice, those of nn.BatchNorm once.
            check_against_one_process(rank, world_size, nn.BatchNorm2d(3), [batch], [9, 7], 2**-7)

    run_ranks(run, 2, torch.bfloat16)
    run_ranks(run_autocast, 2)


def test_one_collective_forward_and_one_backward() -> None:
    def run(rank: int, world_size: int) -> list[dict[str, int]]:
        layer = synchronize_batch_norm(nn.BatchNorm2d(3))
        input = torch.randn(rank, 3, 4, 4, requires_grad=True)
        outputs: list[Tensor] = []
        forward = count_collectives(lambda: outputs.append(layer(input)))
        backward = count_collectives(outputs[0].sum().backward)
        return [forward, backward, count_collectives(lambda: layer.eval()(input).sum().backward())]

    gathered = {"_allgather_base_": 1}  # a small sum, in the order of the ranks
    assert run_ranks(run, 2) == [[gathered, gathered, {}]] * 2


def test_one_value_per_channel_is_refused_on_all_ranks() -> None:
    batch = torch.randn(1, 3, 1, 1)

    def run(rank: int, world_size: int) -> str:
        with pytest.raises(ValueError) as caught:
            synchronize_batch_norm(nn.BatchNorm2d(3))(batch.split([0, 1])[rank])
        return str(caught.value)

    with pytest.raises(ValueError) as expected:
        nn.BatchNorm2d(3)(batch)
    assert run_ranks(run, 2) == [str(expected.value)] * 2


def test_batch_that_is_empty_on_all_ranks_changes_no_statistics() -> None:
    layer = nn.BatchNorm2d(3)
    run_ranks(check_against_one_process, 2, layer, [torch.randn(0, 3, 4, 4)], [0, 0], EXACT)


def test_samples_that_are_not_counted_change_no_statistics() -> None:
    batch = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def run(rank: int, world_size: int) -> None:
        layer, alone = nn.BatchNorm2d(3).double(), nn.BatchNorm2d(3).double()
        synchronized = synchronize_batch_norm(copy.deepcopy(layer))
        expected, input = alone(batch), batch if rank == 0 else torch.full_like(batch[:2], 9.0)
        with nullcontext() if rank == 0 else Uncounted():
            output, separate = synchronized(input), layer(input)
        (output.square().sum() * (rank == 0)).backward()
        expected.square().sum().backward()
        if rank == 0:
            check_close(output, expected, EXACT)
        for name, statistic in alone.named_buffers():
            check_close(synchronized.get_buffer(name), statistic, EXACT)
        for parameter, expected_parameter in zip(synchronized.parameters(), alone.parameters(), strict=True):
            assert parameter.grad is not None and expected_parameter.grad is not None
            check_close(parameter.grad, expected_parameter.grad * (rank == 0), EXACT)
        if rank == 1:  # layers that are not synchronized
            (separate.sum() * 0).backward()
            assert torch.equal(layer.running_mean, torch.zeros(3).double())
            assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())
            with Uncounted():  # as with autocast
                assert layer.float()(input.bfloat16()).dtype == torch.bfloat16

    run_ranks(run, 2)


def test_group_synchronizes_only_its_ranks() -> None:
    batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def run(rank: int, world_size: int) -> None:
        group, _ = dist.new_subgroups(2)
        layer = nn.BatchNorm1d(3).double()
        synchronized = synchronize_batch_norm(copy.deepcopy(layer))
        use_group(synchronized, group)  # type: ignore[arg-type]
        half = batch.split(4)[rank // 2]
        check_close(synchronized(half.split(2)[rank % 2]), layer(half).split(2)[rank % 2], EXACT)

    run_ranks(run, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.ReLU())
        self.head = nn.Linear(6, 3)

    def forward(self, images: Tensor) -> Tensor:  # (N, 1, H, W) -> (N, 3)
        return self.head(self.second(self.first(images)).mean((2, 3)))


def test_ddp_trains_as_one_process() -> None:
    sizes = [6, 0, 6]
    torch.manual_seed(0)
    net = Net().double()
    images, labels = torch.randn(5, 12, 1, 8, 8, dtype=torch.float64), torch.randint(3, (5, 12))

    def train(model: nn.Module, parts: list[int], rank: int) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        for step in range(5):
            output, target = model(images[step].split(parts)[rank]), labels[step].split(parts)[rank]
            # DDP takes the mean of the ranks' gradients; the loss is the mean over the samples of all ranks.
            loss = F.cross_entropy(output, target, reduction="sum") * len(parts) / sum(parts)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {name.removeprefix("module."): tensor for name, tensor in model.state_dict().items()}

    def run(rank: int, world_size: int) -> dict[str, Tensor]:
        expected = train(copy.deepcopy(net), [12], 0)
        state = train(DistributedDataParallel(synchronize_batch_norm(copy.deepcopy(net))), sizes, rank)
        assert_close(state, expected, rtol=1e-9, atol=1e-11)
        return state

    assert_alike(run_ranks(run, len(sizes)))


# torch hides its warning after a graph break, but not if warnings are errors.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
def test_compiles() -> None:
    def run(rank: int, world_size: int) -> None:
        torch.manual_seed(rank)
        images = torch.randn(4, 1, 8, 8)
        torch.manual_seed(0)
        net = synchronize_batch_norm(Net())
        compiled = copy.deepcopy(net)
        compiled.compile(backend="aot_eager")
        for model in (net, compiled):
            model(images).square().sum().backward()
        for ours, theirs in zip(compiled.parameters(), net.parameters(), strict=True):
            assert_close(ours.grad, theirs.grad)

    run_ranks(run, 2)


def test_conversion_keeps_everything_but_the_class() -> None:
    net = Net()
    net.first[1].eval()
    net.second[1].weight.requires_grad_(False)
    net.tied, listed = net.first[1], [net.second[1]]
    before = {name: id(tensor) for name, tensor in net.state_dict(keep_vars=True).items()}
    settings = [(layer.eps, layer.momentum, layer.affine, layer.training) for layer in (net.tied, *listed)]
    assert has_batch_norm(net) and not has_batch_norm(net.head)
    assert synchronize_batch_norm(synchronize_batch_norm(net)) is net
    assert all(isinstance(layer, SyncBatchNorm) for layer in (net.first[1], net.second[1], net.tied, *listed))
    assert type(net.first[1]).__name__ == "BatchNorm2d"  # as in messages about the model
    assert {name: id(tensor) for name, tensor in net.state_dict(keep_vars=True).items()} == before
    assert [(layer.eps, layer.momentum, layer.affine, layer.training) for layer in (net.tied, *listed)] == settings
    assert not net.second[1].weight.requires_grad
    assert isinstance(synchronize_batch_norm(nn.BatchNorm1d(3)), SyncBatchNorm)
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert isinstance(copied.tied, SyncBatchNorm) and copied.tied is copied.first[1]
        assert_close(copied.state_dict(), net.state_dict())


def test_layers_that_compute_their_own_statistics_are_refused_without_changes() -> None:
    net = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(ByHand(3)))
    with RecordBatchNorm():
        net.eval()(torch.ones(2, 3, 1, 1))
        net.train()(torch.ones(2, 3, 1, 1))
    with pytest.raises(ValueError, match=r"1\.0=ByHand cannot be synchronized over ranks, because"):
        synchronize_batch_norm(net)
    with pytest.raises(ValueError, match=r"1=LazyBatchNorm2d cannot be synchronized"):
        synchronize_batch_norm(nn.Sequential(net[0], nn.LazyBatchNorm2d()))
    assert type(net[0]) is nn.BatchNorm2d and has_batch_norm(net[1])


class Functional(nn.Module):
    """Calls batch_norm without a layer, also in evaluation, after a layer of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.InstanceNorm1d(3, affine=True, track_running_stats=True)

    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(self.norm(self.linear(input).unsqueeze(2).expand(-1, -1, 2)), None, None, training=True)


def test_only_modules_that_call_batch_norm_are_synchronized() -> None:
    net = nn.Sequential(Functional(), Normalize(3), nn.BatchNorm1d(3).eval())
    assert has_batch_norm(net) and not trains_batch_norm(net) and not normalizes_in_evaluation(net)
    with RecordBatchNorm():
        net.eval()(torch.ones(2, 3))
    net[:2].train()
    assert [is_batch_norm(part) for part in (net, *net, net[0].norm)] == [False, False, True, True, False]
    assert trains_batch_norm(net) and not trains_batch_norm(net[2]) and not trains_batch_norm(net[0].norm)
    assert normalizes_in_evaluation(net) and not normalizes_in_evaluation(net[1])
    assert [isinstance(part, SyncBatchNorm) for part in synchronize_batch_norm(net)] == [True] * 3
    assert type(net[0].norm) is nn.InstanceNorm1d
    assert keeps_all_buffers(net[2]) and not keeps_all_buffers(net[1])  # their names are not those of nn.BatchNorm1d
