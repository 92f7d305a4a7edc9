"""Gradients that ranks of one machine sum themselves, instead of DistributedDataParallel."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_machine import on_ranks, separate_machines
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner.distributed.local.exchange import exchange_of
from runner.distributed.world import World
from runner.errors import JobFailed
from runner.parallel.ddp import FixedBuckets

WIDTH = 300  # the weight's gradient is larger than one message
SEVERAL = {"bucket_cap_mb": 0.01}


class NoProcessGroup(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.namespace != "c10d", f"{function} goes through the process group"
        return function(*args, **(kwargs or {}))


class Model(nn.Module):
    """Three layers; the second one is optional."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, inputs: Tensor, with_second: bool = True) -> Tensor:
        hidden = self.first(inputs).tanh()
        output: Tensor = self.third(hidden)
        return output + self.second(hidden) if with_second else output


def inputs_of(rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def local_gradients(rank: int, **options: Any) -> list[Tensor]:
    """Return the gradients of this rank's samples only."""
    model = Model()
    model(inputs_of(rank), **options).sum().backward()
    return [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in model.parameters()
    ]


@pytest.mark.parametrize("options", [SEVERAL | {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}])
def test_sums_without_gloo_equal_those_of_several_machines_to_the_bit(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(world: World) -> list[Any]:
        wrapped = FixedBuckets(Model(), **options)
        assert wrapped.sum_on_cpu()
        is_one_machine = exchange_of() is not None
        if not is_one_machine:
            with pytest.raises(AssertionError, match="goes through the process group"), NoProcessGroup():
                dist.all_reduce(torch.ones(1))
        # With find_unused_parameters, the ranks exchange which parameters they use.
        has_no_other_exchange = is_one_machine and "find_unused_parameters" not in options
        for _ in range(3):
            wrapped.zero_grad()
            with wrapped.no_sync():
                wrapped(inputs_of(world.rank)).sum().backward()
            with NoProcessGroup() if has_no_other_exchange else nullcontext():
                wrapped(inputs_of(world.rank)).sum().backward()
        return [is_one_machine, *gradients(wrapped)]

    (is_one, *first), *others = on_ranks(tmp_path, 3, act)
    separate_machines(monkeypatch)
    on_several = on_ranks(tmp_path, 3, act)
    assert is_one and not any(is_one for is_one, *_ in on_several)
    for _, *result in (*others, *on_several):
        assert all(torch.equal(a, b) for a, b in zip(result, first, strict=True))
    for found, parts in zip(first, zip(*map(local_gradients, range(3)), strict=True), strict=True):
        torch.testing.assert_close(found, 2 * torch.stack(parts).sum(0))


def test_a_missing_gradient_is_reported_in_its_step(tmp_path: Path) -> None:
    """Also if an earlier micro-batch had one. Otherwise, the other gradients of the step would not be summed."""

    def act(world: World) -> list[str]:
        messages = []
        for in_first in (True, False):
            wrapped = FixedBuckets(Model())
            assert wrapped.sum_on_cpu()
            wrapped(inputs_of(world.rank)).sum().backward()
            wrapped.check_gradients(wrapped.parameters())
            wrapped.zero_grad()
            with wrapped.no_sync():
                wrapped(inputs_of(world.rank), with_second=in_first).sum().backward()
            wrapped(inputs_of(world.rank), with_second=False).sum().backward()
            with pytest.raises(JobFailed, match=r"try parallel\.find_unused_parameters=true") as caught:
                wrapped.check_gradients(wrapped.parameters())
            messages.append(str(caught.value))
        return messages

    for in_both, in_none in on_ranks(tmp_path, 2, act):
        assert "all parameters" in in_both and "second.weight, second.bias" in in_none


def test_an_unused_parameter_has_the_gradient_of_the_other_ranks(tmp_path: Path) -> None:
    def act(world: World) -> list[Any]:
        wrapped = FixedBuckets(Model(), find_unused_parameters=True, **SEVERAL)
        assert wrapped.sum_on_cpu()
        results = []
        for users in ((0, 2), (), (1,)):
            wrapped.zero_grad()
            wrapped(inputs_of(world.rank), with_second=world.rank in users).sum().backward()
            results.append(gradients(wrapped))
        return results

    for result in on_ranks(tmp_path, 3, act):
        for users, found in zip(((0, 2), (), (1,)), result, strict=True):
            of_ranks = [local_gradients(rank, with_second=rank in users) for rank in range(3)]
            expected = [torch.stack(parts).sum(0) for parts in zip(*of_ranks, strict=True)]
            for name, total, whole in zip(dict(Model().named_parameters()), found, expected, strict=True):
                if name.startswith("second") and not users:
                    assert total is None
                else:
                    torch.testing.assert_close(total, whole)


def test_sparse_gradients_are_summed_by_the_process_group(tmp_path: Path) -> None:
    def act(world: World) -> list[Any]:
        table = nn.Embedding(5, 2, sparse=True)
        wrapped = FixedBuckets(nn.Sequential(table, nn.Linear(2, 3)))
        assert wrapped.sum_on_cpu()
        wrapped(torch.tensor([world.rank, 4])).sum().backward()
        assert table.weight.grad is not None and table.weight.grad.is_sparse
        return [table.weight.grad.to_dense(), wrapped.module[1].bias.grad]

    of_table, of_bias = on_ranks(tmp_path, 2, act)[0]
    assert (of_table != 0).all(1).tolist() == [True, True, False, False, True]
    assert torch.equal(of_table[4], of_table[0] + of_table[1]) and of_bias.tolist() == [4.0] * 3
